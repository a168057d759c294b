"""Every interleaving of small runs is within the rule, and every one can end (`model_check.py`).

The largest instances take minutes: `pytest -m soak tests/sim/test_model_check.py`.
"""

from __future__ import annotations

import pytest
from model_check import explore

from twofold.sched.placement import Placement
from twofold.sched.scheduler import SchedulerSpec

PLACEMENTS = {
    "one card": Placement(),
    "two cards with both jobs": Placement(cards=2),
    "a card for each job": Placement(cards=2, generate_only=1, train_only=1),
    "one with both, one generates": Placement(cards=2, generate_only=1),
}


def spec(placement: Placement, max_staleness: int, **other: int | bool) -> SchedulerSpec:
    small = {"steps": 2, "groups_per_step": 1, "group_size": 1, "max_running_samples": 2}
    return SchedulerSpec(
        **{**small, **other},
        max_staleness=max_staleness,
        placement=placement,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("max_staleness", [0, 1])  # two steps: 2 is as 1
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_interleaving_with_one_fault(name: str, max_staleness: int) -> None:
    n_states = explore(spec(PLACEMENTS[name], max_staleness))
    assert n_states > 50, "that is not all"


@pytest.mark.parametrize(
    ("name", "max_staleness"),
    [("one card", 1), ("two cards with both jobs", 0), ("a card for each job", 1)],
)
def test_every_interleaving_of_batches_of_two_groups(name: str, max_staleness: int) -> None:
    n_states = explore(spec(PLACEMENTS[name], max_staleness, groups_per_step=2), faults=0)
    assert n_states > 30, "that is not all"


@pytest.mark.parametrize("name", ["one card", "a card for each job"])
def test_every_interleaving_with_evaluation_reference_and_two_updates(name: str) -> None:
    more = {"evaluate": True, "eval_every": 1, "needs_reference": True, "updates_per_batch": 2}
    assert explore(spec(PLACEMENTS[name], 3, **more)) > 100


@pytest.mark.soak
@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize(("steps", "groups_per_step"), [(3, 1), (2, 2)])
def test_every_interleaving_of_larger_runs(
    name: str, max_staleness: int, steps: int, groups_per_step: int
) -> None:
    n_states = explore(
        spec(PLACEMENTS[name], max_staleness, steps=steps, groups_per_step=groups_per_step)
    )
    print(f"{name}, S={max_staleness}, P={groups_per_step}, {steps} steps: {n_states:,} states")
