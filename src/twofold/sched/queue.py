"""The stream of groups between the tasks: who is where, and who holds it.

Owns: the status of every live group, its lease, the order in which groups became ready, and the
counts that decisions need, kept up to date so that no decision looks at every group.
Does not own: decisions (`scheduler`), the rule (`budget`), tokens (the executor's store).

A lease is the outstanding command that works on a group. It is given back when that command ends,
however it ends; only a fact moves the group on. So a consumer that dies loses nothing and
duplicates nothing.

    GENERATING -> REWARDING -> [SCORING ->] READY -> TRAINING -> TRAINED
    and from all before TRAINING: DROPPED
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from twofold.events import Admission, Command, Discard, Generate, Reward, Score, Train
from twofold.sched.budget import Live

UNBOUNDED = 2**62  # data without a known end


class Status(StrEnum):
    GENERATING = "generating"
    REWARDING = "rewarding"
    SCORING = "scoring"  # cards of their own score it (otherwise its batch is scored)
    READY = "ready"
    TRAINING = "training"  # in the batch that makes the next version
    TRAINED = "trained"  # the update is made; live until its version is published
    DROPPED = "dropped"  # its slot is free; live until the executor has forgotten it


_WAITING = (Status.GENERATING, Status.REWARDING, Status.SCORING)


@dataclass(slots=True)
class Entry:
    """A live group. `unfinished` are the indices of its samples that still grow, on unit `unit`."""

    admission: Admission
    unit: int
    unfinished: set[int]
    status: Status = Status.GENERATING
    lease: int | None = None  # seq of the command that holds it
    reason: str = ""  # why it was dropped

    @property
    def group_id(self) -> int:
        return self.admission.group_id

    @property
    def deadline(self) -> int:
        return self.admission.deadline


@dataclass
class Stream:
    """All groups of a run. `ended` says how each group that has left ended: TRAINED or DROPPED;
    `n_groups` how many the data has, once that is known.

    Deadlines are versions; the views `ready`, `waiting`, `due` and `ready_due` give them in batches
    (divided by `updates_per_batch`), the unit in which the rule counts."""

    group_size: int
    updates_per_batch: int = 1
    n_groups: int = UNBOUNDED
    next_group: int = 0
    live: dict[int, Entry] = field(default_factory=dict)
    ended: dict[int, Status] = field(default_factory=dict)
    due: Counter[int] = field(default_factory=Counter)
    """Groups that take room in the budget, by deadline in batches. The batch in training takes the
    room of its step, whatever its deadlines were; what was dropped takes none."""
    ready_due: Counter[int] = field(default_factory=Counter)  # of these, the ready ones
    waiting_due: dict[Status, Counter[int]] = field(
        default_factory=lambda: {status: Counter() for status in _WAITING}
    )  # and those on their way to it
    _ready: dict[int, None] = field(default_factory=dict)  # in order of readiness
    _growing: dict[int, dict[int, Entry]] = field(default_factory=dict)  # by unit: GENERATING
    _unfinished: Counter[int] = field(default_factory=Counter)  # samples, by unit
    _free: dict[Status, dict[int, Entry]] = field(
        default_factory=lambda: {s: {} for s in (Status.REWARDING, Status.SCORING, Status.DROPPED)}
    )  # of these, those that no command holds
    _held: dict[int, list[Entry]] = field(default_factory=dict)  # leases by command

    # ------------------------------------------------------------ a group's way

    def start(self, n_groups: int, version: int, deadline: int, unit: int) -> tuple[Admission, ...]:
        """The next groups of the data start on this unit."""
        first = self.next_group
        self.next_group += n_groups
        fresh = tuple(Admission(first + i, version, deadline) for i in range(n_groups))
        growing = self._growing.setdefault(unit, {})
        for admission in fresh:
            entry = Entry(admission, unit, set(range(self.group_size)))
            self.live[admission.group_id] = growing[admission.group_id] = entry
        self._unfinished[unit] += n_groups * self.group_size
        _count(self.due, deadline // self.updates_per_batch, n_groups)
        _count(self.waiting_due[Status.GENERATING], deadline // self.updates_per_batch, n_groups)
        return fresh

    def finish_sample(self, group_id: int, index: int) -> None:
        entry = self._in(group_id, Status.GENERATING)
        assert index in entry.unfinished, f"sample {group_id}/{index} finished twice"
        entry.unfinished.remove(index)
        self._unfinished[entry.unit] -= 1
        if not entry.unfinished:
            self._move(entry, Status.REWARDING)

    def score(self, group_id: int) -> None:
        """It has its rewards and needs its reference log-probs."""
        self._move(self._in(group_id, Status.REWARDING), Status.SCORING)

    def make_ready(self, group_id: int) -> None:
        entry = self.live[group_id]
        assert entry.status in (Status.REWARDING, Status.SCORING), entry
        self._move(entry, Status.READY)

    def train(self, group_ids: Iterable[int], step: int) -> None:
        """They are the batch of this step."""
        for gid in group_ids:
            entry = self._in(gid, Status.READY)
            self._move(entry, Status.TRAINING)
            _count(self.due, entry.deadline // self.updates_per_batch, -1)
            _count(self.due, step, 1)

    def trained(self, group_ids: Iterable[int]) -> None:
        for gid in group_ids:
            self._move(self._in(gid, Status.TRAINING), Status.TRAINED)

    def published(self, group_ids: Iterable[int], step: int) -> None:
        """The version made of these groups, in this step, exists."""
        for gid in group_ids:
            self._leave(gid, Status.TRAINED)
            _count(self.due, step, -1)

    def drop(self, group_id: int, reason: str) -> None:
        entry = self.live[group_id]
        assert entry.lease is None, f"group {group_id} dropped while command {entry.lease} has it"
        assert entry.status in (*_WAITING, Status.READY), entry
        entry.reason = reason
        self._unfinished[entry.unit] -= len(entry.unfinished)
        entry.unfinished.clear()
        self._move(entry, Status.DROPPED)
        _count(self.due, entry.deadline // self.updates_per_batch, -1)

    def discarded(self, group_id: int) -> None:
        self._leave(group_id, Status.DROPPED)

    # ------------------------------------------------------------ leases

    def take(self, command: Command, unit: int | None = None) -> None:
        """The groups that the command works on are its own until it ends. A quantum works on
        everything that grows on its `unit`."""
        held = self._worked_on(command, unit)
        for entry in held:
            assert entry.lease is None, f"{entry.lease} has {entry}, {command} wants it"
            entry.lease = command.seq
            if entry.status in self._free:
                self._free[entry.status].pop(entry.group_id, None)
        if held:
            self._held[command.seq] = held

    def acknowledge(self, seq: int) -> None:
        """The command has ended: its leases are given back."""
        for entry in self._held.pop(seq, ()):
            entry.lease = None
            if entry.status in self._free:
                self._free[entry.status][entry.group_id] = entry

    # ------------------------------------------------------------ views

    def exists(self, group_id: int) -> bool:
        return group_id < self.n_groups

    def unstarted(self) -> int:
        """Groups that the data still has."""
        return max(0, self.n_groups - self.next_group)

    def n_usable(self) -> int:
        """Groups that are, or may still become, ready."""
        started = (self.exists(gid) for gid, e in self.live.items() if not e.reason)
        return sum(started) + self.unstarted()

    def free(self, status: Status) -> list[Entry]:
        """Groups that are REWARDING, SCORING or DROPPED and that no command holds, ascending."""
        return [entry for _, entry in sorted(self._free[status].items())]

    def n_ready(self) -> int:
        return len(self._ready)

    def ready(self) -> list[Live]:
        """First ready first."""
        return [self._live(self.live[gid]) for gid in self._ready]

    def waiting(self) -> list[Live]:
        """Groups on their way to being ready."""
        return [self._live(e) for e in self.live.values() if e.status in _WAITING]

    def unfinished_samples(self, unit: int) -> int:
        return self._unfinished[unit]

    def all_unfinished_samples(self) -> int:
        return sum(self._unfinished.values())

    def check_integrity(self, outstanding: Iterable[Command], step: int) -> None:
        """Asserts that statuses fit each other, the counts the groups, and the leases the commands
        outstanding."""
        assert not self.live.keys() & self.ended.keys(), "a live group has ended"
        assert len(self.live) + len(self.ended) == self.next_group, "a group is lost"
        by_status: dict[Status, list[int]] = {status: [] for status in Status}
        due: Counter[int] = Counter()
        for gid, entry in self.live.items():
            assert gid == entry.group_id
            assert bool(entry.unfinished) == (entry.status is Status.GENERATING), entry
            assert bool(entry.reason) == (entry.status is Status.DROPPED), entry
            by_status[entry.status].append(gid)
            if entry.status in (Status.TRAINING, Status.TRAINED):
                due[step] += 1
            elif entry.status is not Status.DROPPED:
                due[entry.deadline // self.updates_per_batch] += 1
        assert due == self.due, (due, self.due)
        ready = by_status[Status.READY]
        assert set(ready) == self._ready.keys(), (ready, self._ready)
        deadlines = (self.live[gid].deadline // self.updates_per_batch for gid in ready)
        assert Counter(deadlines) == self.ready_due, self.ready_due
        for status, by_deadline in self.waiting_due.items():
            dues = (self.live[gid].deadline // self.updates_per_batch for gid in by_status[status])
            assert Counter(dues) == by_deadline, (status, by_deadline)
        growing = [gid for entries in self._growing.values() for gid in entries]
        assert sorted(growing) == sorted(by_status[Status.GENERATING]), growing
        for unit, entries in self._growing.items():
            assert self._unfinished[unit] == sum(len(e.unfinished) for e in entries.values())
        for status, free in self._free.items():
            assert set(free) == {g for g in by_status[status] if self.live[g].lease is None}
        leases = {(gid, e.lease) for gid, e in self.live.items() if e.lease is not None}
        held = {(e.group_id, seq) for seq, entries in self._held.items() for e in entries}
        named = {
            (gid, c.seq) for c in outstanding for gid in _named(c)
        }  # by the commands themselves
        assert leases == held >= named, (leases, held, named)
        assert self._held.keys() <= {c.seq for c in outstanding}

    def _worked_on(self, command: Command, unit: int | None) -> list[Entry]:
        if isinstance(command, Generate):
            assert unit is not None
            return list(self._growing.get(unit, {}).values())
        return [self.live[gid] for gid in _named(command)]

    def _live(self, entry: Entry) -> Live:
        return Live(entry.group_id, entry.deadline // self.updates_per_batch)

    def _in(self, group_id: int, status: Status) -> Entry:
        entry = self.live.get(group_id)
        assert entry is not None, f"group {group_id} is not live"
        assert entry.status is status, f"group {group_id} is {entry.status}, not {status}"
        return entry

    def _move(self, entry: Entry, status: Status) -> None:
        """To another status, and so to other lists."""
        gid, before = entry.group_id, entry.status
        if before is Status.GENERATING:
            del self._growing[entry.unit][gid]
        elif before is Status.READY:
            del self._ready[gid]
            _count(self.ready_due, entry.deadline // self.updates_per_batch, -1)
        elif before in self._free:
            self._free[before].pop(gid, None)
        for counted, n in ((before, -1), (status, 1)):
            if counted in self.waiting_due:
                due = entry.deadline // self.updates_per_batch
                _count(self.waiting_due[counted], due, n)
        entry.status = status
        if status is Status.READY:
            self._ready[gid] = None
            _count(self.ready_due, entry.deadline // self.updates_per_batch, 1)
        elif status in self._free and entry.lease is None:
            self._free[status][gid] = entry

    def _leave(self, group_id: int, status: Status) -> None:
        entry = self._in(group_id, status)
        assert entry.lease is None, entry
        self._free.get(status, {}).pop(group_id, None)
        del self.live[group_id]
        self.ended[group_id] = status


def _named(command: Command) -> list[int]:
    """The groups that a command names and works on. (What a Generate admits grows on its unit.)"""
    match command:
        case Score() | Train():
            return list(command.group_ids)
        case Reward() | Discard():
            return [command.group_id]
        case Generate():
            return [admission.group_id for admission in command.admit]
        case _:
            return []


def _count(counter: Counter[int], key: int, n: int) -> None:
    """Adds, and keeps no zeros: equal contents compare equal."""
    counter[key] += n
    if not counter[key]:
        del counter[key]
