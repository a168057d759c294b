"""The scheduler: events in, commands out.

Owns: what happens next, and why. It is pure: no clock, no randomness, no I/O, so `handle` is a
function of the events seen so far. Folding the recorded events through a new scheduler gives the
same state; that is how a run is resumed.
Does not own: the rule's arithmetic (`budget`), where each group is (`queue`), which commands are on
their way (`outbox`), which phases may follow which (`phase`), which cards have which job
(`placement`), why a card is idle (`idle`), doing anything (the executor).

Cards that act together are a unit, and a unit does one thing at a time; rewards and discards are
host work beside it. On cards with both jobs:

    RunStarted -> [EVAL Evaluate] -> GENERATE quanta -> as soon as there is a batch:
    [SCORE] -> TRAIN -> PUBLISH -> [EVAL Evaluate] -> [Checkpoint] -> GENERATE quanta, or the next
    batch if it is ready

Cards that only train do the second half of this and never stop for the first; replicas that only
generate decode all the time, Fetch new weights meanwhile and Receive them between two quanta; cards
that only score take every rewarded group at once. All units that train start each part of a step
together.

What is next is always derived from the state, never from a plan: a command that failed has changed
no state, so the same work is issued again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twofold import events as ev
from twofold.events import Admission, Command, Event
from twofold.sched.budget import choose_batch, feasible, has_batch, may_start
from twofold.sched.outbox import Outbox
from twofold.sched.phase import PHASE_OF, TRANSITIONS
from twofold.sched.placement import Unit
from twofold.sched.queue import UNBOUNDED, Status, Stream
from twofold.sched.spec import SchedulerSpec as SchedulerSpec
from twofold.types import Phase


@dataclass
class UnitState:
    """A unit, as far as it has reported."""

    index: int
    unit: Unit
    phase: Phase = Phase.IDLE
    version: int = 0  # of the weights it has acknowledged
    fetched: int = 0  # the newest version that has travelled to it
    fetching: bool = False
    lost: bool = False  # its weights died with a process: it must receive before it generates
    command: int | None = None  # seq of what it does now
    readmit: tuple[Admission, ...] = ()  # admitted by a Generate that failed

    @property
    def free(self) -> bool:
        return self.command is None


class Scheduler:
    """`outcome` is "" while the run goes on, then "done", "stopped: why" or "failed: why"."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.spec = spec
        self.version = 0  # of the last published weights: updates made, U each step
        self.outcome = ""
        self.stream = Stream(spec.group_size, spec.updates_per_batch)
        self.outbox = Outbox()
        self.units = [UnitState(i, unit) for i, unit in enumerate(spec.placement.units())]
        self._of_card = {card: u for u in self.units for card in u.unit.cards}
        self._trainers = [u for u in self.units if u.unit.trains]
        self._generators = [u for u in self.units if u.unit.generates]
        self._scorers = [u for u in self.units if u.unit.scores]
        self._receivers = [u for u in self._generators if not u.unit.trains]
        self._both = len(self._receivers) < len(self._generators)
        self._n_busy = self._n_trainers_busy = 0  # units
        self._batch: tuple[int, ...] = ()  # groups that make the next version, ascending
        self._scored = self._trained = False  # how far that batch is
        self._evaluated = -1  # the last version evaluated
        self._checkpointed = 0  # the last version on disk; 0 is the model that the run began with
        self._drops = 0  # since the last trained step
        self._stop = ""

    # ------------------------------------------------------------ what others may ask

    @property
    def finished(self) -> bool:
        return self.outcome != ""

    @property
    def busy(self) -> bool:
        """A card does something."""
        return self._n_busy > 0

    @property
    def steps_made(self) -> int:
        """Batches whose versions exist; the unit in which the rule counts."""
        return self.version // self.spec.updates_per_batch

    @property
    def batch(self) -> tuple[int, ...]:
        """The groups that make the next version, once they are chosen; ascending."""
        return self._batch

    def outstanding(self) -> list[Command]:
        """Issued and not ended, in order."""
        return list(self.outbox.outstanding.values())

    @property
    def waiting_for(self) -> str:
        """Why no card has anything to do; empty when one has, or when the run is over."""
        if self.finished or self._n_busy:
            return ""
        held = [c for c in self.outstanding() if isinstance(c, ev.Reward | ev.Discard)]
        batch = choose_batch(self.stream.ready(), self.stream.waiting(), self.steps_made, self._p)
        named = [c for c in held if c.group_id in batch.awaited]
        if not named and any(unit.fetching for unit in self._receivers):
            return f"fetch of version {self.version}"
        if not (named := named or held):
            return "nothing admissible"
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f"{named[0].kind.lower()} of group {named[0].group_id}{more}"

    def evaluation_due(self) -> bool:
        """Of the version that exists."""
        return self._evaluation_due(self._over())

    @property
    def stopping(self) -> bool:
        """Someone asked the run to end early."""
        return self._stop != ""

    def over(self) -> bool:
        """No further version is or will be made."""
        return self._over()

    def step_due(self) -> bool:
        """The cards that train are wanted: for the next part of a step, or for a checkpoint. As
        `_advance_training` decides it."""
        if self._batch:
            return True
        over = self._over()
        if self._both and self._evaluation_due(over):
            return False
        return self._checkpoint_due(over) or (not over and self._has_batch())

    @property
    def generators(self) -> Sequence[UnitState]:
        """The units that generate."""
        return self._generators

    def startable(self, version: int) -> int:
        """How many groups may start under the weights of `version`."""
        deadline = version // self.spec.updates_per_batch + self.spec.batches_ahead
        by_rule = may_start(self.stream.due, deadline, self.steps_made, self._p)
        needed = self._p * (self.spec.steps - self.steps_made) - self.stream.due.total()
        return max(0, min(by_rule, needed, self.stream.unstarted()))

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """The commands that follow from `event`, in order. `now_s` is for the record: no decision
        reads it. Asserts that the event is possible."""
        assert isinstance(event, ev.Resumed) or not self.finished, f"{event} after the end"
        self.outbox.issued = []
        match event:
            case ev.Terminal():
                self._end(event)
            case ev.RunStarted():
                assert self.outbox.next_seq == 0, "a run starts once"
            case ev.DataEnded():
                self.stream.n_groups = event.n_groups
            case ev.StopRequested():
                self._stop = self._stop or event.reason or "asked to"
            case ev.Resumed():
                self._resume(event.epoch)
            case _:
                raise AssertionError(f"no event of the scheduler: {event}")
        if not self.finished:
            self._decide()
        return self.outbox.issued

    def _resume(self, epoch: int) -> None:
        """Cards that train hold the version that exists (redo made it); what a replica held, if it
        was an older one, is nowhere any more."""
        self._stop = self.outcome = ""
        self._drops = 0
        self.outbox.reissue(epoch)
        for unit in self._receivers:
            unit.fetched = unit.version
            unit.lost = unit.version < self.version

    def _end(self, event: ev.Terminal) -> None:
        command = self.outbox.end(event)
        self.stream.acknowledge(command.seq)
        units = self._units_of(command)
        for unit in units:
            unit.command = None
        self._count_busy(units, -1)
        match event:
            case ev.Failed():
                self._undo(command, units)
                if why := self.outbox.give_up(command, event.cause):
                    self.outcome = f"failed: {why}"
            case ev.Cancelled():
                self._undo(command, units)
            case _:
                self._apply(command, units, event)

    def _undo(self, command: Command, units: list[UnitState]) -> None:
        """Nothing has happened; all but these are derived from the state again."""
        if isinstance(command, ev.Switch):
            for unit in units:
                unit.phase = command.before
        if isinstance(command, ev.Generate):
            units[0].readmit = command.admit
        if isinstance(command, ev.Fetch):
            self.units[command.unit].fetching = False

    def _apply(self, command: Command, units: list[UnitState], event: ev.Terminal) -> None:
        """What a fact changes."""
        match command, event:
            case ev.Switch(), ev.Switched():
                for unit in units:
                    unit.phase = command.after
            case ev.Generate(), ev.Generated():
                for sample in event.finished:
                    self.stream.finish_sample(sample.group_id, sample.index)
            case ev.Reward(), ev.Rewarded():
                assert event.group_id == command.group_id, (command, event)
                self._rewarded(event)
            case ev.Discard(), ev.Discarded():
                assert event.group_id == command.group_id, (command, event)
                self.stream.discarded(event.group_id)
            case ev.Score(), ev.Scored():
                if self._scorers:
                    for gid in command.group_ids:
                        self.stream.make_ready(gid)
                else:
                    self._scored = True
            case ev.Train(), ev.Trained():
                assert command.version == self.version, (command, event)
                assert event.version == self._next_version, (command, event)
                self._trained = True
                self.stream.trained(self._batch)
            case ev.Publish(), ev.Published():
                assert event.version == command.version == self._next_version, (command, event)
                self._published(command.version, units)
            case ev.Fetch(), ev.Fetched():
                assert (event.version, event.unit) == (command.version, command.unit), event
                self.units[event.unit].fetched = event.version
                self.units[event.unit].fetching = False
            case ev.Receive(), ev.Received():
                assert event.version == command.version <= self.version, (command, event)
                units[0].version, units[0].lost = event.version, False
            case ev.Evaluate(), ev.Evaluated():
                assert event.version == command.version == self.version, (command, event)
                self._evaluated = event.version
            case ev.Checkpoint(), ev.Checkpointed():
                assert event.version == command.version == self.version, (command, event)
                self._checkpointed = event.version
            case _:
                raise AssertionError(f"{event} does not end {command}")

    def _rewarded(self, event: ev.Rewarded) -> None:
        gid, group_size = event.group_id, self.spec.group_size
        enough = event.n_valid >= min(2, group_size)
        if enough and (event.varies or not self.spec.dynamic_sampling):
            if self._scorers:
                self.stream.score(gid)
            else:
                self.stream.make_ready(gid)
            return
        reason = f"{event.n_valid} of {group_size} samples have a reward"
        reason += f": {event.cause}" if event.cause else ""
        if enough:
            reason = "its rewards are all equal"
        self.stream.drop(gid, reason)
        self._drops += 1
        if self._drops > self.spec.max_drops_per_step:
            why = (
                f"{self._drops} groups dropped in step {self.steps_made + 1}, "
                f"the last (group {gid}) because {reason}"
            )
            if enough:  # nothing is broken: the task is solved, or far too hard
                self._stop = self._stop or why
            else:
                self.outcome = f"failed: {why}"

    def _published(self, version: int, units: list[UnitState]) -> None:
        self.stream.published(self._batch, self.steps_made)
        self.version = version
        for unit in units:
            unit.version = version
        self._batch, self._scored, self._trained = (), False, False
        self._drops = 0

    # ------------------------------------------------------------ decisions

    def _decide(self) -> None:
        if self._stop:
            if not self._n_busy:
                self._wind_down()
            return
        over = self._over()
        if over or self.stream.n_groups < UNBOUNDED:
            self._drop_unusable(over)
        for entry in self.stream.free(Status.REWARDING):
            self._issue(ev.Reward(**self.outbox.stamp(()), group_id=entry.group_id))
        for entry in self.stream.free(Status.DROPPED):
            gid, reason = entry.group_id, entry.reason
            self._issue(ev.Discard(**self.outbox.stamp(()), group_id=gid, reason=reason))
        self._score_groups()
        self._fetch()
        evaluating = self._evaluation_due(over)
        wanted = self._advance_training(over, evaluating)
        if evaluating:
            self._evaluate(wanted)
        self._advance_generation(evaluating or over, wanted)
        if over and not evaluating and not self.outbox.outstanding and not self.stream.live:
            self.outcome = "done"

    def _score_groups(self) -> None:
        """Cards that only score take every group that has its rewards."""
        for unit in self._scorers:
            groups = self.stream.free(Status.SCORING) if unit.free else []
            if groups and self._enter(Phase.SCORE, [unit]):
                ids = tuple(entry.group_id for entry in groups)
                self._issue(ev.Score(**self._stamp([unit]), group_ids=ids))

    def _fetch(self) -> None:
        """New weights travel to the replicas that only generate, while these go on."""
        for unit in self._receivers:
            if unit.fetched < self.version and not unit.fetching:
                unit.fetching = True
                stamp = self.outbox.stamp(())
                self._issue(ev.Fetch(**stamp, version=self.version, unit=unit.index))

    def _advance_training(self, over: bool, evaluating: bool) -> bool:
        """The next part of a step, once all units that train are free. True: they are wanted for
        it, so that those which generate too get no further quantum."""
        free = not self._n_trainers_busy
        if self._batch:
            if free:
                self._continue_step(evaluating)
            return True
        if evaluating and self._both:
            return False  # the evaluation comes first
        if self._checkpoint_due(over):
            if free:
                stamp = self._stamp(self._trainers)
                self._issue(ev.Checkpoint(**stamp, version=self.version))
            return True
        if over or not self._has_batch():
            return False
        if free:
            batch = choose_batch(
                self.stream.ready(), self.stream.waiting(), self.steps_made, self._p
            ).batch
            assert batch is not None
            self._batch = tuple(sorted(batch))
            self.stream.train(batch, self.steps_made)
            self._continue_step(evaluating)
        return True

    def _continue_step(self, evaluating: bool = False) -> None:
        units = self._trainers
        if self._trained:
            # the version that is to be evaluated stays the newest until it has been
            if not evaluating and self._enter(Phase.PUBLISH, units):
                self._issue(ev.Publish(**self._stamp(units), version=self._next_version))
        elif self.spec.scores_in_step and not self._scored:
            if self._enter(Phase.SCORE, units):
                self._issue(ev.Score(**self._stamp(units), group_ids=self._batch))
        elif self._enter(Phase.TRAIN, units):
            stamp = self._stamp(units)
            self._issue(ev.Train(**stamp, version=self.version, group_ids=self._batch))

    def _evaluate(self, wanted: bool) -> None:
        """Held-out evaluation on all units that generate, once they hold this version."""
        units = self._generators
        able = all(u.free and u.version == self.version for u in units)
        if able and not (wanted and self._both) and self._enter(Phase.EVAL, units):
            self._issue(ev.Evaluate(**self._stamp(units), version=self.version))

    def _advance_generation(self, paused: bool, wanted: bool) -> None:
        """What each free unit that generates does next. `paused`: nothing is decoded. `wanted`: nor
        by those that train, too."""
        for unit in self._receivers if wanted else self._generators:
            if not unit.free:
                continue
            if unit.version < unit.fetched:
                self._issue(ev.Receive(**self._stamp([unit]), version=unit.fetched))
            elif not (paused or unit.lost):
                self._generate(unit)

    def _generate(self, unit: UnitState) -> None:
        """One quantum, if the unit has or may get something to decode."""
        unfinished = self.stream.unfinished_samples(unit.index)
        # twice the slots, so that a slot freed within a quantum is filled within it
        room = 2 * self.spec.max_running_samples - unfinished
        n_start = self.startable(unit.version) if room > 0 else 0
        if n_start:
            n_start = min(n_start, self._groups_for(room), self._fair_share(unit, n_start))
        if (unfinished == 0 and n_start == 0) or not self._enter(Phase.GENERATE, [unit]):
            return
        deadline = unit.version + self.spec.batches_ahead * self.spec.updates_per_batch
        fresh = self.stream.start(n_start, unit.version, deadline, unit.index)
        self._issue(
            ev.Generate(
                **self._stamp([unit]),
                version=unit.version,
                max_decode_steps=self.spec.quantum_decode_steps,
                admit=(*unit.readmit, *fresh),
            )
        )
        unit.readmit = ()

    def _fair_share(self, unit: UnitState, startable: int) -> int:
        """Groups that this unit may start so that all replicas get as much to decode."""
        total = self.stream.all_unfinished_samples() + startable * self.spec.group_size
        share = -(-total // len(self._generators))
        return self._groups_for(share - self.stream.unfinished_samples(unit.index))

    def _groups_for(self, n_samples: int) -> int:
        return max(0, -(-n_samples // self.spec.group_size))

    def _wind_down(self) -> None:
        """Asked to stop: nothing new, but weights that were changed become a version on disk. Host
        work that still runs is outstanding when the run goes on."""
        if self._trained and self._evaluation_due(over=False):
            self._fetch()
            self._advance_generation(paused=True, wanted=True)
            self._evaluate(wanted=True)
        elif self._trained:
            self._continue_step()
        elif self.version > self._checkpointed:
            stamp = self._stamp(self._trainers)
            self._issue(ev.Checkpoint(**stamp, version=self.version))
        else:
            complete = self._over() and not self._evaluation_due(True) and not self.stream.live
            if not complete:
                self.outcome = f"stopped: {self._stop}"
            elif not self.outbox.outstanding:
                self.outcome = "done"

    def _has_batch(self) -> bool:
        ready, due = self.stream.ready_due, self.stream.due
        return self.stream.n_ready() >= self._p and has_batch(ready, due, self.steps_made, self._p)

    def _drop_unusable(self, over: bool) -> None:
        """Groups that do not exist after all and, once too few are left for a batch, all groups.
        What a command holds is dropped once it is given back."""
        unfit = Status.GENERATING, Status.READY, Status.SCORING
        for entry in [e for e in self.stream.live.values() if e.status in unfit]:
            if entry.lease is None and (over or not self.stream.exists(entry.group_id)):
                unit = self.units[entry.unit]
                unit.readmit = tuple(a for a in unit.readmit if a != entry.admission)
                self.stream.drop(entry.group_id, "data ended")

    def _over(self) -> bool:
        """No further version is or will be made."""
        if self._batch:
            return False
        too_few = self.stream.unstarted() < self._p and self.stream.n_usable() < self._p
        return self.steps_made == self.spec.steps or too_few

    def _evaluation_due(self, over: bool) -> bool:
        if not self.spec.evaluate or self._evaluated == self.version:
            return False
        every, made = self.spec.eval_every, self.steps_made
        return over or made == 0 or (every > 0 and made % every == 0)

    def _checkpoint_due(self, over: bool) -> bool:
        every = self.spec.checkpoint_every
        due = over or (every > 0 and self.steps_made % every == 0)
        return due and self.version > self._checkpointed

    # ------------------------------------------------------------ issuing

    @property
    def _next_version(self) -> int:
        return self.version + self.spec.updates_per_batch

    @property
    def _p(self) -> int:
        return self.spec.groups_per_step

    def _stamp(self, units: Sequence[UnitState]) -> dict[str, Any]:
        return self.outbox.stamp(tuple(card for unit in units for card in unit.unit.cards))

    def _units_of(self, command: Command) -> list[UnitState]:
        """The units that the command runs on; none for host work."""
        found = {u.index: u for u in (self._of_card[card] for card in command.cards)}
        return list(found.values())

    def _enter(self, phase: Phase, units: Sequence[UnitState]) -> bool:
        """True when the units are in `phase`; else those that are not are sent there."""
        elsewhere: dict[Phase, list[UnitState]] = {}
        for unit in units:
            if unit.phase is not phase:
                elsewhere.setdefault(unit.phase, []).append(unit)
        for before, group in elsewhere.items():
            assert phase in TRANSITIONS[before], f"no way from {before} to {phase}"
            self._issue(ev.Switch(**self._stamp(group), before=before, after=phase))
            for unit in group:
                unit.phase = Phase.SWITCH
        return not elsewhere

    def _issue(self, command: Command) -> None:
        self.outbox.issue(command)
        units = self._units_of(command)
        for unit in units:
            assert unit.free, f"{command} while {unit} is not free"
            unit.command = command.seq
        self._count_busy(units, 1)
        self.stream.take(command, units[0].index if units else None)

    def _count_busy(self, units: Sequence[UnitState], n: int) -> None:
        self._n_busy += n * len(units)
        self._n_trainers_busy += n * sum(unit.unit.trains for unit in units)

    # ------------------------------------------------------------ invariants

    def check_integrity(self) -> None:
        """Asserts everything that holds between two events."""
        stream, outbox = self.stream, self.outbox
        outbox.check_integrity()
        assert self.finished or outbox.outstanding, "deadlock: nothing is on its way"
        if self.outcome == "done":
            assert not outbox.outstanding and not stream.live, "done, with work left"
        stream.check_integrity(outbox.outstanding.values(), self.steps_made)
        self._check_units(outbox.outstanding.values())
        assert self.version % self.spec.updates_per_batch == 0, self.version
        due = list(stream.due.elements())
        assert feasible(due, self.steps_made, self._p), (self.steps_made, due)
        needed = self._p * (self.spec.steps - self.steps_made)
        assert len(due) <= needed, "more than is needed"
        assert len(self._batch) in (0, self._p)
        in_batch = Status.TRAINED if self._trained else Status.TRAINING
        for gid in self._batch:
            assert stream.live[gid].status is in_batch, stream.live[gid]
            assert stream.live[gid].deadline >= self.version, f"group {gid} is too old"

    def _check_units(self, outstanding: Iterable[Command]) -> None:
        doing: dict[int, int] = {}  # unit -> seq
        for command in outstanding:
            units = self._units_of(command)
            assert {card for u in units for card in u.unit.cards} == set(command.cards), command
            for unit in units:
                assert unit.index not in doing, f"{unit} does two things at a time"
                doing[unit.index] = command.seq
                assert unit.phase is PHASE_OF.get(type(command), unit.phase), (command, unit)
        assert doing == {u.index: u.command for u in self.units if not u.free}
        assert self._n_busy == len(doing)
        assert self._n_trainers_busy == sum(not u.free for u in self._trainers)
        for unit in self.units:
            assert unit.version <= self.version and unit.fetched <= self.version
            fetches = [c for c in outstanding if isinstance(c, ev.Fetch) and c.unit == unit.index]
            assert len(fetches) == unit.fetching, (unit, fetches)
            assert unit.version == self.version or not unit.unit.trains
