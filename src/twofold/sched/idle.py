"""Why a card does nothing.

Owns: the causes, and which of them holds for a unit that is free; why no further group may start,
which is also why decode slots are empty. Does not own: decisions (`scheduler`; this reads them off
its state and changes nothing), seconds (`obs.meters` adds them up).

Each free unit has exactly one cause, the first that applies in this order: the run ends; an
evaluation; the other cards of a step; the unit's own weights; what the next batch waits for. A unit
with a command has none.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import cached_property

from twofold.sched.budget import has_batch
from twofold.sched.queue import Status
from twofold.sched.scheduler import Scheduler, UnitState


class Cause(StrEnum):
    """What the unit waits for. That it may start no other group meanwhile is due to the staleness
    bound for REWARD, REFERENCE, REQUIRED, LONG_TAIL and BOUND on cards that generate: a larger one
    shortens these. It does nothing for the others."""

    REWARD = "reward"  # with the rewards that are outstanding there would be a batch
    REFERENCE = "reference"  # with the reference log-probs that are outstanding there would be one
    REQUIRED = "required"  # enough groups are generated, but one that is due now is not
    LONG_TAIL = "long_tail"  # the batch's last samples generate, nothing may start beside them
    GENERATION = "generation"  # groups of the batch generate, and the slots have work
    BOUND = "bound"  # nothing may start before the batch in training has become a version
    WEIGHTS = "weights"  # those it holds are too old to start with, newer ones are on their way
    PEERS = "peers"  # other cards of the same step or evaluation are not free yet
    EVALUATION = "evaluation"  # cards that generate evaluate, or are about to
    DATA = "data"  # the data has no more groups
    STOPPING = "stopping"  # the run was asked to end
    OVER = "over"  # the run needs nothing more of this card


class Idle:
    """The causes in the scheduler's present state; make a new one after each event.

    O(1) for each unit after O(S) for the first, whatever is live: what causes depend on is counted
    by deadline already.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._no_start: dict[int, Cause | None] = {}  # by version

    def causes(self) -> dict[int, Cause]:
        """By index, of every free unit."""
        units = self._scheduler.units
        return {unit.index: self.cause(unit) for unit in units if unit.free}

    def cause(self, unit: UnitState) -> Cause:
        """Of a free unit. Depends on its job, `version` and `lost`, so is the same for all units
        that agree in these."""
        assert unit.free, f"{unit} is not idle"
        scheduler = self._scheduler
        if scheduler.finished:
            return Cause.OVER
        if scheduler.stopping:
            return Cause.STOPPING
        if unit.unit.scores:
            return self._nothing_to_score()
        if self._evaluating:
            return self._held_by_evaluation(unit)
        if unit.unit.trains and self._step_due:
            return Cause.PEERS
        if scheduler.over():
            return self._over
        if unit.unit.generates:
            return self._nothing_to_generate(unit)
        return self._batch_waits_for

    def no_start(self, version: int) -> Cause | None:
        """Why no group may start under the weights of `version` (OVER, DATA, WEIGHTS or BOUND);
        None when some may."""
        if version not in self._no_start:
            self._no_start[version] = self._why_no_start(version)
        return self._no_start[version]

    # ------------------------------------------------------------ by job

    def _nothing_to_generate(self, unit: UnitState) -> Cause:
        """Nothing is left to decode on it, and it may start nothing."""
        if unit.lost:
            return Cause.WEIGHTS
        cause = self.no_start(unit.version)
        assert cause is not None, f"{unit} could start a group"
        if cause is Cause.WEIGHTS or (self._step_due and cause is Cause.BOUND):
            return cause
        if cause is Cause.BOUND or unit.unit.trains:  # what its next job waits for
            return self._batch_waits_for
        return cause

    def _nothing_to_score(self) -> Cause:
        stream = self._scheduler.stream
        if self._scheduler.over():
            return self._over
        if stream.waiting_due[Status.REWARDING]:
            return Cause.REWARD
        if self._evaluating:
            return Cause.EVALUATION
        if stream.waiting_due[Status.GENERATING] or not self.no_start(self._scheduler.version):
            return Cause.GENERATION
        return Cause.BOUND

    def _held_by_evaluation(self, unit: UnitState) -> Cause:
        scheduler = self._scheduler
        if unit.unit.generates:
            if unit.version != scheduler.version:
                return Cause.WEIGHTS
            return Cause.PEERS if self._a_generator_is_busy else Cause.WEIGHTS
        waits_for = None if self._step_due or scheduler.over() else self._batch_waits_for
        if waits_for in (Cause.REWARD, Cause.REFERENCE):
            return waits_for
        return Cause.EVALUATION

    # ------------------------------------------------------------ what is the same for all

    @cached_property
    def _evaluating(self) -> bool:
        return self._scheduler.evaluation_due()

    @cached_property
    def _step_due(self) -> bool:
        return self._scheduler.step_due()

    @cached_property
    def _a_generator_is_busy(self) -> bool:
        return any(not unit.free for unit in self._scheduler.generators)

    @property
    def _over(self) -> Cause:
        """Why no further version will be made."""
        scheduler = self._scheduler
        return Cause.OVER if scheduler.steps_made == scheduler.spec.steps else Cause.DATA

    def _why_no_start(self, version: int) -> Cause | None:
        scheduler, spec = self._scheduler, self._scheduler.spec
        if scheduler.startable(version):
            return None
        to_train = spec.groups_per_step * (spec.steps - scheduler.steps_made)
        if scheduler.stream.due.total() >= to_train:
            return Cause.OVER
        if not scheduler.stream.unstarted():
            return Cause.DATA
        if version < scheduler.version and scheduler.startable(scheduler.version):
            return Cause.WEIGHTS
        return Cause.BOUND

    @cached_property
    def _batch_waits_for(self) -> Cause:
        """Of the groups that are on their way to being ready the nearest that make a batch."""
        scheduler, stream = self._scheduler, self._scheduler.stream
        ready = Counter(stream.ready_due)

        def enough(status: Status) -> bool:
            ready.update(stream.waiting_due[status])
            p = scheduler.spec.groups_per_step
            return has_batch(ready, stream.due, scheduler.steps_made, p)

        if enough(Status.SCORING):
            return Cause.REFERENCE
        if enough(Status.REWARDING):
            return Cause.REWARD
        if ready.total() >= scheduler.spec.groups_per_step:
            return Cause.REQUIRED
        may_start = {self.no_start(unit.version) for unit in scheduler.generators}
        if enough(Status.GENERATING):
            slots = len(scheduler.generators) * scheduler.spec.max_running_samples
            empty = stream.all_unfinished_samples() < slots
            return Cause.LONG_TAIL if empty and None not in may_start else Cause.GENERATION
        # groups must start first
        return Cause.GENERATION if None in may_start else Cause.WEIGHTS
