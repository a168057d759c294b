"""Where every second of every card went: it adds up, and to the right causes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.sim import schedules

from twofold import events as ev
from twofold.events import Event
from twofold.obs.card_time import HOST, LOST, CardTime, Seconds, card_time
from twofold.obs.meters import report, step_meters
from twofold.obs.record import Record
from twofold.runtime.loop import drive
from twofold.sched.idle import Cause, Idle
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler, SchedulerSpec, UnitState
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import Workload

SEEDS = range(120)
TAILED = Workload(seed=1, group_size=4, max_tokens=400, long_tail=0.03)


def spec(**options: object) -> SchedulerSpec:
    small = {"steps": 8, "groups_per_step": 4, "group_size": 4, "max_staleness": 0,
             "max_running_samples": 16}  # fmt: skip
    return SchedulerSpec(**{**small, **options})  # type: ignore[arg-type]


class Log:
    def __init__(self) -> None:
        self.history: list[tuple[float, Event]] = []

    def commit(self, now_s: float, event: Event, commands: object, rows: object) -> None:
        self.history.append((now_s, event))


def simulate(
    spec: SchedulerSpec, workload: Workload = TAILED, **costs: float
) -> list[tuple[float, Event]]:
    log = Log()
    executor = SimExecutor(workload, spec, costs=Costs(**costs))
    assert drive(Scheduler(spec), executor, log, ev.RunStarted()) == "done"
    return log.history


def share(time: CardTime, name: str) -> float:
    cards = time.total().cards
    return cards.by_name.get(name, 0.0) / cards.total_s


# ---------------------------------------------------------------- it adds up


@pytest.mark.parametrize("part", range(3))
def test_busy_and_idle_seconds_are_the_wall_time_of_every_card(part: int) -> None:
    """Of each card, each step and the whole, whatever faults, stops and crashes."""
    for seed in SEEDS[part::3]:
        history = schedules.run_schedule(seed, checked=False)
        time = card_time([(now_s, event) for now_s, event, _ in history.entries], history.spec)
        n_cards = history.spec.placement.cards
        assert len(time.cards) == n_cards
        for card in time.cards:
            assert card.total_s == pytest.approx(time.wall_s, abs=1e-9), f"seed {seed}"
            assert sum(card.busy.values()) + sum(card.idle.values()) == pytest.approx(card.total_s)
            assert min(card.by_name.values(), default=0) >= 0
        for step in time.steps:
            assert step.cards.total_s == pytest.approx(step.wall_s * n_cards, abs=1e-9), seed
        by_card = Seconds()
        for card in time.cards:
            by_card.add_all(card)
        assert by_card.by_name == pytest.approx(time.total().cards.by_name), f"seed {seed}"
        versions = [e.version for e in history.events if isinstance(e, ev.Published)]
        assert [step.version for step in time.steps] == [0, *versions]


def test_a_card_is_busy_for_as_long_as_its_commands_took() -> None:
    for placement in (Placement(), Placement(cards=5, generate_only=2, train_only=1)):
        sizes = spec(max_staleness=1, placement=placement)
        history, took_s = simulate(sizes), 0.0
        commands = {}
        scheduler = Scheduler(sizes)
        for now_s, event in history:
            commands |= {command.seq: command for command in scheduler.handle(event, now_s)}
            if isinstance(event, ev.Terminal):
                took_s += event.seconds * len(commands[event.command].cards)
        busy = card_time(history, sizes).total().cards.busy
        assert sum(busy.values()) == pytest.approx(took_s)
        assert {"generate", "train", "publish", "switch"} <= busy.keys()


# ---------------------------------------------------------------- to the right causes


def test_one_card_waits_for_rewards_and_a_larger_bound_hides_them() -> None:
    slow = replace(TAILED, reward_s=4.0)
    waits = {}
    for max_staleness in (0, 1, 3):
        sizes = spec(steps=16, max_staleness=max_staleness)
        time = card_time(simulate(sizes, slow), sizes)
        assert time.total().cards.idle.keys() <= {"reward", "over"}
        waits[max_staleness] = share(time, "reward")
    assert waits[0] > 0.1 and waits[0] > 2 * waits[1] > 2 * waits[3], waits


def test_the_long_tail_is_idle_cards_beside_and_empty_slots_within_a_card() -> None:
    idle, empty = {}, {}
    for max_staleness in (0, 3):
        sizes = spec(steps=16, max_staleness=max_staleness, placement=Placement(cards=4))
        idle[max_staleness] = share(card_time(simulate(sizes), sizes), "long_tail")
        sizes = spec(steps=16, max_staleness=max_staleness)
        slots = card_time(simulate(sizes), sizes).total().slots
        empty[max_staleness] = 1 - slots.used
        if not max_staleness:  # all but the last step
            assert slots.empty.by_name["bound"] > 0.9 * slots.empty.total_s
    assert idle[0] > 0.2 and idle[3] < 0.7 * idle[0], idle
    assert empty[0] > 0.3 and empty[3] < 0.7 * empty[0], empty


def test_slow_weights_idle_the_replicas_that_wait_for_them() -> None:
    separated = Placement(cards=4, generate_only=3, train_only=1)
    sizes = spec(placement=separated)
    shares = [share(card_time(simulate(sizes, fetch_s=s), sizes), "weights") for s in (0.1, 10.0)]
    assert shares[0] < 0.02 and shares[1] > 0.1, shares


def test_slots_used_is_tokens_for_slots_and_steps() -> None:
    """One sample of 10 tokens at a time has 4 slots to itself."""
    one = Workload(seed=0, group_size=1, max_tokens=10, long_tail=1.0)
    sizes = spec(steps=3, groups_per_step=1, group_size=1, max_running_samples=4)
    time = card_time(simulate(sizes, one, decode_step_s=1.0, prefill_token_s=0.0), sizes)
    slots = time.total().slots
    assert slots.used == 0.25
    assert [(s.slots.n_tokens, s.slots.n_slot_steps) for s in time.steps] == [(10, 40)] * 3 + [
        (0, 0)
    ]
    # 30 s of generation, a quarter of the slots in use; in the last step nothing more is needed
    assert slots.empty.by_name == pytest.approx({"bound": 15.0, "over": 7.5})


def test_time_before_a_command_begins_is_the_hosts() -> None:
    """An executor takes a second to hand each command over. Where a reward came meanwhile, some of
    that second, and it, are its."""
    sizes = spec()
    swift = simulate(sizes)
    slow = [(time_s + n, event) for n, (time_s, event) in enumerate(swift)]
    before, after = card_time(swift, sizes).total().cards, card_time(slow, sizes).total().cards
    assert after.busy == pytest.approx(before.busy) and HOST not in before.by_name
    on_card = [not isinstance(event, ev.Rewarded | ev.RunStarted) for _, event in slow]
    n_alone = sum(own and last for last, own in pairwise(on_card))
    assert n_alone <= after.by_name[HOST] <= sum(on_card)


def test_a_reward_that_is_taken_before_the_next_command_was_waited_for() -> None:
    """As `run.deterministic` does it: the quantum is issued, the reward of before comes first."""
    sizes = spec(steps=2, groups_per_step=1, group_size=1, max_staleness=1)
    scheduler, history, now_s = Scheduler(sizes), [], 0.0

    def tell(event: Event, seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        scheduler.handle(event, now_s)
        history.append((now_s, event))

    tell(ev.RunStarted(), 0)
    tell(ev.Switched(command=0, seconds=1.0), 1.0)
    ended = (ev.Finished(0, 0, 1),)
    tell(ev.Generated(command=1, seconds=4.0, finished=ended, n_tokens=2, decode_steps=1), 4.0)
    reward, quantum = scheduler.outstanding()
    assert (reward.kind, quantum.kind) == ("Reward", "Generate")
    tell(ev.Rewarded(command=reward.seq, group_id=0, n_valid=1, varies=False), 3.0)
    ended = (ev.Finished(1, 0, 2),)
    tell(
        ev.Generated(command=quantum.seq, seconds=2.0, finished=ended, n_tokens=1, decode_steps=1),
        2.5,
    )
    (card,) = card_time(history, sizes).cards
    assert card.by_name == pytest.approx({"switch": 1, "generate": 6, "reward": 3, HOST: 0.5})


def test_what_a_dead_process_did_is_lost_and_the_pause_after_it_does_not_count() -> None:
    sizes = spec(steps=1, groups_per_step=1, group_size=1)
    history: list[tuple[float, Event]] = [
        (0.0, ev.RunStarted()),
        (1.0, ev.Switched(command=0, seconds=1.0)),
        (3.0, ev.StopRequested(reason="test")),  # while the quantum is under way; then it dies
        (900.0, ev.Resumed(epoch=1)),
        (905.0, ev.Generated(command=1, seconds=5.0, finished=(), n_tokens=1, decode_steps=1)),
    ]
    time = card_time(history, sizes)
    assert time.wall_s == 8.0
    assert time.cards[0].by_name == pytest.approx({"switch": 1, LOST: 2, "generate": 5})


# ---------------------------------------------------------------- records


def test_a_simulated_record_has_all_meters(tmp_path: Path) -> None:
    """Staleness of tokens and samples as the executor counts them, and a page of text."""
    sizes = spec(max_staleness=2, updates_per_batch=2, placement=Placement(cards=2))
    executor = SimExecutor(TAILED, sizes, with_rows=True)
    with Record.create(tmp_path, {}) as record:
        assert drive(Scheduler(sizes), executor, record, ev.RunStarted()) == "done"
        steps = step_meters(record)
        text = report(record, sizes)
    sizes = spec(max_staleness=2, placement=Placement(cards=2))
    executor = SimExecutor(TAILED, sizes, with_rows=True)
    with Record.create(tmp_path / "one", {}) as record:
        drive(Scheduler(sizes), executor, record, ev.RunStarted())
        for name, counted in (("staleness", executor.staleness),
                              ("sample_staleness", executor.staleness_of_samples)):  # fmt: skip
            found: Counter[int] = Counter()
            for step in step_meters(record):
                found.update(getattr(step, name))
            assert found == counted and max(counted) == 2, name
    assert [step.version for step in steps] == list(range(0, 16, 2))
    assert all(step.staleness.keys() <= {0} for step in steps)
    for words in ("busy: generate", "idle: ", "decode slots: ", "samples, by oldest token",
                  "short-first"):  # fmt: skip
        assert words in text, text


def test_causes_are_looked_up_for_kinds_of_units_not_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, looked_up = spec(steps=2, groups_per_step=40, placement=Placement(cards=40)), []
    cause = Idle.cause

    def counted(self: Idle, unit: UnitState) -> Cause:
        looked_up.append(unit)
        return cause(self, unit)

    monkeypatch.setattr(Idle, "cause", counted)
    history = simulate(sizes)
    time = card_time(history, sizes)
    assert share(time, "long_tail") > 0.1 and len(history) > 1000
    assert len(looked_up) <= len(history)
