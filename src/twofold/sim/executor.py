"""A run on a virtual clock: what the real executor would do to ids and counts, and when.

Owns: one simulated card with its slots, the clock, injected faults. Costs are constants.
Does not own: decisions (the real scheduler makes them), the record.

It asserts what the real executor would: no trained token is staler than S, nothing is trained
twice, weights and phases are those that a command says, and the card does one thing at a time.

Like the real one it changes state when an event is committed, not when it is produced: what is in
flight when the process dies (`crash`) has no effect.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from twofold import events as ev
from twofold.events import Command, Event
from twofold.sched.phase import PHASE_OF
from twofold.sim.workload import GroupWork, Workload
from twofold.types import Phase


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    decode_step_s: float = 0.03
    prefill_token_s: float = 0.001
    score_s: float = 0.5
    train_s: float = 2.0
    publish_s: float = 0.01
    switch_s: float = 0.05
    eval_s: float = 3.0
    checkpoint_s: float = 0.5
    discard_s: float = 0.001


@dataclass(frozen=True)
class Faults:
    """Probabilities, per command, that it ends as failed or as cancelled."""

    fail: float = 0.0
    cancel: float = 0.0


@dataclass
class SimSample:
    group_id: int
    index: int
    deadline: int
    length: int
    runs: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens), in order
    n_tokens: int = 0
    running: bool = False  # in a slot, with its KV cache
    reported: bool = False  # its end was in an event


@dataclass
class SimGroup:
    work: GroupWork
    samples: list[SimSample]


@dataclass
class Quantum:
    """The plan of one quantum: who gets how many tokens."""

    tokens: list[tuple[SimSample, int]]
    decode_steps: int
    prefill_tokens: int


Effect = Callable[[], None]


class SimExecutor:
    """Meets `runtime.loop.Executor`. `versions_at_training` is kept for assertions and statistics:
    (version that the batch's last update trained, token version, tokens)."""

    def __init__(
        self,
        workload: Workload,
        *,
        max_staleness: int,
        max_running_samples: int,
        updates_per_batch: int = 1,
        costs: Costs | None = None,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.workload = workload
        self.max_staleness = max_staleness
        self.updates_per_batch = updates_per_batch
        self.slots = max_running_samples
        self.costs = costs or Costs()
        self.faults = faults or Faults()
        self.now_s = 0.0
        self.phase = Phase.IDLE
        self.weights = 0  # version of the trainer's weights
        self.published = 0  # version that generates
        self.groups: dict[int, SimGroup] = {}
        self.trained: set[int] = set()
        self.versions_at_training: list[tuple[int, int, int]] = []
        self._random = Random(seed)
        self._agenda: list[tuple[float, int, Event, Effect]] = []  # a heap by time
        self._n_planned = 0
        self._in_flight: dict[int, Command] = {}
        self._uncommitted: Effect | None = None

    # ------------------------------------------------------------ runtime.loop.Executor

    def submit(self, command: Command) -> None:
        self._settle()
        assert command.seq not in self._in_flight, f"submitted twice: {command}"
        if command.cards:
            others = [c for c in self._in_flight.values() if c.cards]
            assert not others, f"{command} while the card does {others}"
            needed = (
                command.before if isinstance(command, ev.Switch) else PHASE_OF.get(type(command))
            )
            assert needed in (None, self.phase), f"{command} in phase {self.phase}"
        self._in_flight[command.seq] = command
        seconds, event, effect = self._plan(command)
        chance = self._random.random()
        if chance < self.faults.fail:
            event, effect = ev.Failed(command=command.seq, cause="injected"), self._half_of(command)
        elif chance < self.faults.fail + self.faults.cancel:
            event, effect = ev.Cancelled(command=command.seq), _nothing
        self._at(self.now_s + seconds, event, effect)

    def next_event(self) -> tuple[float, Event]:
        self._settle()
        assert self._agenda, "waits for ever: nothing is in flight"
        self.now_s, _, event, self._uncommitted = heapq.heappop(self._agenda)
        if isinstance(event, ev.Terminal):
            del self._in_flight[event.command]
        return self.now_s, event

    def take_rows(self) -> list[Any]:
        return []  # no tokens

    # ------------------------------------------------------------ from outside

    def interrupt(self, event: Event, after_s: float) -> None:
        """An event that no command causes, e.g. StopRequested."""
        self._at(self.now_s + after_s, event, _nothing)

    def crash(self, committed: bool) -> None:
        """The process dies; only what was committed stays. `committed`: the last event was."""
        if committed:
            self._settle()
        self._uncommitted = None
        self._agenda.clear()
        self._in_flight.clear()
        self._pause()

    # ------------------------------------------------------------ plans

    def _plan(self, command: Command) -> tuple[float, Event, Effect]:
        """How long it takes, the event of its success, and what that changes."""
        costs, seq = self.costs, command.seq
        match command:
            case ev.Generate():
                return self._plan_generate(command)
            case ev.Reward():
                work = self.groups[command.group_id].work
                rewarded = ev.Rewarded(
                    command=seq,
                    group_id=command.group_id,
                    n_valid=work.n_valid,
                    varies=work.varies,
                )
                return work.reward_s, rewarded, _nothing
            case ev.Discard():
                gid = command.group_id
                gone = ev.Discarded(command=seq, group_id=gid)
                return costs.discard_s, gone, lambda: self._discard(gid)
            case ev.Score():
                return costs.score_s, ev.Scored(command=seq), _nothing
            case ev.Train():
                self._check_train(command)
                made = command.version + self.updates_per_batch
                done = ev.Trained(command=seq, version=made)
                return costs.train_s, done, lambda: self._train(command)
            case ev.Publish():
                assert command.version == self.weights, (command, self.weights)
                new = ev.Published(command=seq, version=command.version)
                return costs.publish_s, new, self._publish
            case ev.Switch():
                return costs.switch_s, ev.Switched(command=seq), lambda: self._switch(command)
            case ev.Evaluate():
                assert command.version == self.published == self.weights, command
                evaluated = ev.Evaluated(command=seq, version=command.version)
                return costs.eval_s, evaluated, _nothing
            case ev.Checkpoint():
                assert command.version == self.published == self.weights, command
                saved = ev.Checkpointed(command=seq, version=command.version)
                return costs.checkpoint_s, saved, _nothing
            case _:
                raise AssertionError(f"unknown command: {command}")

    def _plan_generate(self, command: ev.Generate) -> tuple[float, Event, Effect]:
        assert command.version == self.published == self.weights, (command, self.published)
        fresh = self._admitted(command)
        samples = [s for g in (*self.groups.values(), *fresh.values()) for s in g.samples]
        quantum = self._fill_slots(samples, command.max_decode_steps)
        gains = {id(sample): n for sample, n in quantum.tokens}
        ended = [
            s for s in samples if not s.reported and s.n_tokens + gains.get(id(s), 0) == s.length
        ]
        event = ev.Generated(
            command=command.seq,
            finished=tuple(ev.Finished(s.group_id, s.index, s.length) for s in ended),
            n_tokens=sum(gains.values()),
            decode_steps=quantum.decode_steps,
        )

        def effect() -> None:
            self.groups.update(fresh)
            self._decode(quantum, command.version)
            for sample in ended:
                sample.reported = True

        decode_s = quantum.decode_steps * self.costs.decode_step_s
        return decode_s + quantum.prefill_tokens * self.costs.prefill_token_s, event, effect

    def _admitted(self, command: ev.Generate) -> dict[int, SimGroup]:
        """Groups that start. Ids beyond the data are left out, and said to be so before the end."""
        fresh: dict[int, SimGroup] = {}
        for gid, start_version, deadline in command.admit:
            assert gid not in self.groups, f"group {gid} admitted twice"
            assert start_version <= command.version
            # all updates of the batch are within S, and one batch more would not be
            last = deadline + self.updates_per_batch - 1
            assert start_version <= deadline and last <= start_version + self.max_staleness
            assert last + self.updates_per_batch > start_version + self.max_staleness
            if self.workload.n_groups is not None and gid >= self.workload.n_groups:
                self._at(self.now_s, ev.DataEnded(n_groups=self.workload.n_groups), _nothing)
                continue
            work = self.workload.group(gid)
            samples = [SimSample(gid, i, deadline, n) for i, n in enumerate(work.lengths)]
            fresh[gid] = SimGroup(work, samples)
        return fresh

    def _fill_slots(self, samples: list[SimSample], max_steps: int) -> Quantum:
        """Running samples keep their slots; freed ones go to the earliest deadline, resumed before
        new. A slot's sample decodes one token a step."""
        unfinished = [s for s in samples if s.n_tokens < s.length]
        unfinished.sort(key=lambda s: (not s.running, s.deadline, s.n_tokens == 0))
        free_at = [0] * self.slots  # a heap: the step at which each slot is free
        plan = Quantum([], 0, 0)
        for sample in unfinished:
            start = free_at[0]
            if start >= max_steps:
                break
            n = min(sample.length - sample.n_tokens, max_steps - start)
            heapq.heapreplace(free_at, start + n)
            plan.tokens.append((sample, n))
            plan.decode_steps = max(plan.decode_steps, start + n)
            if not sample.running:
                plan.prefill_tokens += sample.n_tokens + self.workload.prompt_tokens
        return plan

    def _half_of(self, command: Command) -> Effect:
        """What a failed command leaves: nothing, but a quantum's tokens may be durable. Their
        samples' ends are then told by the next quantum; its admissions did not happen."""
        if not isinstance(command, ev.Generate) or self._random.random() < 0.5:
            return _nothing
        known = [s for g in self.groups.values() for s in g.samples]
        quantum = self._fill_slots(known, command.max_decode_steps)
        return lambda: self._decode(quantum, command.version)

    # ------------------------------------------------------------ effects

    def _decode(self, quantum: Quantum, version: int) -> None:
        for sample, n in quantum.tokens:
            sample.n_tokens += n
            sample.runs.append((version, n))
            sample.running = sample.n_tokens < sample.length

    def _check_train(self, command: ev.Train) -> None:
        assert command.version == self.weights == self.published, (command, self.weights)
        assert list(command.group_ids) == sorted(set(command.group_ids)), command
        for gid in command.group_ids:
            assert gid not in self.trained, f"group {gid} trained twice"
            for sample in self.groups[gid].samples:
                assert sample.reported and sample.n_tokens == sample.length, sample
                for version, _ in sample.runs:
                    newest = command.version + self.updates_per_batch - 1 - version
                    assert version <= command.version, (command, sample)
                    assert newest <= self.max_staleness, (command, sample)

    def _train(self, command: ev.Train) -> None:
        for gid in command.group_ids:
            runs = [run for sample in self.groups.pop(gid).samples for run in sample.runs]
            last = command.version + self.updates_per_batch - 1
            self.versions_at_training += [(last, v, n) for v, n in runs]
            self.trained.add(gid)
        self.weights += self.updates_per_batch

    def _publish(self) -> None:
        self.published = self.weights

    def _switch(self, command: ev.Switch) -> None:
        self.phase = command.after
        self._pause()

    def _pause(self) -> None:
        """Unfinished samples leave their slots; tokens are their whole state."""
        for group in self.groups.values():
            for sample in group.samples:
                sample.running = False

    def _discard(self, group_id: int) -> None:
        self.groups.pop(group_id, None)

    # ------------------------------------------------------------ clock

    def _at(self, time_s: float, event: Event, effect: Effect) -> None:
        self._n_planned += 1
        heapq.heappush(self._agenda, (time_s, self._n_planned, event, effect))

    def _settle(self) -> None:
        """The driver is back, so the last event is committed."""
        if self._uncommitted is not None:
            effect, self._uncommitted = self._uncommitted, None
            effect()


def _nothing() -> None:
    pass
