"""A simulated run, measured between two of its versions.

Owns: running the real scheduler on a virtual clock without a record, and what happened from one
version to another: tokens a second, staleness, where the cards' time went. Does not own: seconds
(`cost`), what there is to do (`workload`), why a card is idle (`sched.idle`), a whole run with its
record (`run`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from twofold import events as ev
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.sched.idle import Idle
from twofold.sched.scheduler import Scheduler
from twofold.sched.spec import SchedulerSpec
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import Recorded, Work

Entry = tuple[float, Event, Sequence[Command]]
"""When an event came, the event, the commands it caused."""


class Outcome(NamedTuple):
    """Of a simulated run, between two updates. Shares of the time of all cards: `busy` by kind of
    command, `idle` by cause (`sched.idle.Cause`); they sum to 1. `staleness`: shares of the trained
    tokens. Tokens are sampled tokens that were trained; prompts do not count."""

    tokens_per_s: float
    seconds_per_step: float
    staleness: dict[int, float]
    busy: dict[str, float]
    idle: dict[str, float]

    @property
    def mean_staleness(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


def simulate(
    spec: SchedulerSpec,
    workload: Work,
    seconds: Costs,
    seed: int = 0,
    n_steps: int = 3,
    entries: list[Entry] | None = None,
) -> Outcome:
    """Measures at least `n_steps` steps in the middle of a run, after the empty start and before
    the end, where nothing new starts; `spec.steps` is replaced. Recorded groups are stretched over
    it. `entries` gets all that happened. ValueError with the run's outcome if it ends otherwise
    than done."""
    lead = spec.batches_ahead + 1  # steps until the stream is full, and until it has drained
    # whole cycles: batches that started together are trained in a row, so short steps and long ones
    # take turns
    n_steps = -(-n_steps // lead) * lead
    spec = replace(spec, steps=n_steps + 2 * lead, evaluate=False, checkpoint_every=0)
    if isinstance(workload, Recorded):
        workload = replace(workload, n_total=spec.steps * spec.groups_per_step)
    return _watched(spec, workload, seconds, seed, (lead, lead + n_steps), entries)


def simulate_whole(
    spec: SchedulerSpec,
    workload: Work,
    seconds: Costs,
    seed: int = 0,
    entries: list[Entry] | None = None,
) -> Outcome:
    """Measures a run from its first event to its last version, checkpoints included, evaluations
    left out. Otherwise as `simulate`."""
    spec = replace(spec, evaluate=False)
    return _watched(spec, workload, seconds, seed, (0, spec.steps), entries)


def _watched(
    spec: SchedulerSpec,
    workload: Work,
    seconds: Costs,
    seed: int,
    steps: tuple[int, int],
    entries: list[Entry] | None,
) -> Outcome:
    first, last = (n * spec.updates_per_batch for n in steps)
    scheduler = Scheduler(spec)
    executor = SimExecutor(workload, spec, costs=seconds, seed=seed)
    meter = _Meter(scheduler, executor, first, last, entries)
    outcome = drive(scheduler, executor, meter, ev.RunStarted())
    if outcome != "done":
        raise ValueError(f"the simulated run ended before its last step: {outcome}")
    if math.isnan(meter.end_s):
        raise ValueError(
            f"n_groups = {workload.n_groups}: the workload ends before {spec.steps} steps of "
            f"{spec.groups_per_step} groups are simulated; give more"
        )
    window_s = meter.end_s - meter.start_s
    if not window_s > 0:
        raise ValueError("the simulated run takes no time: its costs are all 0")
    n_tokens, card_s = meter.trained.total(), window_s * spec.placement.cards
    return Outcome(
        tokens_per_s=n_tokens / window_s,
        seconds_per_step=window_s / (steps[1] - steps[0]),
        staleness={age: n / n_tokens for age, n in sorted(meter.trained.items())},
        busy=_shares(meter.busy, card_s),
        idle=_shares(meter.idle, card_s),
    )


class _Meter:
    """Meets `runtime.loop.Recorder`: adds up what happens from version `first` to `last`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimExecutor,
        first: int,
        last: int,
        entries: list[Entry] | None = None,
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.first, self.last, self.entries = first, last, entries
        self.start_s = math.nan if first else 0.0  # version 0 exists from the start
        self.end_s = math.nan
        self.busy: defaultdict[str, float] = defaultdict(float)  # card-seconds
        self.idle: defaultdict[str, float] = defaultdict(float)  # card-seconds
        self.trained: Counter[int] = Counter()
        self._issued: dict[int, tuple[float, Command]] = {}
        self._causes: list[tuple[str, int]] = []  # that hold since the last event, with cards
        self._last_s = 0.0

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        if self.entries is not None:
            self.entries.append((now_s, event, commands))
        inside = math.isnan(self.end_s) and not math.isnan(self.start_s)
        if inside:
            for cause, n_cards in self._causes:
                self.idle[cause] += (now_s - self._last_s) * n_cards
        if isinstance(event, ev.Terminal):
            issued_s, command = self._issued.pop(event.command)
            if inside:
                self._count(command, issued_s, now_s)
        if isinstance(event, ev.Published):
            self._published(event.version, now_s)
        self._issued.update((command.seq, (now_s, command)) for command in commands)
        self._last_s = now_s
        if math.isnan(self.end_s):
            units = self.scheduler.units
            self._causes = [
                (str(cause), len(units[index].unit.cards))
                for index, cause in Idle(self.scheduler).causes().items()
            ]

    def _published(self, version: int, now_s: float) -> None:
        if version == self.first:
            self.start_s = now_s
            self.trained = self.executor.staleness.copy()
        elif version == self.last:
            for issued_s, command in self._issued.values():
                self._count(command, issued_s, now_s)
            self.end_s = now_s
            self.trained = self.executor.staleness - self.trained

    def _count(self, command: Command, issued_s: float, now_s: float) -> None:
        self.busy[command.kind] += (now_s - max(issued_s, self.start_s)) * len(command.cards)


def _shares(seconds: Mapping[str, float], of_s: float) -> dict[str, float]:
    """The largest first."""
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: s / of_s for name, s in largest if s > 0}
