"""Calibration reads what real runs write: who ran in each quantum is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config

from twofold.runtime.run import train
from twofold.sim.calibrate import calibrate
from twofold.sim.observe import observe

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize(
    "changes",
    [
        {"sched__max_staleness": 0},
        {"sched__max_staleness": 2, "train__steps": 6},
        {"sched__max_staleness": 2, "rollout__kv_after_update": "keep"},
        {"sched__max_staleness": 1, "rollout__max_running_samples": 3, "run__deterministic": False},
        {"sched__max_staleness": 1, "train__kl_coef": 0.1},
    ],
)
def test_every_quantum_of_a_real_run_is_rebuilt(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = small_config(folder, tmp_path / "run", **changes)
    assert train(config, even_sum).outcome == "done"
    seen = observe(tmp_path / "run")
    assert seen.n_lost == 0 and seen.measured.n_steps == config.train.steps
    chunks = {quantum.tokens for quantum in seen.quanta}
    assert len(seen.quanta) > 5 and len(chunks) > 1
    for quantum in seen.quanta:
        assert quantum.tokens <= quantum.steps * config.rollout.max_running_samples
        assert quantum.context_tokens >= quantum.tokens
    assert seen.quanta[0].prefill_tokens > 0
    calibration = calibrate([tmp_path / "run"])
    assert calibration.costs.train_s + calibration.costs.train_token_s > 0
    assert ("score" in calibration.errors) == (config.train.kl_coef > 0)
    kept = any("kv_after_update" in note for note in calibration.notes)
    assert kept == (config.rollout.kv_after_update == "keep")


def test_a_run_with_preemption_is_used_as_far_as_it_adds_up(folder: Path, tmp_path: Path) -> None:
    changes = {"rollout__kv_cache_tokens": 96, "rollout__kv_block_tokens": 4}
    config = small_config(folder, tmp_path / "run", **changes)
    assert train(config, even_sum).outcome == "done"
    seen = observe(tmp_path / "run")
    assert seen.n_lost > 0, "nothing was preempted: this shows nothing"
    assert len(seen.quanta) > 5
    found = calibrate([tmp_path / "run"])
    assert len(found.groups) == 8 and any("cannot be told" in note for note in found.notes)
