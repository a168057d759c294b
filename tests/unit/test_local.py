"""The order in which things happen in the embedded executor, with a worker and rewards that are
played: no model, no process, and rewards that arrive after a number of looks."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from twofold import events as ev
from twofold.events import Command, Event
from twofold.obs.record import RewardRow
from twofold.runtime.local import LocalExecutor
from twofold.runtime.loop import drive
from twofold.runtime.store import Store
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.step.reward import RewardJob, RewardResult
from twofold.types import Group, Phase, Prompt, Sample, SampleId

SPEC = SchedulerSpec(
    steps=6, groups_per_step=2, group_size=2, max_staleness=2, max_running_samples=8,
    quantum_decode_steps=3, evaluate=True, eval_every=3, checkpoint_every=2,
)  # fmt: skip
NEVER = 10**9


class Arriving:
    """Rewards that are there after so many looks. `waits` counts the looks that would have taken
    time."""

    def __init__(self, looks: random.Random | None = None) -> None:
        self.stop_reason: str | None = None
        self.waits = 0
        self.left: dict[int, int] = {}  # by ticket: looks until it is there
        self._looks = looks
        self._jobs: dict[int, RewardJob] = {}

    def ask(self, ticket: int, job: RewardJob) -> None:
        self._jobs[ticket] = job
        self.left[ticket] = self._looks.randint(0, 12) if self._looks else NEVER

    def collect(self, timeout_s: float) -> None:
        self.waits += timeout_s > 0
        assert self.waits < 1000, "it waits for ever"
        self.left = {ticket: n - 1 for ticket, n in self.left.items()}

    def __contains__(self, ticket: int) -> bool:
        return self.left.get(ticket, NEVER) <= 0

    def take(self, ticket: int) -> RewardResult:
        del self.left[ticket]
        n = len(self._jobs.pop(ticket).completions)
        failed = ticket % 5 == 0  # some groups are dropped: discards are part of the order
        rewards = [None if failed else float(i) for i in range(n)]
        return RewardResult(ticket, rewards, ["broke" if failed else None] * n, 0.1)


class Playing:
    """A worker whose samples have the lengths that their ids say."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.generator = SimpleNamespace(unfinished=0)

    def execute(self, command: Command) -> ev.Terminal:
        seq = command.seq
        match command:
            case ev.Generate():
                return self._generate(command)
            case ev.Train():
                self.store.remove(command.group_ids)
                return ev.Trained(command=seq, version=command.version + 1)
            case ev.Publish():
                return ev.Published(command=seq, version=command.version)
            case ev.Evaluate():
                return ev.Evaluated(command=seq, version=command.version)
            case ev.Checkpoint():
                return ev.Checkpointed(command=seq, version=command.version)
            case ev.Discard():
                self.store.remove([command.group_id])
                return ev.Discarded(command=seq, group_id=command.group_id)
        return ev.Switched(command=seq)

    def _generate(self, command: ev.Generate) -> ev.Generated:
        for gid, start, deadline in command.admit:
            samples = [Sample(SampleId(gid, i)) for i in range(SPEC.group_size)]
            self.store.add(Group(gid, Prompt("?"), [1], start, deadline, samples))
        finished, n_tokens = [], 0
        for sample in samples_of(self.store):
            gid, index = sample.sample_id
            if not sample.finished:
                sample.token_ids += [0] * command.max_decode_steps
                n_tokens += command.max_decode_steps
                if len(sample.token_ids) > (gid * 5 + index * 3) % 11:
                    sample.finish_reason = "length"
                    finished.append(ev.Finished(gid, index, len(sample.token_ids)))
        return ev.Generated(command=command.seq, finished=tuple(finished), n_tokens=n_tokens,
                            decode_steps=command.max_decode_steps)  # fmt: skip


def samples_of(store: Store) -> list[Sample]:
    return [sample for group in store._groups.values() for sample in group.samples]


class Crash(Exception):
    pass


class Notes:
    """The record: what was committed, and what the store held then."""

    def __init__(self, store: Store, die_at: int = NEVER, before: bool = False) -> None:
        self.history: list[tuple[Event, list[Command]]] = []
        self.groups: dict[int, Group] = {}
        self._store, self._die_at, self._before = store, die_at, before

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        dies = len(self.history) + 1 == self._die_at
        if dies and self._before:
            raise Crash
        self.history.append((event, list(commands)))
        self.groups = copy.deepcopy(self._store._groups)
        if dies:
            raise Crash


def make_executor(
    store: Store, rewards: Arriving, deterministic: bool, last_card_seq: int = -1
) -> LocalExecutor:
    worker: Any = Playing(store)
    return LocalExecutor(
        worker, store, rewards, deterministic=deterministic, last_card_seq=last_card_seq
    )


def run(seed: int, deterministic: bool, **crash: Any) -> Notes:
    store = Store()
    executor = make_executor(store, Arriving(random.Random(seed)), deterministic)
    notes = Notes(store, **crash)
    try:
        assert drive(Scheduler(SPEC), executor, notes, ev.RunStarted()) == "done"
    except Crash:
        assert crash
    return notes


def resume(notes: Notes, seed: int) -> list[Event]:
    """As `runtime.run.resume` does it. -> all events, those before the crash first."""
    scheduler, store = Scheduler(SPEC), Store()
    for event, _ in notes.history:
        scheduler.handle(event, 0.0)
    for group in copy.deepcopy(notes.groups).values():
        store.add(group)
    issued = {c.seq: c for _, commands in notes.history for c in commands}
    ended = [issued[event.command] for event, _ in notes.history if isinstance(event, ev.Terminal)]
    last = max((command.seq for command in ended if command.cards), default=-1)
    executor = make_executor(store, Arriving(random.Random(seed)), True, last)
    rest = Notes(store)
    assert drive(scheduler, executor, rest, ev.Resumed(epoch=1)) == "done"
    return order(notes) + order(rest)[1:]


def order(notes: Notes) -> list[Event]:
    """The events without their durations."""
    return [
        replace(event, seconds=0.0) if isinstance(event, ev.Terminal) else event
        for event, _ in notes.history
    ]


# ---------------------------------------------------------------- whole runs


def test_deterministic_order_does_not_depend_on_when_rewards_arrive(seed: int) -> None:
    whole = order(run(seed, deterministic=True))
    assert {event.kind for event in whole} >= {"Trained", "Rewarded", "Discarded", "Checkpointed"}
    for other in range(seed + 1, seed + 9):
        assert order(run(other, deterministic=True)) == whole, f"seed {other}"
    others = [order(run(other, deterministic=False)) for other in range(seed + 1, seed + 9)]
    assert any(other != whole for other in others), "the arrival times change nothing anyway"


@pytest.mark.parametrize("before", [True, False])
def test_deterministic_order_survives_a_crash_at_any_event(seed: int, before: bool) -> None:
    """The process dies before or after a commit; the next one continues with the same order, also
    when a reward had been asked for and not delivered."""
    whole = order(run(seed, deterministic=True))
    for n in range(2, len(whole)):
        notes = run(seed + n, deterministic=True, die_at=n, before=before)
        assert len(notes.history) == n - before
        assert resume(notes, seed + 2 * n) == whole, f"crash at event {n} of {len(whole)}"


# ---------------------------------------------------------------- by hand


class Table:
    """An executor with finished groups in its store; `ask` and `do` submit."""

    def __init__(self, deterministic: bool, last_card_seq: int = -1) -> None:
        self.rewards = Arriving()
        store = Store()
        for gid in range(4):
            samples = [Sample(SampleId(gid, i), [1], finish_reason="stop") for i in range(2)]
            store.add(Group(gid, Prompt("?"), [1], 0, 0, samples))
        self._executor = make_executor(store, self.rewards, deterministic, last_card_seq)

    def ask(self, seq: int, there: bool = False) -> None:
        self._executor.submit(ev.Reward(seq=seq, group_id=seq % 4))
        if there:
            self.arrives(seq)

    def arrives(self, seq: int, looks: int = 0) -> None:
        self.rewards.left[seq] = looks

    def do(self, *seqs: int) -> None:
        for seq in seqs:
            switch = ev.Switch(seq=seq, cards=(0,), before=Phase.IDLE, after=Phase.GENERATE)
            self._executor.submit(switch)

    def next(self) -> str | int:
        """What happens next: the command that ended, or why a stop was asked for."""
        _, event = self._executor.next_event()
        if isinstance(event, ev.StopRequested):
            return event.reason
        assert isinstance(event, ev.Terminal)
        return event.command


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stop_comes_before_a_due_reward_and_that_before_a_card_command(
    deterministic: bool,
) -> None:
    table = Table(deterministic, last_card_seq=2)
    table.do(3, 4)
    table.ask(1, there=True)
    table.rewards.stop_reason = "Ctrl-C"
    assert [table.next() for _ in range(4)] == ["Ctrl-C", 1, 3, 4], "a stop is reported once"
    assert table.rewards.waits == 0


def test_a_reward_that_is_there_comes_first_and_none_is_waited_for_while_there_is_work() -> None:
    table = Table(deterministic=False)
    table.ask(1)
    table.ask(2)
    table.do(3, 4)
    assert table.next() == 3
    table.arrives(2)
    assert [table.next(), table.next()] == [2, 4]
    assert table.rewards.waits == 0
    table.arrives(1, looks=3)
    assert table.next() == 1
    assert table.rewards.waits > 0, "with nothing else to do it is waited for"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_reward_that_comes_during_a_command_is_told_before_its_end(deterministic: bool) -> None:
    """So the card's next command is decided with it; each row is committed with its own event."""
    table = Table(deterministic)
    table.ask(1)
    table.do(2, 3)
    executor, row = table._executor, object()
    execute = executor._worker.execute

    def takes_a_while(command: Command) -> Any:
        if command.seq == 2:
            table.arrives(1)
        executor._store.write((row, command.seq))
        return execute(command)

    executor._worker.execute = takes_a_while  # type: ignore[method-assign]
    told = []
    for _ in range(3):
        told.append(table.next())
        rows = executor.take_rows()
        mine = [item for item in rows if item[0] is row]
        assert mine == ([] if told[-1] == 1 else [(row, told[-1])])
        assert sum(isinstance(item, RewardRow) for item in rows) == 2 * (told[-1] == 1)
    assert told == ([2, 1, 3] if deterministic else [1, 2, 3])
    assert table.rewards.waits == 0


def test_deterministic_rewards_are_due_after_a_card_command_that_was_issued_later() -> None:
    table = Table(deterministic=True)
    table.do(0)
    table.ask(1, there=True)
    table.ask(2, there=True)
    table.do(3)
    assert table.next() == 0, "it is there, but no command issued after it has ended"
    assert table.next() == 3
    table.do(4)
    table.arrives(1, looks=3)
    assert table.next() == 1, "due and not there: waited for, before the command and reward 2"
    assert table.rewards.waits > 0
    assert [table.next(), table.next()] == [2, 4]


def test_a_discard_makes_no_reward_due() -> None:
    """It is host work; only what a card does marks the time."""
    table = Table(deterministic=True)
    table.ask(1, there=True)
    table._executor.submit(ev.Discard(seq=2, group_id=3, reason="data ended"))
    table.do(3)
    assert [table.next() for _ in range(3)] == [2, 3, 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_after_a_stop_nothing_waits_for_rewards(deterministic: bool) -> None:
    table = Table(deterministic, last_card_seq=5)
    table.ask(1)
    table.rewards.stop_reason = "SIGTERM"
    assert table.next() == "SIGTERM"
    table.do(6, 7)
    assert [table.next(), table.next()] == [6, 7]
    assert table.rewards.waits == 0


def test_a_stop_ends_a_wait() -> None:
    """It comes while a reward is waited for that never arrives."""
    table = Table(deterministic=True)
    table.ask(1)
    look = table.rewards.collect

    def collect(timeout_s: float) -> None:
        look(timeout_s)
        if table.rewards.waits == 3:
            table.rewards.stop_reason = "Ctrl-C"

    table.rewards.collect = collect  # type: ignore[method-assign]
    assert table.next() == "Ctrl-C"
    assert table.rewards.waits == 3
