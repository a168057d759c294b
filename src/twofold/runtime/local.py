"""The embedded executor: one process, one card, rewards in worker processes.

Owns: the order in which things really happen here (card commands one after the other on this
thread, rewards beside them) and the run's clock. Does not own: what a card command
does (`runtime/worker`), decisions (`sched`), durability (the record).

Which event comes next:
    a stop request > a reward that is due > the end of the card command > running the next one >
    waiting for a reward
A reward is due when it is there: one that came while a card command ran is told before the end of
that, so that what the card does next is decided with it. With `deterministic` it is due once a card
command that was issued after it has ended, and is waited for then; rewards come in the order in
which they were asked for. So no decision depends on the wall clock. Nor does one on a process that
died in between, as long as nothing was preempted for want of cache and no prefill had to wait: who
runs is not in the record.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from twofold.events import (
    Command,
    Discard,
    Event,
    Generate,
    Generated,
    Reward,
    Rewarded,
    StopRequested,
    Trained,
)
from twofold.obs.record import MetricRow, RewardRow
from twofold.runtime.rewards import STOP_LOOK_S, Rewards
from twofold.runtime.store import Store
from twofold.runtime.worker import Worker
from twofold.sched.phase import PHASE_OF
from twofold.step.reward import reward_job


def phase_name(command: Command) -> str:
    """What a card does while the command runs, in one word."""
    phase = PHASE_OF.get(type(command))
    return command.kind.lower() if phase is None else phase.value


class LocalExecutor:
    def __init__(
        self,
        worker: Worker,
        store: Store,
        rewards: Rewards,
        *,
        deterministic: bool,
        last_card_seq: int = -1,
    ) -> None:
        """`last_card_seq`: of a resumed run, the highest card command that had ended."""
        self._worker = worker
        self._store = store
        self._rewards = rewards
        self._deterministic = deterministic
        self._zero_s = self._step_start_s = 0.0
        self._queue: deque[Command] = deque()  # card commands and discards, in order of seq
        self._asked: deque[Reward] = deque()
        self._ended: tuple[Event, list[Any]] | None = None  # of a card command, with its rows
        self._last_card_seq = last_card_seq
        self._stop_reported = False
        self._phase_s: defaultdict[str, float] = defaultdict(
            float
        )  # seconds per phase since the last update
        self._step_tokens = self._step_dropped = 0
        self._step_parts: defaultdict[str, list[float]] = defaultdict(list)  # by reward function
        self.on_command: Callable[[Command], None] = lambda command: None
        self.on_wait: Callable[[str], None] = lambda what: None
        self.on_quantum: Callable[[int, float], None] = lambda unfinished, tokens_per_s: None

    # ------------------------------------------------------------ the executor's contract

    def submit(self, command: Command) -> None:
        if isinstance(command, Reward):
            group = self._store[command.group_id]
            self._rewards.ask(command.seq, reward_job(group))
            self._asked.append(command)
        else:
            self._queue.append(command)

    def next_event(self) -> tuple[float, Event]:
        event = self._next_event()
        now_s = time.monotonic() - self._zero_s
        if isinstance(event, Trained):
            self._write_step_times(event.version, now_s)
        return now_s, event

    def take_rows(self) -> list[Any]:
        return self._store.take_rows()

    def begin(self, start_s: float) -> None:
        """The run's clock goes on from `start_s` (0 for a new run)."""
        self._zero_s = time.monotonic() - start_s
        self._step_start_s = start_s

    def _next_event(self) -> Event:
        while True:
            reason = self._rewards.stop_reason
            if reason is not None and not self._stop_reported:
                self._stop_reported = True
                return StopRequested(reason=reason)
            self._rewards.collect(0.0)
            wanted = self._wanted_reward()
            if self._ended is not None and (wanted is None or self._deterministic):
                (event, rows), self._ended = self._ended, None
                self._store.write(*rows)
                return event
            if wanted is not None and wanted.seq in self._rewards:
                return self._rewarded(wanted)
            # who asked for a stop does not wait for rewards: they are asked for again on resume
            if self._queue and (wanted is None or self._stop_reported):
                self._ended = self._run(self._queue.popleft()), self._store.take_rows()
                continue
            assert self._asked, "nothing to run and nothing to wait for"
            self.on_wait(f"reward of group {self._asked[0].group_id}")
            self._rewards.collect(STOP_LOOK_S)

    # ------------------------------------------------------------ cards

    def _run(self, command: Command) -> Event:
        self.on_command(command)
        event = self._worker.execute(command)
        if command.cards:
            self._last_card_seq = command.seq
        self._phase_s[phase_name(command)] += event.seconds
        self._step_dropped += isinstance(command, Discard)
        if isinstance(command, Generate) and isinstance(event, Generated):
            self._step_tokens += event.n_tokens
            tokens_per_s = event.n_tokens / max(event.seconds, 1e-9)
            self.on_quantum(self._worker.generator.unfinished, tokens_per_s)
        return event

    def _write_step_times(self, version: int, now_s: float) -> None:
        """Where the time of this step went, from the end of the last update to the end of this;
        what was generated, dropped and judged in it, whatever is trained."""
        step_s = now_s - self._step_start_s
        times = {f"time/{phase}": seconds for phase, seconds in self._phase_s.items()}
        times["time/step_s"] = step_s
        times["time/wait"] = max(0.0, step_s - sum(self._phase_s.values()))
        times["tokens_per_s"] = self._step_tokens / step_s
        times["groups/dropped"] = float(self._step_dropped)
        for name, values in self._step_parts.items():
            if values:
                times[f"reward/{name}"] = math.fsum(values) / len(values)
        self._store.write(*(MetricRow(version, name, value) for name, value in times.items()))
        self._step_start_s, self._step_tokens, self._step_dropped = now_s, 0, 0
        self._phase_s.clear()
        self._step_parts.clear()

    # ------------------------------------------------------------ rewards

    def _wanted_reward(self) -> Reward | None:
        """The reward whose turn it is; only with `deterministic` it may not be there yet."""
        if not self._deterministic:
            return next((asked for asked in self._asked if asked.seq in self._rewards), None)
        first = self._asked[0] if self._asked else None
        due = first is not None and (self._last_card_seq > first.seq or not self._queue)
        return first if due else None

    def _rewarded(self, command: Reward) -> Rewarded:
        self._asked.remove(command)
        result = self._rewards.take(command.seq)
        group = self._store[command.group_id]
        for sample, reward, failure in zip(
            group.samples, result.rewards, result.failures, strict=True
        ):
            sample.reward, sample.failed = reward, failure
            self._store.write(RewardRow(sample.sample_id, reward, failure))
        if len(result.parts) > 1:
            for name, values in result.parts.items():
                self._step_parts[name].extend(value for value in values if value is not None)
        valid = [sample.reward for sample in group.samples if sample.valid]
        return Rewarded(
            command=command.seq,
            seconds=result.seconds,
            group_id=command.group_id,
            n_valid=len(valid),
            varies=len(set(valid)) > 1,
            cause=next((cause for cause in result.failures if cause), ""),
        )
