"""How fast the simulator is, and how the scheduler's time grows: `python bench/sim_scale.py`.

The first run is 10^6 samples on 1,536 cards (192 replicas of 8, both jobs on every card); the
others hold four, sixteen, ... times as many live groups on the same replicas, over as many events,
so that events/s shows the growth. Simulated; the seconds are real, of one process on one core.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from typing import Any

from twofold import events as ev
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import Workload

CARDS, CARDS_PER_REPLICA, GROUP_SIZE = 1536, 8, 16


class Timed:
    """A scheduler whose own seconds are counted."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.scheduler, self.seconds, self.most_live = Scheduler(spec), 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        start = time.perf_counter()
        commands = self.scheduler.handle(event, now_s)
        self.seconds += time.perf_counter() - start
        self.most_live = max(self.most_live, len(self.scheduler.stream.live))
        return commands


class Counted:
    n_events = 0

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        self.n_events += 1


def simulate(groups_per_step: int, steps: int, staleness: int) -> dict[str, float]:
    spec = SchedulerSpec(
        steps=steps,
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=staleness,
        max_running_samples=256,
        quantum_decode_steps=64,
        placement=Placement(cards=CARDS, cards_per_replica=CARDS_PER_REPLICA),
    )
    workload = Workload(seed=0, group_size=GROUP_SIZE, max_tokens=2048, long_tail=0.01)
    scheduler, executor, counted = Timed(spec), SimExecutor(workload, spec), Counted()
    start = time.perf_counter()
    outcome = drive(scheduler, executor, counted, ev.RunStarted())  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    assert outcome == "done", outcome
    assert max(executor.staleness) <= staleness
    return {
        "samples": groups_per_step * steps * GROUP_SIZE,
        "live_groups": scheduler.most_live,
        "events": counted.n_events,
        "seconds": seconds,
        "scheduler_events_per_s": counted.n_events / scheduler.seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    print("real seconds of a simulation, one core")
    print(f"{'samples':>9} {'live':>7} {'events':>8} {'seconds':>8} {'events/s':>9} {'peak GB':>8}")
    rows = []
    for groups_per_step, steps in ((3125, 20), (512, 16), (2048, 4), (8192, 1)):
        row = simulate(groups_per_step, steps, staleness=2)
        rows.append(row)
        print(
            f"{row['samples']:9} {row['live_groups']:7} {row['events']:8} {row['seconds']:8.1f}"
            f" {row['scheduler_events_per_s']:9.0f} {row['peak_gb']:8.2f}",
            flush=True,
        )
    print(json.dumps({"name": "sim_scale", **rows[0], "growth": rows[1:]}))


if __name__ == "__main__":
    main()
