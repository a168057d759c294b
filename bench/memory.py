"""Does the memory forecast hold? SmolLM2-135M in some configurations, forecast against measured.

    python bench/memory.py [--configs bf16 fp32 ...] [--out runs/memory]

Where a CPU has no bfloat16 instructions, ask for those with fp32 only: the others take hours. Each
configuration is a run of two steps in a process of its own, one after the other; evaluation is
off. Completions are sampled at a high temperature, so that they go on to `max_new_tokens`: the
forecast is for the longest ones. Forecasts come from the code that a run asks before its first
step; measured is the peak that the run recorded (`memory/PHASE_gb`). On a CPU freed memory stays
with the process, so generation and scoring are measured in the first step, where no larger phase
came before them, and training in both. Memory does not depend on what else the machine does. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twofold.config import Config, to_toml
from twofold.memory.ledger import GB
from twofold.model import resolve
from twofold.obs.record import Record
from twofold.runtime.memory import forecaster
from twofold.tasks.load import load_task

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Case:
    dtype: str
    reference: bool
    micro_batch_tokens: int
    running_samples: int
    groups_per_step: int
    max_new_tokens: int


CASES = {
    "bf16": Case("bfloat16", False, 2048, 64, 8, 64),
    "fp32": Case("float32", False, 2048, 16, 2, 256),
    "bf16-reference": Case("bfloat16", True, 1024, 64, 8, 256),
    "fp32-reference": Case("float32", True, 1024, 16, 2, 512),
    "fp32-short": Case("float32", False, 1024, 64, 8, 64),
    "fp32-reference-short": Case("float32", True, 2048, 64, 4, 64),
}


def parity(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """A reward that varies in every group, so that every sample is trained."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def config_of(case: Case, run_dir: Path) -> Config:
    config = Config()
    config.model.dtype = case.dtype
    config.task.held_out = 0
    config.reward.function = f"{ROOT}/bench/memory.py:parity"
    config.rollout.max_new_tokens, config.rollout.temperature = case.max_new_tokens, 4.0
    config.rollout.max_running_samples = case.running_samples
    config.sched.groups_per_step, config.sched.max_staleness = case.groups_per_step, 0
    config.train.steps, config.train.micro_batch_tokens = 2, case.micro_batch_tokens
    config.train.kl_coef = 0.01 if case.reference else 0.0
    config.run.dir = str(run_dir)
    config.run.checkpoint_every, config.run.save_model, config.run.tensorboard = 0, False, False
    return config


def measured(config: Config) -> dict[str, float]:
    """Runs it; the peak of each phase, in GB, and of all."""
    run_dir = Path(config.run.dir)
    options = run_dir.with_suffix(".toml")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    options.write_text(to_toml(config))
    command = [sys.executable, "-m", "twofold", "train", str(options)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    peaks: dict[str, float] = {}
    with Record.open(run_dir, read_only=True) as record:
        for row in record.metrics():
            if row.name.startswith("memory/"):
                phase = row.name.removeprefix("memory/").removesuffix("_gb")
                if row.version == 1 or phase == "train":
                    peaks[phase] = max(row.value, peaks.get(phase, 0.0))
                peaks["peak"] = max(row.value, peaks.get("peak", 0.0))
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    arguments = parser.parse_args()
    device = torch.device("cpu")
    rows: list[tuple[str, str, float, float]] = []
    for name in arguments.configs:
        config = config_of(CASES[name], arguments.out / name)
        folder, _ = resolve.resolve(config.model.name)
        predict, _ = forecaster(config, folder, load_task(config.task), device)
        ledger = predict(config)
        peaks = measured(config)
        expected = 0.0
        for phase in ledger.phases:  # in the order of a step; what is freed stays with the process
            expected = max(expected, ledger.total(phase) / GB)
            rows.append((name, str(phase), expected, peaks[phase]))
        rows.append((name, "peak", ledger.peak / GB, peaks["peak"]))
    print(f"{'configuration':16} {'phase':10} {'forecast':>8} {'measured':>8}  error")
    for name, phase, expected, found in rows:
        print(f"{name:16} {phase:10} {expected:8.2f} {found:8.2f}  {expected / found - 1:+.1%}")
    errors = {name: round(e / f - 1, 4) for name, phase, e, f in rows if phase == "peak"}
    worst = max(abs(error) for error in errors.values())
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}"
    summary = {"name": "memory", "errors": errors, "worst": worst, "limit": 0.15}
    print(json.dumps({**summary, "machine": machine}))


if __name__ == "__main__":
    main()
