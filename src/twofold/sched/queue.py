"""The stream of groups between the tasks: who is where, and who holds it.

Owns: the status of every live group, its lease, and the order in which groups became ready.
Does not own: decisions (`scheduler`), the rule (`budget`), tokens (the executor's store).

A lease is the outstanding command that works on a group. It is given back when that command ends,
however it ends; only a fact moves the group on. So a consumer that dies loses nothing and
duplicates nothing.

    GENERATING -> REWARDING -> READY -> TRAINING -> TRAINED      and from all but the last: DROPPED
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from twofold.events import Admission, Command, Discard, Generate, Reward, Score, Train
from twofold.sched.budget import Live

UNBOUNDED = 2**62  # data without a known end


class Status(StrEnum):
    GENERATING = "generating"
    REWARDING = "rewarding"
    READY = "ready"
    TRAINING = "training"  # in the batch that makes the next version
    TRAINED = "trained"  # the update is made; live until its version is published
    DROPPED = "dropped"  # its slot is free; live until the executor has forgotten it


@dataclass(slots=True)
class Entry:
    """A live group. `unfinished` are the indices of its samples that still grow, on `card`."""

    admission: Admission
    card: int
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

    Deadlines are versions; the views `ready`, `waiting` and `deadlines` give them in batches
    (divided by `updates_per_batch`), the unit in which the rule counts."""

    group_size: int
    updates_per_batch: int = 1
    n_groups: int = UNBOUNDED
    next_group: int = 0
    live: dict[int, Entry] = field(default_factory=dict)
    ended: dict[int, Status] = field(default_factory=dict)
    _ready: dict[int, None] = field(default_factory=dict)  # in order of readiness

    # ------------------------------------------------------------ a group's way

    def start(self, n_groups: int, version: int, deadline: int, card: int) -> tuple[Admission, ...]:
        """The next groups of the data start on this card."""
        first = self.next_group
        self.next_group += n_groups
        fresh = tuple(Admission(first + i, version, deadline) for i in range(n_groups))
        for admission in fresh:
            entry = Entry(admission, card, set(range(self.group_size)))
            self.live[admission.group_id] = entry
        return fresh

    def finish_sample(self, group_id: int, index: int) -> None:
        entry = self._in(group_id, Status.GENERATING)
        assert index in entry.unfinished, f"sample {group_id}/{index} finished twice"
        entry.unfinished.remove(index)
        if not entry.unfinished:
            entry.status = Status.REWARDING

    def make_ready(self, group_id: int) -> None:
        self._in(group_id, Status.REWARDING).status = Status.READY
        self._ready[group_id] = None

    def train(self, group_ids: Iterable[int]) -> None:
        for gid in group_ids:
            self._in(gid, Status.READY).status = Status.TRAINING
            del self._ready[gid]

    def trained(self, group_ids: Iterable[int]) -> None:
        for gid in group_ids:
            self._in(gid, Status.TRAINING).status = Status.TRAINED

    def published(self, group_ids: Iterable[int]) -> None:
        """The version made of these groups exists."""
        for gid in group_ids:
            self._leave(gid, Status.TRAINED)

    def drop(self, group_id: int, reason: str) -> None:
        entry = self.live[group_id]
        assert entry.lease is None, f"group {group_id} dropped while command {entry.lease} has it"
        assert entry.status in (Status.GENERATING, Status.REWARDING, Status.READY)
        entry.status, entry.reason = Status.DROPPED, reason
        entry.unfinished.clear()
        self._ready.pop(group_id, None)

    def discarded(self, group_id: int) -> None:
        self._leave(group_id, Status.DROPPED)

    # ------------------------------------------------------------ leases

    def take(self, command: Command) -> None:
        """The groups that the command works on are its own until it ends."""
        for gid in self._groups_of(command):
            entry = self.live[gid]
            assert entry.lease is None, f"group {gid}: {entry.lease} has it, {command} wants it"
            entry.lease = command.seq

    def acknowledge(self, seq: int) -> None:
        """The command has ended: its leases are given back."""
        for entry in self.live.values():
            if entry.lease == seq:
                entry.lease = None

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
        """Groups of this status that no command holds, by order of their start."""
        return [e for e in self.live.values() if e.status is status and e.lease is None]

    def ready(self) -> list[Live]:
        """First ready first."""
        return [self._live(self.live[gid]) for gid in self._ready]

    def waiting(self) -> list[Live]:
        """Groups on their way to being ready."""
        unready = (Status.GENERATING, Status.REWARDING)
        return [self._live(e) for e in self.live.values() if e.status in unready]

    def deadlines(self, version: int) -> list[int]:
        """Of everything that takes room in the budget while `version` is the trainer's. The batch
        in training takes the room of this step, whatever its deadlines were."""
        in_batch = (Status.TRAINING, Status.TRAINED)
        return [
            (min(e.deadline, version) if e.status in in_batch else e.deadline)
            // self.updates_per_batch
            for e in self.live.values()
            if e.status is not Status.DROPPED
        ]

    def unfinished_samples(self, card: int) -> int:
        return sum(len(e.unfinished) for e in self.live.values() if e.card == card)

    def check_integrity(self, outstanding: dict[int, Command]) -> None:
        """Asserts that statuses fit each other, and leases the commands outstanding (by seq)."""
        assert not self.live.keys() & self.ended.keys(), "a live group has ended"
        assert len(self.live) + len(self.ended) == self.next_group, "a group is lost"
        ready = {gid for gid, e in self.live.items() if e.status is Status.READY}
        assert ready == self._ready.keys(), (ready, self._ready)
        for gid, entry in self.live.items():
            assert gid == entry.group_id
            assert bool(entry.unfinished) == (entry.status is Status.GENERATING), entry
            assert bool(entry.reason) == (entry.status is Status.DROPPED), entry
        leases = {gid: e.lease for gid, e in self.live.items() if e.lease is not None}
        held = {gid: c.seq for c in outstanding.values() for gid in self._groups_of(c)}
        assert leases == held, (leases, held)

    def _groups_of(self, command: Command) -> list[int]:
        match command:
            case Generate():  # one quantum works on everything that grows on its card
                entries = self.live.values()
                return [e.group_id for e in entries if e.unfinished and e.card in command.cards]
            case Score() | Train():
                return list(command.group_ids)
            case Reward() | Discard():
                return [command.group_id]
            case _:
                return []

    def _live(self, entry: Entry) -> Live:
        return Live(entry.group_id, entry.deadline // self.updates_per_batch)

    def _in(self, group_id: int, status: Status) -> Entry:
        entry = self.live.get(group_id)
        assert entry is not None, f"group {group_id} is not live"
        assert entry.status is status, f"group {group_id} is {entry.status}, not {status}"
        return entry

    def _leave(self, group_id: int, status: Status) -> None:
        self._in(group_id, status)
        del self.live[group_id]
        self.ended[group_id] = status
