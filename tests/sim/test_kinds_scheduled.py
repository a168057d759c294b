"""Kinds of failure that people report of RL frameworks, each with a test by its number: those that
the scheduler alone decides, in simulation. (The others: tests/test_kinds.py.)

 2  deadlock around a switch while requests are outstanding or arrive
 7  the promised staleness is exceeded: on resume, with several updates a batch, with "0" that is 1
 8  slow or long prompts starve or are thrown away, so short ones are learnt
"""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from schedules import FlakyExecutor, History, Recorder, check_history, run_schedule

from twofold import events as ev
from twofold.runtime.loop import drive
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import Workload

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("generate_only", [0, 2], ids=["shared", "mixed"])
def test_kind_02_any_number_outstanding_when_cards_switch(generate_only: int) -> None:
    """Samples decode or wait for a slot, and rewards are slow, whenever a batch is there: every
    switch completes, every sample ends exactly once, every command too."""
    spec = SchedulerSpec(
        steps=12,
        groups_per_step=8,
        group_size=5,
        max_staleness=3,
        max_running_samples=16,
        quantum_decode_steps=3,
        evaluate=True,
        eval_every=2,
        placement=Placement(cards=4, generate_only=generate_only),
    )
    workload = Workload(seed=7, group_size=5, max_tokens=64, reward_s=2.0)
    history = History(spec, None)
    scheduler, executor = Scheduler(spec), SimExecutor(workload, spec, costs=Costs(train_s=0.5))
    recorder = MostUnfinished(history, scheduler, Random(0), crash=0.0)
    history.outcome = drive(scheduler, executor, recorder, ev.RunStarted())
    history.staleness = executor.staleness
    assert history.outcome == "done"
    check_history(history)
    ended = Counter(
        sample[:2] for e in history.events if isinstance(e, ev.Generated) for sample in e.finished
    )
    assert ended.keys() == {(gid, i) for gid in range(96) for i in range(5)}
    assert set(ended.values()) == {1}
    switches = [c for c in history.commands if isinstance(c, ev.Switch)]
    assert len(switches) > 24 and recorder.unfinished_at_a_switch > 10


class MostUnfinished(Recorder):
    unfinished_at_a_switch = 0

    def commit(self, now_s, event, commands, rows):  # type: ignore[no-untyped-def]
        super().commit(now_s, event, commands, rows)
        if any(isinstance(c, ev.Switch) for c in commands):
            n = self.scheduler.stream.all_unfinished_samples()
            self.unfinished_at_a_switch = max(self.unfinished_at_a_switch, n)


def test_kind_07_staleness_is_bounded_on_resume_and_with_several_updates() -> None:
    """Random runs that crash and go on; the executor counts tokens in optimizer updates."""
    reached, crashed_and_stale = Counter[int](), 0
    for seed in range(400):
        history = run_schedule(seed)
        bound, oldest = history.spec.max_staleness, max(history.staleness, default=0)
        assert oldest <= bound, f"schedule {seed}: a token {oldest} updates old, allowed {bound}"
        if oldest == bound:
            reached[history.spec.updates_per_batch] += 1
            crashed_and_stale += history.n_crashes > 0
    assert reached[1] > 50 and reached[2] > 10 and reached[3] > 10, reached
    assert crashed_and_stale > 10


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(cards=3),
        Placement(cards=3, generate_only=2, train_only=1),
        Placement(cards=3, generate_only=1),
    ],
    ids=lambda placement: f"{placement.name}-{placement.cards}",
)
def test_kind_07_zero_is_the_synchronous_order(placement: Placement) -> None:
    """S = 0, weights late, rewards late, failures: all groups of step t are started under version t
    and before anything of step t + 1, and every trained token has staleness 0."""
    spec = SchedulerSpec(
        steps=6,
        groups_per_step=3,
        group_size=2,
        max_staleness=0,
        max_running_samples=4,
        placement=placement,
    )
    executor = FlakyExecutor(Workload(seed=1, group_size=2), spec, costs=Costs(fetch_s=3.0))
    history = History(spec, None)
    recorder = Recorder(history, scheduler := Scheduler(spec), Random(0), crash=0.0)
    history.outcome = drive(scheduler, executor, recorder, ev.RunStarted())
    history.staleness = executor.staleness
    check_history(history)
    assert history.outcome == "done" and set(history.staleness) == {0}
    trained = [c for c in history.commands if isinstance(c, ev.Train)]
    assert [c.group_ids for c in trained] == [(3 * t, 3 * t + 1, 3 * t + 2) for t in range(6)]
    starts = [
        (c.version, group.start_version, group.group_id)
        for c in history.commands
        if isinstance(c, ev.Generate)
        for group in c.admit
    ]
    assert starts == [(gid // 3, gid // 3, gid) for gid in range(18)]


def test_kind_08_long_samples_are_neither_dropped_nor_left_behind() -> None:
    """Pareto lengths with a cap of 50 medians: at every S the mean length trained in the middle of
    the run is that of what was started then; and more staleness never takes longer while a pause
    is cheap."""
    long_tail = runpy.run_path(str(BENCH / "long_tail.py"))
    sweep, regimes = long_tail["simulate"], long_tail["REGIMES"]
    for name in ("empty slots cost", "slots full"):
        rows = [sweep(staleness, *regimes[name], 60) for staleness in (0, 1, 4)]
        for row in rows:
            assert row["trained_over_started"] == pytest.approx(1, abs=0.02), (name, row)
        seconds = [row["seconds"] for row in rows]
        assert seconds == sorted(seconds, reverse=True), (name, seconds)
        gain = seconds[0] / seconds[-1]
        assert gain > 2 if name == "empty slots cost" else gain < 1.02, (name, gain)
