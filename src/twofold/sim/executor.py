"""A run on a virtual clock: what the real executor would do to ids and counts, and when.

Owns: the simulated units, the clock, injected faults, the rows of the record. Does not own:
decisions (the real scheduler makes them), seconds (`cost`), the decode slots (`slots`), what there
is to do (`workload`).

It asserts what the real executor would: no trained token is staler than S, nothing is trained
twice, weights and phases are those that a command says, and a unit does one thing at a time.

Like the real one it changes state when an event is committed, not when it is produced: what is in
flight when the process dies (`crash`) has no effect.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from twofold import events as ev
from twofold.events import Command, Event
from twofold.obs.rows import Row
from twofold.sched.phase import PHASE_OF
from twofold.sched.placement import Unit
from twofold.sched.spec import SchedulerSpec
from twofold.sim import rows
from twofold.sim.cost import Costs
from twofold.sim.slots import SimGroup, SimSample, Slots
from twofold.sim.workload import Work
from twofold.types import Phase


@dataclass(frozen=True)
class Faults:
    """Probabilities, per command, that it ends as failed or as cancelled."""

    fail: float = 0.0
    cancel: float = 0.0


@dataclass
class SimUnit:
    unit: Unit
    slots: Slots
    phase: Phase = Phase.IDLE
    version: int | None = 0  # of its weights; None: they died with a process
    arrived: int | None = None  # a version that was fetched
    unreported: list[SimSample] = field(default_factory=list)  # ends that a failed quantum reached
    busy_until_s: float = 0.0


class _Planned(NamedTuple):
    time_s: float
    order: int
    event: Event
    effect: Callable[[], None]
    rows: Callable[[], Sequence[Row]]


class SimExecutor:
    """Meets `runtime.loop.Executor`. `staleness` counts the trained tokens, `staleness_of_samples`
    the samples by their oldest token. `with_rows`: the rows of a record are made, too."""

    def __init__(
        self,
        workload: Work,
        spec: SchedulerSpec,
        *,
        costs: Costs | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        with_rows: bool = False,
    ) -> None:
        self.workload, self.spec = workload, spec
        self.costs, self.faults = costs or Costs(), faults or Faults()
        self.with_rows = with_rows
        self.now_s = 0.0
        self.weights = 0  # version of the trainer's weights
        self.published = 0  # the version that exists
        self.units = [
            SimUnit(unit, Slots(spec.max_running_samples)) for unit in spec.placement.units()
        ]
        self._of_card = {card: u for u in self.units for card in u.unit.cards}
        self.groups: dict[int, SimGroup] = {}
        self.trained: set[int] = set()
        self.staleness: Counter[int] = Counter()
        self.staleness_of_samples: Counter[int] = Counter()
        self._random = Random(seed)
        self._agenda: list[_Planned] = []  # a heap
        self._n_planned = 0
        self._in_flight: dict[int, Command] = {}
        self._last: _Planned | None = None  # given out, perhaps not committed

    # ------------------------------------------------------------ runtime.loop.Executor

    def submit(self, command: Command) -> None:
        self._settle()
        assert command.seq not in self._in_flight, f"submitted twice: {command}"
        needed = command.before if isinstance(command, ev.Switch) else PHASE_OF.get(type(command))
        start_s = self.now_s
        for card in command.cards:
            unit = self._of_card[card]
            assert needed in (None, unit.phase), f"{command} in phase {unit.phase}"
            start_s = max(start_s, unit.busy_until_s)
            assert start_s <= self.now_s, f"{command} while the card is busy"
        self._in_flight[command.seq] = command
        seconds, event, effect, made = self._plan(command)
        chance = self._random.random()
        if chance < self.faults.fail:
            event, effect = ev.Failed(command=command.seq, cause="injected"), self._half_of(command)
            made = _no_rows
        elif chance < self.faults.fail + self.faults.cancel:
            event, effect, made = ev.Cancelled(command=command.seq), _nothing, _no_rows
        event = replace(event, seconds=seconds)
        for card in command.cards:
            self._of_card[card].busy_until_s = self.now_s + seconds
        self._at(self.now_s + seconds, event, effect, made)

    def next_event(self) -> tuple[float, Event]:
        self._settle()
        assert self._agenda, "waits for ever: nothing is in flight"
        self._last = heapq.heappop(self._agenda)
        # the host handles one event after another
        self.now_s = max(self._last.time_s, self.now_s + self.costs.event_s)
        event = self._last.event
        if isinstance(event, ev.Terminal):
            del self._in_flight[event.command]
        return self.now_s, event

    def take_rows(self) -> Sequence[Row]:
        return self._last.rows() if self.with_rows and self._last is not None else ()

    # ------------------------------------------------------------ from outside

    def interrupt(self, event: Event, after_s: float) -> None:
        """An event that no command causes, e.g. StopRequested."""
        self._at(self.now_s + after_s, event)

    def crash(self, committed: bool) -> None:
        """The process dies; only what was committed stays. `committed`: the last event was. The
        next process brings all weights to the version that exists."""
        if committed:
            self._settle()
        self._last = None
        self._agenda.clear()
        self._in_flight.clear()
        for unit in self.units:
            unit.slots.pause()
            unit.busy_until_s = self.now_s
            unit.arrived = None
            if unit.version != self.published and not unit.unit.trains:
                unit.version = None

    # ------------------------------------------------------------ plans

    def _plan(self, command: Command) -> _Plan:
        """How long it takes, the event of its success, what that changes, and its rows."""
        costs, seq = self.costs, command.seq
        match command:
            case ev.Generate():
                return self._plan_generate(command)
            case ev.Reward():
                return self._plan_reward(command)
            case ev.Discard():
                gone = ev.Discarded(command=seq, group_id=command.group_id)
                effect = lambda: self._discard(command.group_id)  # noqa: E731
                # a group beyond the end of the data never was
                made = self.groups.get(command.group_id) and (lambda: rows.dropped(command))
                return costs.discard_s, gone, effect, made or _no_rows
            case ev.Score():
                tokens = sum(_tokens(self.groups[gid]) for gid in command.group_ids)
                return costs.score(tokens), ev.Scored(command=seq), _nothing, _no_rows
            case ev.Train():
                return self._plan_train(command)
            case ev.Publish():
                assert command.version == self.weights, (command, self.weights)
                new = ev.Published(command=seq, version=command.version)
                return costs.publish_s, new, self._publish, lambda: rows.version(command.version)
            case ev.Fetch() | ev.Receive():
                return self._plan_weights(command)
            case ev.Switch():
                to_generate = command.after in (Phase.GENERATE, Phase.EVAL)
                seconds = costs.to_generate_s if to_generate else costs.to_train_s
                done = ev.Switched(command=seq)
                return seconds, done, lambda: self._switch(command), _no_rows
            case ev.Evaluate():
                holding = {unit.version for unit in self.units if unit.unit.generates}
                assert holding == {command.version} == {self.published}, (command, holding)
                evaluated = ev.Evaluated(command=seq, version=command.version)
                return costs.eval_s, evaluated, _nothing, _no_rows
            case ev.Checkpoint():
                assert command.version == self.published == self.weights, command
                saved = ev.Checkpointed(command=seq, version=command.version)
                return costs.checkpoint_s, saved, _nothing, _no_rows
            case _:
                raise AssertionError(f"unknown command: {command}")

    def _plan_generate(self, command: ev.Generate) -> _Plan:
        unit = self._of_card[command.cards[0]]
        assert command.cards == unit.unit.cards, command
        if unit.version is None:  # issued again after a crash
            return 0.0, ev.Cancelled(command=command.seq), _nothing, _no_rows
        assert command.version == unit.version, (command, unit.version)
        fresh = self._admitted(command)
        plan = unit.slots.plan(fresh, command.max_decode_steps)
        ended = sorted((*unit.unreported, *plan.ended), key=lambda s: (s.group.group_id, s.index))
        finished = tuple(ev.Finished(s.group.group_id, s.index, s.length) for s in ended)
        event = ev.Generated(
            command=command.seq,
            finished=finished,
            n_tokens=plan.tokens,
            decode_steps=plan.decode_steps,
        )

        def effect() -> None:
            self.groups.update((group.group_id, group) for group in fresh)
            unit.slots.apply(plan, command.version)
            unit.unreported = []
            for sample in ended:
                sample.reported = True

        seconds = self.costs.quantum(
            plan.decode_steps, plan.tokens, plan.context_tokens, plan.prefill_tokens
        )
        return seconds, event, effect, lambda: rows.generated(command, fresh, finished)

    def _admitted(self, command: ev.Generate) -> list[SimGroup]:
        """Groups that start. Ids beyond the data are left out, and said to be so before the end."""
        fresh: list[SimGroup] = []
        n_updates, unit = self.spec.updates_per_batch, self._of_card[command.cards[0]]
        for gid, start_version, deadline in command.admit:
            assert gid not in self.groups, f"group {gid} admitted twice"
            assert start_version <= command.version
            # all updates of the batch are within S, and one batch more would not be
            last = deadline + n_updates - 1
            assert start_version <= deadline and last <= start_version + self.spec.max_staleness
            assert last + n_updates > start_version + self.spec.max_staleness
            if self.workload.n_groups is not None and gid >= self.workload.n_groups:
                self._at(self.now_s, ev.DataEnded(n_groups=self.workload.n_groups))
                continue
            group = SimGroup.of(gid, deadline, self.units.index(unit), self.workload.group(gid))
            fresh.append(group)
        return fresh

    def _plan_reward(self, command: ev.Reward) -> _Plan:
        group = self.groups[command.group_id]
        work = group.work
        rewarded = ev.Rewarded(
            command=command.seq,
            group_id=command.group_id,
            n_valid=work.n_valid,
            varies=work.varies,
        )
        return work.reward_s, rewarded, _nothing, lambda: rows.rewarded(group)

    def _plan_train(self, command: ev.Train) -> _Plan:
        self._check_train(command)
        groups = [self.groups[gid] for gid in command.group_ids]
        made = command.version + self.spec.updates_per_batch
        done = ev.Trained(command=command.seq, version=made)
        seconds = self.costs.train(sum(_tokens(group) for group in groups if group.work.trains))
        last = made - 1  # the version that the last update finds
        effect = lambda: self._train(command)  # noqa: E731
        return seconds, done, effect, lambda: rows.trained(command, groups, last)

    def _plan_weights(self, command: ev.Fetch | ev.Receive) -> _Plan:
        if isinstance(command, ev.Fetch):
            unit = self.units[command.unit]
            assert command.version <= self.published and not unit.unit.trains, command
            if command.version < self.published:  # issued again after a crash: it is gone
                return 0.0, ev.Cancelled(command=command.seq), _nothing, _no_rows
            here = ev.Fetched(command=command.seq, version=command.version, unit=command.unit)
            return self.costs.fetch_s, here, lambda: _set(unit, arrived=command.version), _no_rows
        unit = self._of_card[command.cards[0]]
        if unit.arrived is None:  # it died with a process
            return 0.0, ev.Cancelled(command=command.seq), _nothing, _no_rows
        assert command.version == unit.arrived, (command, unit.arrived)
        held = ev.Received(command=command.seq, version=command.version)

        def effect() -> None:
            unit.slots.pause()
            unit.version = command.version

        return self.costs.receive_s, held, effect, _no_rows

    def _half_of(self, command: Command) -> Callable[[], None]:
        """What a failed command leaves: nothing, but a quantum's tokens may be durable. Their
        samples' ends are then told by the next quantum; its admissions did not happen."""
        if not isinstance(command, ev.Generate) or self._random.random() < 0.5:
            return _nothing
        unit = self._of_card[command.cards[0]]
        if unit.version is None:
            return _nothing
        plan = unit.slots.plan([], command.max_decode_steps)

        def effect() -> None:
            unit.slots.apply(plan, command.version)
            unit.unreported += plan.ended

        return effect

    # ------------------------------------------------------------ effects

    def _check_train(self, command: ev.Train) -> None:
        assert command.version == self.weights == self.published, (command, self.weights)
        assert list(command.group_ids) == sorted(set(command.group_ids)), command
        last = command.version + self.spec.updates_per_batch - 1
        for gid in command.group_ids:
            assert gid not in self.trained, f"group {gid} trained twice"
            for sample in self.groups[gid].samples:
                assert sample.reported and sample.n_tokens == sample.length, sample
                for version, _ in sample.runs:
                    assert version <= command.version, (command, sample)
                    assert last - version <= self.spec.max_staleness, (command, sample)

    def _train(self, command: ev.Train) -> None:
        last = command.version + self.spec.updates_per_batch - 1
        for gid in command.group_ids:
            for sample in self.groups.pop(gid).samples:
                for version, n_tokens in sample.runs:
                    self.staleness[last - version] += n_tokens
                self.staleness_of_samples[last - sample.runs[0][0]] += 1
            self.trained.add(gid)
        self.weights += self.spec.updates_per_batch

    def _publish(self) -> None:
        self.published = self.weights
        for unit in self.units:
            if unit.unit.trains:
                unit.version = self.published

    def _switch(self, command: ev.Switch) -> None:
        for card in command.cards:
            self._of_card[card].phase = command.after
        for unit in {id(u): u for u in (self._of_card[card] for card in command.cards)}.values():
            unit.slots.pause()

    def _discard(self, group_id: int) -> None:
        group = self.groups.pop(group_id, None)
        if group is not None:
            unit = self.units[group.unit]
            unit.slots.remove(group)
            unit.unreported = [s for s in unit.unreported if s.group is not group]

    # ------------------------------------------------------------ clock

    def _at(
        self,
        time_s: float,
        event: Event,
        effect: Callable[[], None] | None = None,
        made: Callable[[], Sequence[Row]] | None = None,
    ) -> None:
        self._n_planned += 1
        planned = _Planned(time_s, self._n_planned, event, effect or _nothing, made or _no_rows)
        heapq.heappush(self._agenda, planned)

    def _settle(self) -> None:
        """The driver is back, so the last event is committed."""
        if self._last is not None:
            last, self._last = self._last, None
            last.effect()


_Plan = tuple[float, ev.Terminal, Callable[[], None], Callable[[], Sequence[Row]]]


def _tokens(group: SimGroup) -> int:
    """That are computed in training: the prompt of a group counts once."""
    return group.work.prompt_tokens + sum(sample.length for sample in group.samples)


def _set(unit: SimUnit, arrived: int) -> None:
    unit.arrived = arrived


def _nothing() -> None:
    pass


def _no_rows() -> Sequence[Row]:
    return ()
