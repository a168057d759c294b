"""The decode slots of one simulated replica: who decodes, who waits, how far each is.

Owns: continuous batching of samples whose lengths are known beforehand, in time proportional to
the samples that start or end, not to those that decode. Does not own: seconds (`cost`), which
groups are admitted (the scheduler), when a quantum counts (`executor`).

A plan changes nothing until it is applied, as a command changes nothing until its event is
committed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from twofold.sim.workload import GroupWork


@dataclass(slots=True, eq=False)
class SimSample:
    """`n_tokens` are those it had when it last took a slot, or all when it has ended."""

    group: SimGroup
    index: int
    length: int
    n_tokens: int = 0
    since: int = 0  # the clock when it took its slot
    runs: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens), in order
    reported: bool = False  # its end was in an event


@dataclass(slots=True, eq=False)
class SimGroup:
    group_id: int
    deadline: int
    unit: int
    work: GroupWork
    samples: list[SimSample] = field(default_factory=list)
    cached_in: int = -1  # the pause count while its prompt's KV is there

    @classmethod
    def of(cls, group_id: int, deadline: int, unit: int, work: GroupWork) -> SimGroup:
        group = cls(group_id, deadline, unit, work)
        group.samples = [SimSample(group, i, n) for i, n in enumerate(work.lengths)]
        return group


_Running = tuple[int, int, int, SimSample]  # (clock at its end, group, index, itself)
_Waiting = tuple[int, bool, int, int, SimSample]  # (deadline, is new, group, index, itself)


class QuantumPlan(NamedTuple):
    """What a quantum will do, and the state it leads to."""

    decode_steps: int
    tokens: int
    context_tokens: int  # over all sampled tokens, how many each attends to
    prefill_tokens: int
    started: list[tuple[SimSample, int]]  # with the clock
    ended: list[SimSample]
    running: list[_Running]
    waiting: list[_Waiting]
    context: int


class Slots:
    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.clock = 0  # decode steps made
        self.version = 0  # of the weights under which the running samples decode
        self._running: list[_Running] = []  # heaps
        self._waiting: list[_Waiting] = []
        self._context = 0  # tokens in the KV cache of the running samples
        self._n_pauses = 0

    def plan(self, admitted: list[SimGroup], max_steps: int) -> QuantumPlan:
        """At most `max_steps` decode steps. Running samples keep their slots; freed ones go to the
        earliest deadline, resumed before new. A slot's sample decodes one token a step."""
        running, waiting = list(self._running), list(self._waiting)
        for group in admitted:
            for sample in group.samples:
                heapq.heappush(waiting, _to_wait(sample))
        started: list[tuple[SimSample, int]] = []
        ended: list[SimSample] = []
        prompts_cached: set[int] = set()
        clock, context = self.clock, self._context
        tokens = context_tokens = prefill = 0
        while clock < self.clock + max_steps:
            while waiting and len(running) < self.n_slots:
                *_, sample = heapq.heappop(waiting)
                group, prompt = sample.group, sample.group.work.prompt_tokens
                left = sample.length - sample.n_tokens
                heapq.heappush(running, (clock + left, group.group_id, sample.index, sample))
                started.append((sample, clock))
                prefill += sample.n_tokens
                if group.cached_in != self._n_pauses and group.group_id not in prompts_cached:
                    prompts_cached.add(group.group_id)
                    prefill += prompt
                context += prompt + sample.n_tokens
            if not running:
                break
            steps = min(self.clock + max_steps, running[0][0]) - clock
            n = len(running)
            tokens += steps * n
            context_tokens += steps * context + n * steps * (steps + 1) // 2
            context += n * steps
            clock += steps
            while running and running[0][0] == clock:
                *_, sample = heapq.heappop(running)
                ended.append(sample)
                context -= sample.group.work.prompt_tokens + sample.length
        return QuantumPlan(
            clock - self.clock, tokens, context_tokens, prefill, started, ended, running, waiting,
            context,
        )  # fmt: skip

    def apply(self, plan: QuantumPlan, version: int) -> None:
        """The quantum has happened, under these weights."""
        assert version == self.version or not self._running, "new weights without a pause"
        self.version = version
        for sample, clock in plan.started:
            sample.since = clock
            sample.group.cached_in = self._n_pauses
        for sample in plan.ended:
            sample.runs.append((version, sample.length - sample.n_tokens))
            sample.n_tokens = sample.length
        self.clock += plan.decode_steps
        self._running, self._waiting, self._context = plan.running, plan.waiting, plan.context

    def pause(self) -> None:
        """Unfinished samples leave their slots; tokens are their whole state."""
        self._n_pauses += 1
        for *_, sample in self._running:
            n = self.clock - sample.since
            if n:
                sample.runs.append((self.version, n))
                sample.n_tokens += n
            heapq.heappush(self._waiting, _to_wait(sample))
        self._running, self._context = [], 0

    def remove(self, group: SimGroup) -> None:
        """It will not go on, here or anywhere; no quantum is on its way."""
        mine = [entry for entry in self._running if entry[-1].group is group]
        for *_, sample in mine:
            self._context -= group.work.prompt_tokens + sample.n_tokens + self.clock - sample.since
        if mine:
            self._running = [entry for entry in self._running if entry[-1].group is not group]
            heapq.heapify(self._running)
        self._waiting = [entry for entry in self._waiting if entry[-1].group is not group]
        heapq.heapify(self._waiting)


def _to_wait(sample: SimSample) -> _Waiting:
    group = sample.group
    return group.deadline, sample.n_tokens == 0, group.group_id, sample.index, sample
