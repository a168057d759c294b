"""Does staleness cost learning? The quickstart at several thresholds and seeds, equal samples.

    python bench/staleness.py [--staleness 0 1 2 4] [--seeds 0 1 2] [--out runs/staleness]

Trains `examples/quickstart.toml` once per threshold S and seed, each run on a core of its own, as
many at a time as there are cores. Runs that are done already (same --out) are not repeated, and
cut ones are resumed. Then it reads the records: the stalest trained token and the dropped groups
of every run (counted here, from the tokens themselves), and the held-out pass rate before and
after. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofold.obs.record import Record
from twofold.threads import usable_cpus

ROOT = Path(__file__).parent.parent
STALEST = """SELECT max(groups.trained_version - chunks.version) FROM chunks JOIN groups
    USING (group_id) WHERE groups.trained_version IS NOT NULL"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--eval-samples", type=int, default=16, help="per held-out prompt")
    arguments = parser.parse_args()
    pending = [(s, seed) for seed in arguments.seeds for s in arguments.staleness]
    train_all(pending, arguments.out, arguments.eval_samples)
    report(arguments.out, arguments.staleness, arguments.seeds)


def train_all(pending: list[tuple[int, int]], out: Path, eval_samples: int) -> None:
    """One run per core at a time, each on one thread."""
    free, running = sorted(usable_cpus()), {}
    while pending or running:
        while pending and free:
            cpu = free.pop()
            running[start(*pending.pop(0), out, eval_samples, cpu)] = cpu
        pid, status = os.wait()
        process = next(process for process in running if process.pid == pid)
        free.append(running.pop(process))
        if status:
            sys.exit(f"a run failed: {' '.join(map(str, process.args))}")


def start(s: int, seed: int, out: Path, eval_samples: int, cpu: int) -> subprocess.Popen[bytes]:
    run_dir = out / f"s{s}-seed{seed}"
    command = [sys.executable, "-m", "twofold"]
    if not (run_dir / "record.sqlite").exists():
        command += ["train", str(ROOT / "examples/quickstart.toml"), f"--run.dir={run_dir}"]
        command += [f"--sched.max_staleness={s}", f"--run.seed={seed}", "--run.save_model=false"]
        command += [f"--run.eval_samples={eval_samples}", "--run.tensorboard=false"]
    elif finished(run_dir):
        command = ["true"]
    else:
        command += ["resume", str(run_dir)]
    print(f"S={s} seed={seed}: {' '.join(command)}", flush=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run_dir}.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )


def finished(run_dir: Path) -> bool:
    steps = read(run_dir)["steps"]
    return len(read(run_dir)["pass_rate"]) == 2 and steps is not None


def read(run_dir: Path) -> dict[str, Any]:
    with Record.open(run_dir, read_only=True) as record:
        ((stalest,),) = record.query(STALEST)
        ((dropped,),) = record.query("SELECT count(*) FROM groups WHERE status = 'dropped'")
        ((steps, trained),) = record.query("SELECT max(trained_version) + 1, count(*) FROM groups")
        ((seconds,),) = record.query("SELECT max(time_s) FROM events")
        return {
            "stalest": stalest,
            "dropped": dropped,
            "steps": steps,
            "groups": trained,
            "seconds": seconds,
            "staleness": statistics.fmean(
                [row.value for row in record.metrics("staleness/mean")] or [0.0]
            ),
            "pass_rate": [row.value for row in record.metrics("eval/pass_rate")],
            "greedy": [row.value for row in record.metrics("eval/greedy_pass_rate")],
            "stderr": [row.value for row in record.metrics("eval/pass_rate_stderr")],
        }


def report(out: Path, thresholds: Sequence[int], seeds: Sequence[int]) -> None:
    print("S  seed  steps  groups  stalest  mean  dropped  before  after  ± s.e.  greedy  seconds")
    finals: dict[int, list[float]] = {}
    for s in thresholds:
        for seed in seeds:
            r = read(out / f"s{s}-seed{seed}")
            before, after = r["pass_rate"]
            print(
                f"{s}  {seed:4}  {r['steps']:5}  {r['groups']:6}  {r['stalest']:7}"
                f"  {r['staleness']:4.2f}  {r['dropped']:7}  {before:6.3f}  {after:5.3f}"
                f"  {r['stderr'][1]:6.3f}  {r['greedy'][1]:6.3f}  {r['seconds']:7.0f}"
            )
            assert r["stalest"] <= s, f"a token {r['stalest']} versions old was trained at S={s}"
            finals.setdefault(s, []).append(after)
    base = thresholds[0]
    result = {}
    for s, values in finals.items():
        # the spread over seeds is the error that counts: draws within a run share its weights
        error = math.hypot(*(_stderr(finals[k]) for k in (s, base)))
        difference = statistics.fmean(values) - statistics.fmean(finals[base])
        print(
            f"S={s}: {statistics.fmean(values):.3f} ± {_stderr(values):.3f}, against S={base}: "
            f"{difference:+.3f}, standard error {error:.3f}"
        )
        result[f"s{s}"] = {"pass_rate": statistics.fmean(values), "stderr": _stderr(values)}
    print(json.dumps({"name": "staleness", "seeds": len(seeds), **result}))


def _stderr(values: Sequence[float]) -> float:
    """Standard error of the mean over seeds."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
