"""Every interleaving of a small run, with at most one fault: a walk over the scheduler's states.

A state is the scheduler, what the cards really hold, and what may still go wrong. From it follow
all ends of all outstanding commands: success (a quantum may finish any set of what grows on its
unit), and, once in a run, a failure, a cancellation or a group that gets no reward. What must hold
is checked in every state, with the model's own knowledge of the weights on each unit; and a run
that goes well must be possible from each.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

from twofold import events as ev
from twofold.events import Command, Event
from twofold.sched.queue import Status
from twofold.sched.scheduler import Scheduler, SchedulerSpec


@dataclass
class State:
    scheduler: Scheduler
    holds: list[int]  # the version of the weights on each unit
    started: dict[int, int] = field(default_factory=dict)  # group -> its unit's version then
    trained: int = 0  # groups
    faults_left: int = 1

    def take(self, event: Event) -> None:
        scheduler, spec = self.scheduler, self.scheduler.spec
        if isinstance(event, ev.Terminal):
            self._see(scheduler.outbox.outstanding[event.command], event)
        issued = scheduler.handle(event, 0.0)
        scheduler.check_integrity()
        for command in issued:
            if isinstance(command, ev.Generate):
                unit = scheduler._of_card[command.cards[0]].index
                assert command.version == self.holds[unit], (command, self.holds)
                for gid, _, _ in command.admit:
                    self.started.setdefault(gid, self.holds[unit])
            elif isinstance(command, ev.Train):
                assert len(command.group_ids) == spec.groups_per_step
                for gid in command.group_ids:
                    last = command.version + spec.updates_per_batch - 1
                    assert last - self.started[gid] <= spec.max_staleness, (gid, self.started)
        if scheduler.outcome == "done":
            assert scheduler.version == spec.steps * spec.updates_per_batch
            assert self.trained == spec.steps * spec.groups_per_step

    def _see(self, command: Command, event: Event) -> None:
        units = self.scheduler._units_of(command)
        if isinstance(event, ev.Failed | ev.Cancelled):
            return
        if isinstance(event, ev.Published | ev.Received):
            for unit in units:
                self.holds[unit.index] = event.version
        if isinstance(command, ev.Train):
            self.trained += len(command.group_ids)
            for gid in command.group_ids:
                del self.started[gid]

    def key(self) -> Any:
        """Equal for states with the same future. Sequence numbers are told by their order only."""
        s = self.scheduler
        rank = {seq: i for i, seq in enumerate(s.outbox.outstanding)}
        rank_of = lambda seq: None if seq is None else rank[seq]  # noqa: E731
        return (
            s.version, s.outcome, s._batch, s._scored, s._trained, s._evaluated, s._checkpointed,
            s._drops, s.stream.next_group, tuple(s.stream._ready),
            tuple((u.phase, u.version, u.fetched, u.fetching, u.lost, rank_of(u.command), u.readmit)
                  for u in s.units),
            tuple((g, e.admission, e.unit, e.status, tuple(e.unfinished), rank_of(e.lease))
                  for g, e in sorted(s.stream.live.items())),
            tuple(replace(c, seq=rank[c.seq]) for c in s.outstanding()),
            tuple(sorted(s.outbox._failures.items())),
            tuple(self.holds), tuple(sorted(self.started.items())), self.trained, self.faults_left,
        )  # fmt: skip

    def moves(self) -> Iterator[tuple[Event, int]]:
        """Every event that may come next, and the faults it costs."""
        for command in self.scheduler.outstanding():
            seq = command.seq
            yield from ((event, 0) for event in self._successes(command))
            if self.faults_left:
                yield ev.Failed(command=seq, cause="model"), 1
                yield ev.Cancelled(command=seq), 1
                if isinstance(command, ev.Reward):
                    gid = command.group_id
                    yield ev.Rewarded(command=seq, group_id=gid, n_valid=0, varies=False), 1

    def _successes(self, command: Command) -> Iterator[Event]:
        seq = command.seq
        match command:
            case ev.Generate():
                (unit,) = self.scheduler._units_of(command)
                live = self.scheduler.stream.live.items()
                growing = [
                    ev.Finished(gid, index, 1)
                    for gid, e in live
                    if e.unit == unit.index and e.status is Status.GENERATING
                    for index in e.unfinished
                ]
                sets = (combinations(growing, n) for n in range(len(growing) + 1))
                for finished in chain.from_iterable(sets):
                    yield ev.Generated(command=seq, finished=finished, n_tokens=1, decode_steps=1)
            case ev.Reward():
                n_valid = self.scheduler.spec.group_size
                yield ev.Rewarded(
                    command=seq, group_id=command.group_id, n_valid=n_valid, varies=True
                )
            case ev.Score():
                yield ev.Scored(command=seq)
            case ev.Train():
                version = command.version + self.scheduler.spec.updates_per_batch
                yield ev.Trained(command=seq, version=version)
            case ev.Publish():
                yield ev.Published(command=seq, version=command.version)
            case ev.Fetch():
                yield ev.Fetched(command=seq, version=command.version, unit=command.unit)
            case ev.Receive():
                yield ev.Received(command=seq, version=command.version)
            case ev.Switch():
                yield ev.Switched(command=seq)
            case ev.Evaluate():
                yield ev.Evaluated(command=seq, version=command.version)
            case ev.Checkpoint():
                yield ev.Checkpointed(command=seq, version=command.version)
            case ev.Discard():
                yield ev.Discarded(command=seq, group_id=command.group_id)
            case _:
                raise AssertionError(command)


def explore(spec: SchedulerSpec, faults: int = 1) -> int:
    """Visits every state; their number. AssertionError, with the way to it, if one is bad."""
    first = State(Scheduler(spec), [0] * len(Scheduler(spec).units), faults_left=faults)
    first.take(ev.RunStarted())
    number = {first.key(): 0}
    came_from: list[tuple[int, Event] | None] = [None]
    reached_by: list[list[int]] = [[]]
    todo, done = [(0, pickle.dumps(first))], []
    while todo:
        here, frozen = todo.pop()
        state = pickle.loads(frozen)
        if state.scheduler.finished:
            assert state.scheduler.outcome == "done", state.scheduler.outcome
            done.append(here)
            continue
        for event, cost in state.moves():
            after = pickle.loads(frozen)
            after.faults_left -= cost
            try:
                after.take(event)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_way(came_from, here)}\n{event}") from error
            key = after.key()
            if (there := number.get(key)) is None:
                there = number[key] = len(number)
                came_from.append((here, event))
                reached_by.append([])
                todo.append((there, pickle.dumps(after)))
            reached_by[there].append(here)
    _check_all_reach(done, reached_by, came_from)
    return len(number)


def _check_all_reach(done: list[int], reached_by: list[list[int]], came_from: list[Any]) -> None:
    """No state from which the run cannot end well (deadlock or livelock)."""
    good, todo = set(done), list(done)
    while todo:
        for before in reached_by[todo.pop()]:
            if before not in good:
                good.add(before)
                todo.append(before)
    for state in range(len(reached_by)):
        assert state in good, f"never ends:\n{_way(came_from, state)}"


def _way(came_from: list[tuple[int, Event] | None], state: int) -> str:
    lines = []
    while (step := came_from[state]) is not None:
        state, event = step
        lines.append(ev.to_json(event))
    return "\n".join(reversed(lines))
