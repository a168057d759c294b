"""drive(): what happens in which order; and the simulated executor's clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twofold import events as ev
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.sched.phase import mermaid
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import Workload

DOCS = Path(__file__).parents[2] / "docs"


class Log:
    """A recorder, and beside it what the executor was asked to do."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Event, list[Command], list[Any]]] = []

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        self.entries.append((now_s, event, list(commands), list(rows)))


class WatchedExecutor(SimExecutor):
    log: Log

    def submit(self, command: Command) -> None:
        assert command in self.log.entries[-1][2], "submitted before it was committed"
        super().submit(command)

    def take_rows(self) -> list[Any]:
        return [len(self.log.entries)]


def simulate(
    spec: SchedulerSpec, workload: Workload, costs: Costs | None = None
) -> tuple[Log, SimExecutor]:
    executor = WatchedExecutor(workload, spec, costs=costs)
    executor.log = Log()
    outcome = drive(Scheduler(spec), executor, executor.log, ev.RunStarted())
    assert outcome == "done"
    return executor.log, executor


def spec(**options: int) -> SchedulerSpec:
    small = {"steps": 4, "groups_per_step": 2, "group_size": 2, "max_staleness": 1,
             "max_running_samples": 4}  # fmt: skip
    return SchedulerSpec(**{**small, **options})


def test_an_event_is_committed_with_its_commands_and_rows_before_they_are_submitted() -> None:
    log, _ = simulate(spec(), Workload(seed=0, group_size=2))
    assert isinstance(log.entries[0][1], ev.RunStarted)
    assert log.entries[-1][2] == []
    assert [rows for *_, rows in log.entries] == [[n] for n in range(len(log.entries))]
    times = [now_s for now_s, *_ in log.entries]
    assert times == sorted(times)


def test_the_clock_adds_up_for_a_synchronous_step() -> None:
    costs = Costs(
        decode_step_s=1,
        prefill_token_s=0.125,
        train_s=10,
        publish_s=2,
        to_generate_s=100,
        to_train_s=100,
        checkpoint_s=50,
    )
    workload = Workload(seed=0, group_size=1, max_tokens=1, prompt_tokens=8)
    sizes = spec(steps=1, groups_per_step=1, group_size=1, max_staleness=0)
    log, _ = simulate(sizes, workload, costs)
    reward_s = workload.group(0).reward_s
    assert log.entries[-1][0] == pytest.approx(3 * 100 + 1 + 1 + reward_s + 10 + 2 + 50)


def test_staleness_buys_time_when_a_few_samples_are_long() -> None:
    """With S = 0 the slots are empty while the last samples of a batch finish."""
    workload = Workload(seed=3, group_size=4, max_tokens=200, long_tail=0.05)
    took_s = {}
    for max_staleness in (0, 1):
        sizes = spec(steps=12, groups_per_step=4, group_size=4, max_staleness=max_staleness,
                     max_running_samples=16)  # fmt: skip
        log, executor = simulate(sizes, workload)
        took_s[max_staleness] = log.entries[-1][0]
        assert max(executor.staleness) == max_staleness
    assert took_s[1] < 0.85 * took_s[0], took_s


def test_trained_lengths_match_the_submitted_ones() -> None:
    """No length bias at the end of a run: everything that started was trained."""
    workload = Workload(seed=5, group_size=2, max_tokens=100, long_tail=0.2)
    sizes = spec(steps=10, max_staleness=3, max_running_samples=8)
    _, executor = simulate(sizes, workload)
    submitted = sum(sum(workload.group(gid).lengths) for gid in range(20))
    assert executor.trained == set(range(20))
    assert executor.staleness.total() == submitted


def test_the_diagram_in_the_docs_is_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (DOCS / "stalesync.md").read_text()
