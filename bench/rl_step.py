"""Whole RL steps: Twofold against TRL's GRPOTrainer, side by side.

    python bench/rl_step.py [--rounds 2] [--until 0.9]

Same model (SmolLM2-135M-Instruct), prompts (one-digit addition), 8 prompts x 8 completions of at
most 64 tokens, learning rate, no KL. The sides take turns; each turn is a new process, whose first
step is left out (it compiles and allocates). TRL runs in float32 and, if the CPU has instructions
for it, bfloat16; its better one counts. Our turn is S = 0: every step generates, rewards and
trains its own batch, as TRL does, and the early steps are compared, where both still have groups
to train on. `--until R` goes on with one long run a side and tells the seconds (without start-up)
until the mean reward of 5 steps reaches R. The last line is one JSON object; the share of the
matmul limit is in `bench/train_step.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe, dtypes
from peers.environment import python_of

from twofold.model.resolve import resolve
from twofold.obs.record import Record

ROOT = Path(__file__).parents[1]
PINNED = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
TRL = ["torch", "transformers", "trl==1.13.0", "requests"]
LEARNING_RATE = 2e-5
Step = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--trl-steps", type=int, default=3, help="steps of a TRL turn, one warm-up")
    parser.add_argument("--our-steps", type=int, default=9, help="steps of our turn, one warm-up")
    parser.add_argument("--until", type=float, default=0.0, help="mean reward to reach; 0: skip")
    a = parser.parse_args()
    folder, _ = resolve("smollm2-135m-instruct")
    trl = python_of("trl-1.13.0", TRL)
    trl_dtypes = dtypes()
    times: dict[str, list[float]] = {}
    for turn in range(a.rounds):
        for side, steps in turns(folder, trl, trl_dtypes, a.our_steps, a.trl_steps):
            rows = list(steps)[1:]
            seconds = [row["seconds"] for row in rows]
            times.setdefault(side, []).extend(seconds)
            shown = ", ".join(f"{s:.1f}" for s in seconds)
            print(f"turn {turn + 1} {side:14} seconds per step: {shown}", flush=True)
    medians = {side: statistics.median(seconds) for side, seconds in times.items()}
    best = min((side for side in medians if side.startswith("trl")), key=lambda s: medians[s])
    print(f"\n{'side':14} {'median s/step':>14} {'min':>6} {'max':>6} {'TRL best / this':>16}")
    for side, seconds in times.items():
        print(
            f"{side:14} {medians[side]:14.2f} {min(seconds):6.2f} {max(seconds):6.2f}"
            f" {medians[best] / medians[side]:16.2f}"
        )
    result: dict[str, Any] = {
        "name": "rl_step",
        "ours": medians["ours"],
        "theirs": medians[best],
        "ratio": medians[best] / medians["ours"],
        "limit": None,  # of a whole step there is none: see train_step and rollout
        "unit": "seconds per step, lower is better",
        "theirs_is": best,
        "machine": describe(),
    }
    if a.until:
        result["seconds_until"] = {
            "reward": a.until,
            "ours": until(our_turn(folder, 60, staleness=1), a.until),
            best: until(trl_turn(trl, folder, best.removeprefix("trl "), 60), a.until),
        }
    print(json.dumps(result))


def turns(
    folder: Path, trl: Path, trl_dtypes: list[str], our_steps: int, trl_steps: int
) -> Iterator[tuple[str, Iterator[Step]]]:
    yield "ours", our_turn(folder, our_steps, staleness=0)
    for dtype in trl_dtypes:
        yield f"trl {dtype}", trl_turn(trl, folder, dtype, trl_steps)


def our_turn(folder: Path, steps: int, staleness: int) -> Iterator[Step]:
    """One step after the other, with the whole time from one update to the next."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        options = {
            "model.name": folder, "run.dir": run_dir, "run.eval_samples": 1,
            "run.tensorboard": "false", "run.save_model": "false", "run.checkpoint_every": 0,
            "task.held_out": 24, "rollout.max_new_tokens": 64, "train.steps": steps,
            "train.learning_rate": LEARNING_RATE, "sched.max_staleness": staleness,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        config = ROOT / "examples" / "quickstart.toml"
        run([sys.executable, "-m", "twofold", "train", str(config), *words])
        with Record.open(run_dir, read_only=True) as record:
            seconds = {row.version: row.value for row in record.metrics("time/step_s")}
            evals = {row.version: row.value for row in record.metrics("time/eval")}
            rewards = {row.version: row.value for row in record.metrics("reward/mean")}
    for version in sorted(seconds):
        # the evaluation before the first step is not part of a step
        yield {
            "step": version,
            "seconds": seconds[version] - evals.get(version, 0.0),
            "reward": rewards.get(version, 0.0),
        }


def trl_turn(python: Path, folder: Path, dtype: str, steps: int) -> Iterator[Step]:
    micro_batch = {"bfloat16": "16", "float32": "8"}[dtype]  # the better ones of 8, 16, 32
    script = ROOT / "bench" / "peers" / "trl_grpo.py"
    words = ["--model", str(folder), "--dtype", dtype, "--steps", str(steps)]
    words += ["--micro-batch", micro_batch, "--learning-rate", str(LEARNING_RATE)]
    output = run([str(python), str(script), *words])
    for line in output.splitlines():
        if line.startswith('{"step"'):
            yield json.loads(line)


def run(command: list[str]) -> str:
    environment = {**os.environ, **PINNED, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def until(steps: Iterator[Step], reward: float) -> float | None:
    """Seconds until the mean reward of the last 5 steps reached it; None: it never did."""
    seconds, rewards = 0.0, []
    for step in steps:
        seconds += step["seconds"]
        rewards.append(step["reward"])
        if len(rewards) >= 5 and statistics.fmean(rewards[-5:]) >= reward:
            return seconds
    return None


if __name__ == "__main__":
    main()
