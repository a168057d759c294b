"""The vocabulary between scheduler and executor: commands (what to do) and events (facts).

Owns: the dataclasses below and their JSON form. Ids and counts only: tokens and tensors stay in the
executor's store. Does not own: who decides (`sched`), who executes (`runtime`, `sim`).

Every command carries `seq` (its place in the one total order; commands on overlapping cards execute
in this order), `id` (derived: kind and seq), the ordered `cards` it runs on (empty: host work) and
the `epoch` of the process group it was issued under. Every command ends in exactly one terminal
event, which names it by `command` (its seq): the matching fact below, `Failed` or `Cancelled`.

    command      fact         meaning
    Generate     Generated    one quantum on one replica: admit these groups, then decode
    Reward       Rewarded     judge the finished samples of one group
    Score        Scored       reference log-probs of these groups
    Train        Trained      the optimizer updates of one batch, these groups
    Publish      Published    the cards that train hold these weights; makes the version exist
    Fetch        Fetched      these weights have travelled to a replica that only generates
    Receive      Received     that replica has taken them into use
    Switch       Switched     the cards change phase
    Evaluate     Evaluated    held-out evaluation under a pinned version
    Checkpoint   Checkpointed weights and optimizer of a version are on disk, verified
    Discard      Discarded    a group leaves without being trained, for a stated reason
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from twofold.types import Phase


class Admission(NamedTuple):
    """A group that starts: its deadline is fixed here, once."""

    group_id: int
    start_version: int
    deadline: int


class Finished(NamedTuple):
    """A sample that reached its end in this quantum."""

    group_id: int
    index: int  # type: ignore[assignment]  # tuple.index is not used
    n_tokens: int


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, kw_only=True)
class Command:
    seq: int
    cards: tuple[int, ...] = ()
    epoch: int = 0

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def id(self) -> str:
        return f"{self.kind.lower()}-{self.seq}"


@dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """At most `max_decode_steps` decode steps; ends early when nothing is left to decode."""

    version: int
    max_decode_steps: int
    admit: tuple[Admission, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reward(Command):
    group_id: int


@dataclass(frozen=True, kw_only=True)
class Score(Command):
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Trains `version` into version + updates per batch. `group_ids` is ascending."""

    version: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Publish(Command):
    version: int


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Beside whatever the replica does; `unit` is its number in the placement. Until it has ended,
    the weights of `version` are kept for it."""

    version: int
    unit: int


@dataclass(frozen=True, kw_only=True)
class Receive(Command):
    """Between two quanta: what is unfinished goes on under the new weights."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Switch(Command):
    before: Phase
    after: Phase


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    version: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Command):
    version: int


@dataclass(frozen=True, kw_only=True)
class Discard(Command):
    group_id: int
    reason: str


# ---------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True)
class Event:
    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The first event of a record."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A new process took over: outstanding commands are issued again under `epoch`."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """Someone asked the run to end early (Ctrl-C, SIGTERM, a time limit)."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class DataEnded(Event):
    """There are `n_groups` groups in the data and no more; ids from there on do not exist."""

    n_groups: int


@dataclass(frozen=True, kw_only=True)
class Terminal(Event):
    """The one event that ends a command. `seconds` is how long it ran (recorded, never read by a
    decision)."""

    command: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Generated(Terminal):
    finished: tuple[Finished, ...]
    n_tokens: int  # sampled in this quantum, over all samples
    decode_steps: int


@dataclass(frozen=True, kw_only=True)
class Rewarded(Terminal):
    """`n_valid` of the group's samples have a reward; `varies` when not all of those are equal."""

    group_id: int
    n_valid: int
    varies: bool
    cause: str = ""  # why samples failed, when some did


@dataclass(frozen=True, kw_only=True)
class Scored(Terminal):
    pass


@dataclass(frozen=True, kw_only=True)
class Trained(Terminal):
    """The updates are made; the version exists once it is published."""

    version: int  # the new one


@dataclass(frozen=True, kw_only=True)
class Published(Terminal):
    version: int


@dataclass(frozen=True, kw_only=True)
class Fetched(Terminal):
    version: int
    unit: int


@dataclass(frozen=True, kw_only=True)
class Received(Terminal):
    version: int


@dataclass(frozen=True, kw_only=True)
class Switched(Terminal):
    pass


@dataclass(frozen=True, kw_only=True)
class Evaluated(Terminal):
    version: int


@dataclass(frozen=True, kw_only=True)
class Checkpointed(Terminal):
    version: int


@dataclass(frozen=True, kw_only=True)
class Discarded(Terminal):
    group_id: int


@dataclass(frozen=True, kw_only=True)
class Failed(Terminal):
    """The command had no effect that counts: what it had made durable stays, nothing else."""

    cause: str


@dataclass(frozen=True, kw_only=True)
class Cancelled(Terminal):
    pass


# ---------------------------------------------------------------- JSON

_COMMANDS: tuple[type[Command], ...] = (
    Generate, Reward, Score, Train, Publish, Fetch, Receive, Switch, Evaluate, Checkpoint, Discard,
)  # fmt: skip
_EVENTS: tuple[type[Event], ...] = (
    RunStarted, Resumed, StopRequested, DataEnded, Generated, Rewarded, Scored, Trained, Published,
    Fetched, Received, Switched, Evaluated, Checkpointed, Discarded, Failed, Cancelled,
)  # fmt: skip


class _Codec:
    KINDS: ClassVar[dict[str, type]] = {c.__name__: c for c in (*_COMMANDS, *_EVENTS)}
    # JSON has lists and strings; these fields are more than that
    FIELDS: ClassVar[dict[str, Any]] = {
        "cards": tuple,
        "group_ids": tuple,
        "admit": lambda rows: tuple(Admission(*row) for row in rows),
        "finished": lambda rows: tuple(Finished(*row) for row in rows),
        "before": Phase,
        "after": Phase,
    }


def to_json(item: Command | Event) -> str:
    """One line of JSON: {"kind": "Train", "seq": 12, ...}."""
    body = {f.name: getattr(item, f.name) for f in fields(item)}
    return json.dumps({"kind": item.kind, **body}, separators=(",", ":"))


def from_json(text: str) -> Any:
    """The command or event that `to_json` wrote. Raises ValueError on anything else."""
    body = json.loads(text)
    cls = _Codec.KINDS.get(body.pop("kind", None)) if isinstance(body, dict) else None
    if cls is None:
        raise ValueError(f"not a command or event: {text[:80]!r}")
    try:
        return cls(**{k: _Codec.FIELDS.get(k, lambda v: v)(v) for k, v in body.items()})
    except TypeError as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from None
