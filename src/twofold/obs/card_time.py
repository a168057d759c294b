"""Where every second of every card went: what it did, or why it did nothing.

Owns: folding a run's events through a new scheduler, as resuming does, and adding up the time
between them. Does not own: why a card is idle (`sched.idle`), the record, what else it says
(`obs.meters`). Needs nothing but events, so it takes the history of a simulated run as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twofold import events as ev
from twofold.events import Command, Event
from twofold.sched.idle import Cause, Idle
from twofold.sched.scheduler import Scheduler, UnitState
from twofold.sched.spec import SchedulerSpec

HOST = "host"
"""It has been given a command that has not begun: scheduler, record, what runs before it."""
LOST = "lost"
"""What it did when its process died was done again."""
AT_BOUNDARY = "boundary"
"""More might start, and will at the next quantum (of decode slots only)."""

_ROUNDING_S = 1e-6  # an end less its seconds, after days: no wait
IDLE = frozenset({*(cause.value for cause in Cause), HOST, LOST})


@dataclass
class Seconds:
    """Of one card, or summed over cards. Names are kinds of command ("generate", "train", ...) for
    a card that is busy, and causes (those of `sched.idle`, HOST, LOST) for one that is not."""

    by_name: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.by_name[name] = self.by_name.get(name, 0.0) + seconds

    def add_all(self, other: Seconds) -> None:
        for name, seconds in other.by_name.items():
            self.add(name, seconds)

    @property
    def busy(self) -> dict[str, float]:
        return {name: s for name, s in self.by_name.items() if name not in IDLE}

    @property
    def idle(self) -> dict[str, float]:
        return {name: s for name, s in self.by_name.items() if name in IDLE}

    @property
    def total_s(self) -> float:
        return sum(self.by_name.values())


@dataclass
class Slots:
    """Decode slots, of a step or a run: time lost inside of generation.

    `empty` is the seconds of cards that generate times the share of their slots that was empty, by
    why no further group could start (a cause, or AT_BOUNDARY). As a decode step with fewer samples
    is faster, full slots would save less than that.
    """

    n_tokens: int = 0
    n_slot_steps: int = 0  # decode steps times slots
    empty: Seconds = field(default_factory=Seconds)

    @property
    def used(self) -> float:
        """Share of the slots that sampled a token in a decode step; 1 if there was none."""
        return self.n_tokens / self.n_slot_steps if self.n_slot_steps else 1.0


@dataclass
class StepTime:
    """While `version` was the newest: `wall_s` seconds; `cards` is summed over the cards, so
    cards.total_s = wall_s x their number."""

    version: int
    wall_s: float = 0.0
    cards: Seconds = field(default_factory=Seconds)
    slots: Slots = field(default_factory=Slots)


@dataclass
class CardTime:
    """Of a run so far. For each card, by its id, cards[id].total_s = wall_s. The last of `steps` is
    what came after the last version. Time in which no process had the run is nowhere."""

    wall_s: float
    cards: list[Seconds]
    steps: list[StepTime]

    def total(self) -> StepTime:
        """All steps as one."""
        total = StepTime(self.steps[-1].version, self.wall_s)
        for step in self.steps:
            total.cards.add_all(step.cards)
            total.slots.n_tokens += step.slots.n_tokens
            total.slots.n_slot_steps += step.slots.n_slot_steps
            total.slots.empty.add_all(step.slots.empty)
        return total


def card_time(history: Sequence[tuple[float, Event]], spec: SchedulerSpec) -> CardTime:
    """`history`: (seconds since the run started, event), all of a run so far, in order.

    A unit with a command is busy from when it has begun: its end less the seconds that it says it
    took. A unit without has the cause that `sched.idle` names. The cause is looked up once an event
    for all units that are idle for the same reason.
    """
    return _Fold(history, spec).fold()


@dataclass
class _Clock:
    """What a unit does since `since_s`: `name`, but until `begins_s` it waits for its turn."""

    unit: UnitState
    since_s: float
    seconds: Seconds = field(default_factory=Seconds)
    name: str = HOST
    begins_s: float = 0.0


_Kind = tuple[bool, bool, bool, int, bool]
"""Job, version and `lost`: units that agree in these are idle for the same reason."""


class _Fold:
    def __init__(self, history: Sequence[tuple[float, Event]], spec: SchedulerSpec) -> None:
        self._history = history
        self._scheduler = Scheduler(spec)
        self._now_s = self._step_from_s = history[0][0] if history else 0.0
        self._clocks = [_Clock(unit, self._now_s) for unit in self._scheduler.units]
        self._of_card = {card: c for c in self._clocks for card in c.unit.unit.cards}
        self._free: dict[_Kind, dict[int, _Clock]] = {}  # by index of the unit
        self._kind_of: dict[int, _Kind] = {}
        self._ends = {
            event.command: (time_s, event.seconds)
            for time_s, event in history
            if isinstance(event, ev.Terminal)
        }
        self._why_empty: dict[int, str] = {}  # slots, by seq of the quantum
        self._steps = [StepTime(0)]

    def fold(self) -> CardTime:
        for time_s, event in self._history:
            self._advance(time_s, event)
            outstanding = self._scheduler.outbox.outstanding
            ended = outstanding[event.command] if isinstance(event, ev.Terminal) else None
            commands = self._scheduler.handle(event, time_s)
            if isinstance(event, ev.Generated) and ended is not None:
                self._count_slots(ended, event)
            if isinstance(event, ev.Published):
                self._close_step()
                self._steps.append(StepTime(event.version))
            self._look(ended, event, commands)
        self._close_step()
        cards = [clock.seconds for _, clock in sorted(self._of_card.items())]
        return CardTime(sum(step.wall_s for step in self._steps), cards, self._steps)

    def _advance(self, time_s: float, event: Event) -> None:
        if isinstance(event, ev.Resumed):  # nobody had the run meanwhile
            for clock in self._clocks:
                self._count(clock, waited_for=LOST)
                clock.since_s = time_s
            self._step_from_s += time_s - self._now_s
        self._now_s = time_s
        if isinstance(event, ev.Rewarded) and len(self._clocks) == 1:
            # an executor with one card that has a command to run but takes a reward first has
            # waited for it (`run.deterministic`)
            self._count(self._clocks[0], waited_for=Cause.REWARD.value)

    # ------------------------------------------------------------ what each unit does

    def _look(self, ended: Command | None, event: Event, commands: Sequence[Command]) -> None:
        """After an event: which units do something else, or are idle for another reason."""
        if isinstance(event, ev.RunStarted | ev.Resumed):
            changed = set(range(len(self._clocks)))
        else:
            cards = [card for c in (ended, *commands) if c is not None for card in c.cards]
            changed = {self._of_card[card].unit.index for card in cards}
        for index in changed:
            self._sort(self._clocks[index])
        idle = Idle(self._scheduler)
        for clocks in self._free.values():
            cause = idle.cause(next(iter(clocks.values())).unit).value
            for clock in clocks.values():
                if clock.name != cause:
                    self._begin(clock, cause, self._now_s)

    def _sort(self, clock: _Clock) -> None:
        """A free unit to those of its kind, another to what it does."""
        unit, job = clock.unit, clock.unit.unit
        if (before := self._kind_of.pop(unit.index, None)) is not None:
            del self._free[before][unit.index]
            if not self._free[before]:
                del self._free[before]
        if unit.command is None:
            kind = job.generates, job.trains, job.scores, unit.version, unit.lost
            self._kind_of[unit.index] = kind
            self._free.setdefault(kind, {})[unit.index] = clock
            return
        command = self._scheduler.outbox.outstanding[unit.command]
        end_s, seconds = self._ends.get(command.seq, (self._now_s, 0.0))
        self._begin(clock, command.kind.lower(), end_s - seconds)
        if isinstance(command, ev.Generate):
            cause = Idle(self._scheduler).no_start(command.version)
            self._why_empty.setdefault(command.seq, cause.value if cause else AT_BOUNDARY)

    def _begin(self, clock: _Clock, name: str, begins_s: float) -> None:
        self._count(clock)
        at_once = begins_s < self._now_s + _ROUNDING_S
        clock.name, clock.begins_s = name, self._now_s if at_once else begins_s

    # ------------------------------------------------------------ adding up

    def _count(self, clock: _Clock, waited_for: str = HOST) -> None:
        """The unit's time up to now."""
        begun_s = min(max(clock.begins_s, clock.since_s), self._now_s)
        for name, seconds in (
            (waited_for, begun_s - clock.since_s),
            (clock.name, self._now_s - begun_s),
        ):
            if seconds > 0:
                clock.seconds.add(name, seconds)
                self._steps[-1].cards.add(name, seconds * len(clock.unit.unit.cards))
        clock.since_s = self._now_s

    def _close_step(self) -> None:
        for clock in self._clocks:
            self._count(clock)
        self._steps[-1].wall_s = self._now_s - self._step_from_s
        self._step_from_s = self._now_s

    def _count_slots(self, quantum: Command, event: ev.Generated) -> None:
        slots = self._steps[-1].slots
        n = event.decode_steps * self._scheduler.spec.max_running_samples
        slots.n_tokens += event.n_tokens
        slots.n_slot_steps += n
        empty = 1 - event.n_tokens / n if n else 0.0
        seconds = event.seconds * len(quantum.cards) * empty
        slots.empty.add(self._why_empty.pop(quantum.seq), seconds)
