"""The scheduler: events in, commands out.

Owns: what happens next, and why. It is pure: no clock, no randomness, no I/O, so `handle` is a
function of the events seen so far. Folding the recorded events through a new scheduler gives the
same state; that is how a run is resumed.
Does not own: the rule's arithmetic (`budget`), where each group is (`queue`), which commands are on
their way (`outbox`), which phases may follow which (`phase`), doing anything (the executor).

One command at a time runs on the cards; rewards and discards are host work beside it:

    RunStarted -> [EVAL Evaluate] -> GENERATE quanta -> as soon as there is a batch:
    [SCORE] -> TRAIN -> PUBLISH -> [EVAL Evaluate] -> [Checkpoint] -> GENERATE quanta, or the next
    batch if it is ready

What is next is always derived from the state, never from a plan: a command that failed has changed
no state, so the same work is issued again.
"""

from __future__ import annotations

from dataclasses import dataclass

from twofold import events as ev
from twofold.events import Admission, Command, Event
from twofold.sched.budget import choose_batch, feasible, may_start
from twofold.sched.outbox import Outbox
from twofold.sched.phase import PHASE_OF, TRANSITIONS
from twofold.sched.queue import Status, Stream
from twofold.types import Phase


@dataclass(frozen=True)
class SchedulerSpec:
    """What the scheduler must know of a run. Raises ValueError for what cannot work."""

    steps: int
    groups_per_step: int  # P
    group_size: int  # G
    max_staleness: int  # S
    max_running_samples: int  # slots per card
    quantum_decode_steps: int = 16
    max_drops_per_step: int = 32
    updates_per_batch: int = 1  # U
    dynamic_sampling: bool = False  # groups whose rewards are all equal are dropped
    needs_reference: bool = False
    evaluate: bool = False
    eval_every: int = 0  # steps; 0: before the first and after the last only
    checkpoint_every: int = 0  # steps; 0: after the last only
    cards: int = 1

    def __post_init__(self) -> None:
        least = {"steps": 0, "groups_per_step": 1, "group_size": 1, "max_running_samples": 1,
                 "quantum_decode_steps": 1, "max_staleness": 0, "max_drops_per_step": 0,
                 "updates_per_batch": 1,
                 "eval_every": 0, "checkpoint_every": 0}  # fmt: skip
        for name, low in least.items():
            value = vars(self)[name]
            if value < low:
                raise ValueError(f"{name} is {value}: it must be at least {low}")
        if self.cards != 1:
            raise ValueError(f"cards is {self.cards}: runs on one card only are supported yet")
        if self.batches_ahead < 0:
            raise ValueError(
                f"updates_per_batch is {self.updates_per_batch}: with max_staleness "
                f"{self.max_staleness} it may be {self.max_staleness + 1} at most"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError("dynamic_sampling compares the samples of a group: give 2 or more")

    @property
    def batches_ahead(self) -> int:
        """S': how many batches late a group may be trained. The last of a batch's U updates finds
        weights U - 1 versions newer than the first, and is within S too: (S' + 1) U - 1 <= S."""
        return (self.max_staleness + 1) // self.updates_per_batch - 1


@dataclass
class Card:
    """A card, as far as it has reported."""

    phase: Phase = Phase.IDLE
    version: int = 0  # of the weights it has acknowledged
    readmit: tuple[Admission, ...] = ()  # admitted by a Generate that failed


class Scheduler:
    """`outcome` is "" while the run goes on, then "done", "stopped: why" or "failed: why"."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self.spec = spec
        self.version = 0  # of the last published weights: updates made, U each step
        self.outcome = ""
        self.stream = Stream(spec.group_size, spec.updates_per_batch)
        self.cards = {card: Card() for card in range(spec.cards)}
        self.outbox = Outbox()
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
    def steps_made(self) -> int:
        """Batches whose versions exist; the unit in which the rule counts."""
        return self.version // self.spec.updates_per_batch

    def outstanding(self) -> list[Command]:
        """Issued and not ended, in order."""
        return list(self.outbox.outstanding.values())

    @property
    def waiting_for(self) -> str:
        """Why the cards have nothing to do; empty when they have, or when the run is over."""
        if self.finished or self.outbox.cards_busy():
            return ""
        held = [c for c in self.outstanding() if isinstance(c, ev.Reward | ev.Discard)]
        batch = choose_batch(self.stream.ready(), self.stream.waiting(), self.steps_made, self._p)
        named = [c for c in held if c.group_id in batch.awaited] or held
        if not named:
            return "nothing admissible"
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f"{named[0].kind.lower()} of group {named[0].group_id}{more}"

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
        self._stop = self.outcome = ""
        self._drops = 0
        self.outbox.reissue(epoch)

    def _end(self, event: ev.Terminal) -> None:
        command = self.outbox.end(event)
        self.stream.acknowledge(command.seq)
        match event:
            case ev.Failed():
                self._undo(command)
                if why := self.outbox.give_up(command, event.cause):
                    self.outcome = f"failed: {why}"
            case ev.Cancelled():
                self._undo(command)
            case _:
                self._apply(command, event)

    def _undo(self, command: Command) -> None:
        """Nothing has happened; all but these two are derived from the state again."""
        if isinstance(command, ev.Switch):
            for card in command.cards:
                self.cards[card].phase = command.before
        if isinstance(command, ev.Generate):
            self.cards[command.cards[0]].readmit = command.admit

    def _apply(self, command: Command, event: ev.Terminal) -> None:
        """What a fact changes."""
        match command, event:
            case ev.Switch(), ev.Switched():
                for card in command.cards:
                    self.cards[card].phase = command.after
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
                self._scored = True
            case ev.Train(), ev.Trained():
                assert command.version == self.version, (command, event)
                assert event.version == self._next_version, (command, event)
                self._trained = True
                self.stream.trained(self._batch)
            case ev.Publish(), ev.Published():
                assert event.version == command.version == self._next_version, (command, event)
                self._published(command)
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

    def _published(self, command: ev.Publish) -> None:
        self.version = command.version
        for card in command.cards:
            self.cards[card].version = command.version
        self.stream.published(self._batch)
        self._batch, self._scored, self._trained = (), False, False
        self._drops = 0

    # ------------------------------------------------------------ decisions

    def _decide(self) -> None:
        free = not self.outbox.cards_busy()
        if self._stop:
            if free:
                self._wind_down()
            return
        if free:
            self._drop_unusable()
        for entry in self.stream.free(Status.REWARDING):
            self._issue(ev.Reward(**self.outbox.stamp(()), group_id=entry.group_id))
        for entry in self.stream.free(Status.DROPPED):
            gid, reason = entry.group_id, entry.reason
            self._issue(ev.Discard(**self.outbox.stamp(()), group_id=gid, reason=reason))
        if free:
            self._advance()

    def _advance(self) -> None:
        """The next command of the cards, which are free. None: they wait."""
        over = self._over()
        if self._batch:
            self._continue_step()
        elif self._evaluation_due(over):
            if self._enter(Phase.EVAL):
                self._issue(ev.Evaluate(**self.outbox.stamp(self._all), version=self.version))
        elif self._checkpoint_due(over):
            self._issue(ev.Checkpoint(**self.outbox.stamp(self._all), version=self.version))
        elif over:
            if not self.stream.live:  # the last ones may still be on their way out
                self.outcome = "done"
        elif batch := self._choose():
            self._batch = tuple(sorted(batch))
            self.stream.train(batch)
            self._continue_step()
        else:
            for card in self.cards:
                self._generate(card)

    def _wind_down(self) -> None:
        """Asked to stop: nothing new, but weights that were changed become a version on disk. Host
        work that still runs is outstanding when the run goes on."""
        if self._trained:
            self._continue_step()
        elif self.version > self._checkpointed:
            self._issue(ev.Checkpoint(**self.outbox.stamp(self._all), version=self.version))
        else:
            complete = self._over() and not self._evaluation_due(True) and not self.stream.live
            self.outcome = "done" if complete else f"stopped: {self._stop}"

    def _continue_step(self) -> None:
        if self._trained:
            if self._enter(Phase.PUBLISH):
                self._issue(ev.Publish(**self.outbox.stamp(self._all), version=self._next_version))
        elif self.spec.needs_reference and not self._scored:
            if self._enter(Phase.SCORE):
                self._issue(ev.Score(**self.outbox.stamp(self._all), group_ids=self._batch))
        elif self._enter(Phase.TRAIN):
            train = ev.Train(
                **self.outbox.stamp(self._all), version=self.version, group_ids=self._batch
            )
            self._issue(train)

    def _choose(self) -> tuple[int, ...] | None:
        ready, waiting = self.stream.ready(), self.stream.waiting()
        if len(ready) < self._p:
            return None
        return choose_batch(ready, waiting, self.steps_made, self._p).batch

    def _generate(self, card: int) -> None:
        """One quantum, if the card has or may get something to decode."""
        state = self.cards[card]
        unfinished = self.stream.unfinished_samples(card)
        # twice the slots, so that a slot freed within a quantum is filled within it
        room = 2 * self.spec.max_running_samples - unfinished
        n_start = min(max(0, -(-room // self.spec.group_size)), self._startable(state.version))
        if (unfinished == 0 and n_start == 0) or not self._enter(Phase.GENERATE, (card,)):
            return
        deadline = state.version + self.spec.batches_ahead * self.spec.updates_per_batch
        fresh = self.stream.start(n_start, state.version, deadline, card)
        self._issue(
            ev.Generate(
                **self.outbox.stamp((card,)),
                version=state.version,
                max_decode_steps=self.spec.quantum_decode_steps,
                admit=(*state.readmit, *fresh),
            )
        )
        state.readmit = ()

    def _startable(self, version: int) -> int:
        """How many groups may start under the weights of `version`."""
        deadlines = self.stream.deadlines(self.version)
        deadline = version // self.spec.updates_per_batch + self.spec.batches_ahead
        by_rule = may_start(deadlines, deadline, self.steps_made, self._p)
        by_steps = self._p * (self.spec.steps - self.steps_made) - len(deadlines)
        return max(0, min(by_rule, by_steps, self.stream.unstarted()))

    def _drop_unusable(self) -> None:
        """Groups that do not exist after all and, once too few are left for a batch, all groups."""
        unfit = Status.GENERATING, Status.READY  # what is being rewarded is dropped once it is
        over = self._over()
        for entry in [e for e in self.stream.live.values() if e.status in unfit]:
            if over or not self.stream.exists(entry.group_id):
                card = self.cards[entry.card]
                card.readmit = tuple(a for a in card.readmit if a != entry.admission)
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

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(self.cards)

    def _enter(self, phase: Phase, cards: tuple[int, ...] | None = None) -> bool:
        """True when the cards are in `phase`; else they are sent there."""
        cards = cards or self._all
        before = self.cards[cards[0]].phase
        if before is phase:
            return True
        assert phase in TRANSITIONS[before], f"no way from {before} to {phase}"
        self._issue(ev.Switch(**self.outbox.stamp(cards), before=before, after=phase))
        for card in cards:
            self.cards[card].phase = Phase.SWITCH
        return False

    def _issue(self, command: Command) -> None:
        self.outbox.issue(command)
        self.stream.take(command)

    # ------------------------------------------------------------ invariants

    def check_integrity(self) -> None:
        """Asserts everything that holds between two events."""
        stream, outbox = self.stream, self.outbox
        outbox.check_integrity()
        assert self.finished or outbox.outstanding, "deadlock: nothing is on its way"
        if self.outcome == "done":
            assert not outbox.outstanding and not stream.live, "done, with work left"
        on_cards = [c for c in outbox.outstanding.values() if c.cards]
        assert len(on_cards) <= 1, on_cards
        for command in on_cards:
            for card in command.cards:
                phase = self.cards[card].phase
                assert phase is PHASE_OF.get(type(command), phase), (command, phase)
        stream.check_integrity(outbox.outstanding)
        deadlines = stream.deadlines(self.version)
        assert self.version % self.spec.updates_per_batch == 0, self.version
        assert feasible(deadlines, self.steps_made, self._p), (self.steps_made, deadlines)
        needed = self._p * (self.spec.steps - self.steps_made)
        assert len(deadlines) <= needed, "more than is needed"
        assert len(self._batch) in (0, self._p)
        in_batch = Status.TRAINED if self._trained else Status.TRAINING
        for gid in self._batch:
            assert stream.live[gid].status is in_batch, stream.live[gid]
            assert stream.live[gid].deadline >= self.version, f"group {gid} is too old"
        assert all(c.version <= self.version for c in self.cards.values())
