"""Rewards: one call per group, in worker processes that can be killed.

Owns: which worker gets which call, the time limit of a call, second tries, and what the outcome
means for each sample. Does not own: the processes (`reward_process`), the functions
(`tasks.rewards`), what becomes of a failed sample (`sched`). Importable without torch.

    caller                      pool thread                     worker process (own process group)
    submit(ticket, job) ------> queue -> idle worker ---------> function(prompts, completions, ...)
    poll() <- results <-------- reply, end of file, deadline <- rewards or what went wrong

Numbers that a function returns, and that it returns none, are final. When the call of a group
raises or takes too long, each of its completions gets a call of its own, so that one that cannot be
judged costs nobody else. That a process died (no memory left, a signal, a crash in C) may be no
fault of the completions at all: such a call is made once more before.

A thread of the pool hands out jobs and enforces limits, so that both go on while the caller is busy
generating or training. Everything waits by wake-up: the thread for replies, new jobs and the
nearest deadline, the caller for results (a pool has a `fileno`, so
`multiprocessing.connection.wait([pool.fileno(), ...], timeout)` waits for them and others at once).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from twofold.step.reward_process import (
    START_LIMIT_S,
    Call,
    RewardJob,
    WorkerProcess,
    pickle_functions,
)
from twofold.step.reward_worker import check_signature
from twofold.tasks.rewards import RewardName, as_list, reward_names
from twofold.threads import usable_cpus
from twofold.types import Group

MAX_KILLS = 3
"""So many completions of one group may each take the whole time limit or their worker's life; those
of it that have not been tried by then fail: a group may not hold up the others without end."""


@dataclass(frozen=True)
class RewardResult:
    """For each completion either a finite reward or the one-line reason why there is none.

    `seconds`: how long its calls took. `parts`: by the name of each function, what it said of each
    completion before its weight; None: it does not apply, or failed.
    """

    ticket: int
    rewards: list[float | None]
    failures: list[str | None]
    seconds: float
    parts: dict[str, list[float | None]] = field(default_factory=dict)


def reward_job(group: Group) -> RewardJob:
    """What a reward is given of a group whose samples are all finished and decoded."""
    assert group.finished, f"group {group.group_id} is not finished"
    return RewardJob(
        group.prompt,
        [sample.text for sample in group.samples],
        [sample.token_ids for sample in group.samples],
    )


class RewardPool:
    """`workers` processes that judge groups with one reward function, or with the weighted sum of
    several.

    `reward`: one function or several: a built-in's name, "module:function", "file.py:function", or
    a Python callable (sent by reference where it can be imported, else by value: lambdas, notebook
    cells). `weights`: one for each, or none (1 each).
    `timeout_s`: a call that takes longer is killed with all it started.
    `log_path`: where prints and tracebacks of the reward go, up to 1 MiB; None: nowhere. The file
    is made when there is something to write, and its folder too if that one's parent is there.

    Results come in the order in which calls end, exactly one for each submitted job. Raises
    ValueError when a callable cannot be sent, or functions and weights do not match.
    """

    def __init__(
        self,
        reward: RewardName | Sequence[RewardName],
        workers: int = 1,
        timeout_s: float = 10.0,
        *,
        weights: Sequence[float] = (),
        log_path: Path | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"reward.workers: {workers} workers judge nothing; take 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s: {timeout_s} is no time; take more than 0")
        rewards = as_list(reward)
        if weights and len(weights) != len(rewards):
            raise ValueError(
                f"reward.weights: {len(weights)} weights for {len(rewards)} functions; give one "
                "for each"
            )
        self.names = reward_names(reward)
        self._n_workers = workers
        self._timeout_s = timeout_s
        self._setup = {
            "rewards": [
                (name, one if isinstance(one, str) else None, weight)
                for name, one, weight in zip(
                    self.names, rewards, weights or [1.0] * len(rewards), strict=True
                )
            ],
            "log": None if log_path is None else str(log_path.absolute()),
            "cpus": sorted(usable_cpus()),  # the caller's thread may be bound to one of them
        }
        functions = [one for one in rewards if not isinstance(one, str)]
        self._pickled = pickle_functions(functions) if functions else None
        self._lock = threading.Lock()  # guards the queue and the results
        self._jobs: deque[Call] = deque()
        self._results: list[RewardResult] = []
        self._workers: list[WorkerProcess] = []  # the thread's alone, as what follows
        self._divided: dict[int, _Divided] = {}
        self._first_start = threading.Event()  # a worker is ready, or could not start
        self._start_error: str | None = None
        self._parameters: list[dict[str, Any] | None] = []
        self._crash: BaseException | None = None
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._signal_read, self._signal_write = os.pipe()  # holds a byte while results wait
        # workers are started by this thread, so that it alone deals with them
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def check(self, columns: Iterable[str] | None = None) -> None:
        """Waits for the first worker. Raises ValueError, one line, when the function cannot be
        loaded or (given the data's columns) cannot be called with them."""
        self._first_start.wait()
        self._raise_crash()
        if self._start_error is not None:
            raise ValueError(f"reward.function: {self._start_error}")
        if columns is None:
            return
        given = {"prompts", "completions", "completion_ids", *columns}
        for name, parameters in zip(self.names, self._parameters, strict=True):
            if parameters is not None:
                what = "reward.function:" if len(self.names) == 1 else f"reward.functions: {name}"
                check_signature(what, parameters, given)

    def submit(self, ticket: int, job: RewardJob) -> None:
        """Queues one group. `ticket` names the result; the caller keeps tickets apart."""
        n = len(job.completions)
        assert n == len(job.completion_ids), ticket
        self._raise_crash()
        assert not self._closing, "the pool is closed"
        call = Call.of(ticket, job)
        with self._lock:
            self._jobs.append(call)
        os.write(self._wake_write, b"\0")

    def poll(self, timeout_s: float | None = 0.0) -> list[RewardResult]:
        """All results that are there; waits for the first at most `timeout_s` (None: for ever)."""
        assert not self._closing, "the pool is closed"
        wait([self._signal_read], timeout_s)
        self._raise_crash()
        with self._lock:
            results, self._results = self._results, []
            if results:
                os.read(self._signal_read, 1)
        return results

    def fileno(self) -> int:
        """Readable while `poll` has something to return."""
        return self._signal_read

    def close(self) -> None:
        """Kills every process; unfinished jobs get no result. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_write, b"\0")
        self._thread.join()
        for fd in (self._wake_read, self._wake_write, self._signal_read, self._signal_write):
            os.close(fd)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._refill()
                self._dispatch()
                deadlines = [w.deadline for w in self._workers if w.deadline is not None]
                timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
                ready = wait([self._wake_read, *(w.connection for w in self._workers)], timeout_s)
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                for worker in list(self._workers):
                    if worker.connection in ready:
                        self._receive(worker)
                    elif worker.deadline is not None and time.monotonic() >= worker.deadline:
                        self._expire(worker)
        except BaseException as error:  # ours: whoever waits must hear of it
            self._crash = error
            self._first_start.set()
            os.write(self._signal_write, b"\0")
        finally:
            for worker in self._workers:
                worker.kill()

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise RuntimeError("the thread of the reward pool ended") from self._crash

    def _refill(self) -> None:
        """Keeps all workers up; after a failed start only while a job is there to fail for it."""
        while len(self._workers) < self._n_workers and (self._start_error is None or self._jobs):
            try:
                self._workers.append(WorkerProcess.start(self._setup, self._pickled))
            except OSError as error:  # no memory, no more processes
                self._start_failed(f"cannot start a worker: {error}")

    def _dispatch(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.call is None and (call := self._next()):
                worker.assign(call, self._timeout_s)

    def _next(self) -> Call | None:
        while True:
            with self._lock:
                if not self._jobs:
                    return None
                call = self._jobs.popleft()
            divided = self._divided.get(call.ticket)
            if divided is None or divided.n_kills < MAX_KILLS:
                return call
            cause = f"not tried: {MAX_KILLS} others of its group took all their time or a worker"
            self._deliver_error(call, cause, 0.0)

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            reply = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            self._remove(worker, f"reward worker died ({worker.how_it_ended()})", died=True)
            return
        if worker.ready:
            self._finish(worker, reply)
        elif "error" in reply:
            self._remove(worker, reply["error"])
        else:
            worker.ready, worker.deadline = True, None
            self._parameters, self._start_error = reply["ready"], None
            self._first_start.set()

    def _expire(self, worker: WorkerProcess) -> None:
        if worker.ready:
            cause = f"reward killed: it took longer than {self._timeout_s:g} s (reward.timeout_s)"
        else:
            cause = f"loading the reward took longer than {START_LIMIT_S:g} s"
        self._remove(worker, cause)

    def _remove(self, worker: WorkerProcess, cause: str, died: bool = False) -> None:
        worker.kill()
        self._workers.remove(worker)
        if worker.call is not None:
            seconds = time.monotonic() - worker.assigned_at
            self._fail(worker.call, cause, seconds, killed=True, died=died)
        elif not worker.ready:
            self._start_failed(cause, died)
        # else it died idle, and no job is worse off

    def _start_failed(self, cause: str, died: bool = False) -> None:
        self._start_error = cause
        self._first_start.set()
        with self._lock:
            failed = self._jobs.popleft() if self._jobs else None
        if failed is None:
            return
        if died and failed.first_death is None:
            self._put_first([failed._replace(first_death=cause)])
        else:  # so a start that never works ends, one job after the other
            self._deliver_error(failed, _both(failed, cause) if died else cause, 0.0)

    # ---------------------------------------------------------------- what a call comes to

    def _fail(self, call: Call, cause: str, seconds: float, killed: bool, died: bool) -> None:
        """A call came to nothing: it is made again, divided, or final."""
        if died and call.first_death is None:
            self._put_first([call._replace(first_death=cause)])
            return
        if died:
            cause = _both(call, cause)
        n = len(call.job.completions)
        if call.index is None and n > 1:
            self._divided[call.ticket] = _Divided.of(n, self.names, seconds)
            self._put_first([Call.of(call.ticket, call.job.one(i), i) for i in range(n)])
            return
        if call.index is not None:
            self._divided[call.ticket].n_kills += killed
        self._deliver_error(call, cause, seconds)

    def _put_first(self, calls: list[Call]) -> None:
        with self._lock:
            self._jobs.extendleft(reversed(calls))

    def _finish(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        assert worker.call is not None
        call, seconds = worker.call, time.monotonic() - worker.assigned_at
        worker.call = worker.deadline = None
        if "error" in reply:
            self._fail(call, reply["error"], seconds, killed=False, died=False)
        else:
            self._deliver(call, reply, seconds)

    def _deliver_error(self, call: Call, cause: str, seconds: float) -> None:
        n = len(call.job.completions)
        nothing = {name: [None] * n for name in self.names}
        self._deliver(
            call, {"rewards": [None] * n, "failures": [cause] * n, "parts": nothing}, seconds
        )

    def _deliver(self, call: Call, reply: dict[str, Any], seconds: float) -> None:
        if call.index is not None:
            divided = self._divided[call.ticket]
            divided.put(call.index, reply, seconds)
            if divided.n_left:
                return
            del self._divided[call.ticket]
            reply, seconds = divided.reply, divided.seconds
        result = RewardResult(
            call.ticket, reply["rewards"], reply["failures"], seconds, reply["parts"]
        )
        with self._lock:
            self._results.append(result)
            if len(self._results) == 1:
                os.write(self._signal_write, b"\0")


@dataclass
class _Divided:
    """A group whose completions are judged one by one: what is known of them so far."""

    reply: dict[str, Any]
    n_left: int
    seconds: float
    n_kills: int = 0

    @staticmethod
    def of(n: int, names: list[str], seconds: float) -> _Divided:
        reply: dict[str, Any] = {"rewards": [None] * n, "failures": [None] * n}
        return _Divided({**reply, "parts": {name: [None] * n for name in names}}, n, seconds)

    def put(self, index: int, reply: dict[str, Any], seconds: float) -> None:
        """The reply to the call for one completion."""
        for of_group, of_one in (
            (self.reply["rewards"], reply["rewards"]),
            (self.reply["failures"], reply["failures"]),
            *((self.reply["parts"][name], part) for name, part in reply["parts"].items()),
        ):
            of_group[index] = of_one[0]
        self.n_left -= 1
        self.seconds += seconds


def _both(call: Call, cause: str) -> str:
    return f"{call.first_death}, and on the second try: {cause}"
