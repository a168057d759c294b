"""A few hundred schedules and the smallest model checks: what `test_mutations` runs many times."""

from __future__ import annotations

from model_check import explore
from schedules import check_history, run_schedule

from twofold.sched.placement import Placement
from twofold.sched.scheduler import SchedulerSpec


def test_schedules() -> None:
    for seed in range(200):
        check_history(run_schedule(seed))


def test_interleavings() -> None:
    for placement in (Placement(cards=2), Placement(cards=2, generate_only=1, train_only=1)):
        explore(
            SchedulerSpec(
                steps=2,
                groups_per_step=1,
                group_size=1,
                max_staleness=1,
                max_running_samples=2,
                placement=placement,
            ),
            faults=0,
        )
