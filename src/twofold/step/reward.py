"""Rewards: one call per group, in worker processes that can be killed.

Owns: the workers (start, replace, kill), the queue in front of them, the time limit of a call, and
what a call's outcome means for each sample. Does not own: the functions (`tasks.rewards`), what
becomes of a failed sample (`sched`). Importable without torch.

    caller                      pool thread                     worker process (own process group)
    submit(ticket, job) ------> queue -> idle worker ---------> function(prompts, completions, ...)
    poll() <- results <-------- reply, end of file, deadline <- rewards or what went wrong

What a function returns or raises, and that it takes too long, is final. That its process died (no
memory left, a signal, a crash in C) is no verdict on the completions: the call is made once more.

A thread of the pool hands out jobs and enforces limits, so that both go on while the caller is busy
generating or training. Everything waits by wake-up: the thread for replies, new jobs and the
nearest deadline, the caller for results (a pool has a `fileno`, so
`multiprocessing.connection.wait([pool.fileno(), ...], timeout)` waits for them and others at once).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from twofold.threads import usable_cpus
from twofold.types import Group, Prompt

START_LIMIT_S = 120.0
"""A worker that has not imported its reward by then is given up: rewards may import much, even
torch or a model, but a hung import must become an error."""

EXIT_LIMIT_S = 2.0
"""A worker that ends closes its connection first; it is given this long to leave its exit code."""

# the child gets the parent's import path first, so that both find the same code
_BOOT = (
    "import json, sys; setup = json.loads(sys.argv.pop()); sys.path[:] = setup['path']; "
    "from twofold.step.reward_worker import main; main(setup)"
)
# the parent's threads and their binding are for its matrix products; a reward gets one thread
_NOT_INHERITED = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class RewardJob:
    """The finished completions of one prompt: their texts and, as sampled, their token ids."""

    prompt: Prompt
    completions: list[str]
    completion_ids: list[list[int]]


@dataclass(frozen=True)
class RewardResult:
    """For each completion either a finite reward or the one-line reason why there is none.
    `seconds`: how long the call took."""

    ticket: int
    rewards: list[float | None]
    failures: list[str | None]
    seconds: float


def reward_job(group: Group) -> RewardJob:
    """What a reward is given of a group whose samples are all finished and decoded."""
    assert group.finished, f"group {group.group_id} is not finished"
    return RewardJob(
        group.prompt,
        [sample.text for sample in group.samples],
        [sample.token_ids for sample in group.samples],
    )


class RewardPool:
    """`workers` processes that judge groups with one reward function.

    `reward`: a built-in's name, "module:function", "file.py:function", or a Python callable (sent
    by reference where it can be imported, else by value: lambdas, notebook cells).
    `timeout_s`: a call that takes longer is killed with all it started, and its samples fail.
    `log_path`: where prints and tracebacks of the reward go, up to 1 MiB; None: nowhere. The file
    is made when there is something to write, and its folder too if that one's parent is there.

    Results come in the order in which calls end, exactly one for each submitted job. Raises
    ValueError when a callable cannot be sent.
    """

    def __init__(
        self,
        reward: str | Callable[..., Any],
        workers: int = 1,
        timeout_s: float = 10.0,
        *,
        log_path: Path | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"reward.workers: {workers} workers judge nothing; take 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s: {timeout_s} is no time; take more than 0")
        self._n_workers = workers
        self._timeout_s = timeout_s
        self._setup = {
            "reward": reward if isinstance(reward, str) else None,
            "log": None if log_path is None else str(log_path.absolute()),
            "cpus": sorted(usable_cpus()),  # the caller's thread may be bound to one of them
        }
        self._pickled = None if isinstance(reward, str) else _pickle(reward)
        self._lock = threading.Lock()  # guards the queue and the results
        self._jobs: deque[_Call] = deque()
        self._results: list[RewardResult] = []
        self._workers: list[_Worker] = []  # the thread's alone
        self._first_start = threading.Event()  # a worker is ready, or could not start
        self._start_error: str | None = None
        self._parameters: dict[str, Any] | None = None
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
        if columns is None or self._parameters is None:
            return
        given = {"prompts", "completions", "completion_ids", *columns}
        missing = [name for name in self._parameters["needs"] if name not in given]
        if missing:
            raise ValueError(
                f"reward.function: needs {', '.join(missing)}, but a reward is called with "
                f"{', '.join(sorted(given))}"
            )
        refused = given - set(self._parameters["takes"])
        if refused and not self._parameters["takes_all"]:
            raise ValueError(
                f"reward.function: does not take {', '.join(sorted(refused))}; add **columns to "
                "its parameters"
            )

    def submit(self, ticket: int, job: RewardJob) -> None:
        """Queues one group. `ticket` names the result; the caller keeps tickets apart."""
        n = len(job.completions)
        assert n == len(job.completion_ids), ticket
        self._raise_crash()
        assert not self._closing, "the pool is closed"
        call = _Call(ticket, n, pickle.dumps(call_arguments(job)))
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
                self._workers.append(_Worker.start(self._setup, self._pickled))
            except OSError as error:  # no memory, no more processes
                self._start_failed(f"cannot start a worker: {error}")

    def _dispatch(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.call is None and self._jobs:
                with self._lock:
                    call = self._jobs.popleft()
                worker.assign(call, self._timeout_s)

    def _receive(self, worker: _Worker) -> None:
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

    def _expire(self, worker: _Worker) -> None:
        if worker.ready:
            cause = f"reward killed: it took longer than {self._timeout_s:g} s (reward.timeout_s)"
        else:
            cause = f"loading the reward took longer than {START_LIMIT_S:g} s"
        self._remove(worker, cause)

    def _remove(self, worker: _Worker, cause: str, died: bool = False) -> None:
        worker.kill()
        self._workers.remove(worker)
        if worker.call is not None:
            self._fail(worker.call, cause, time.monotonic() - worker.assigned_at, died)
        elif not worker.ready:
            self._start_failed(cause, died)
        # else it died idle, and no job is worse off

    def _start_failed(self, cause: str, died: bool = False) -> None:
        self._start_error = cause
        self._first_start.set()
        with self._lock:
            failed = self._jobs.popleft() if self._jobs else None
        if failed is not None:  # so a start that never works ends, one job after the other
            self._fail(failed, cause, 0.0, died)

    def _fail(self, call: _Call, cause: str, seconds: float, died: bool) -> None:
        if died and call.first_death is None:
            with self._lock:
                self._jobs.appendleft(call._replace(first_death=cause))
            return
        if died:
            cause = f"{call.first_death}, and on the second try: {cause}"
        self._deliver(call, {"error": cause}, seconds)

    def _finish(self, worker: _Worker, reply: dict[str, Any]) -> None:
        assert worker.call is not None
        call, seconds = worker.call, time.monotonic() - worker.assigned_at
        worker.call = worker.deadline = None
        self._deliver(call, reply, seconds)

    def _deliver(self, call: _Call, reply: dict[str, Any], seconds: float) -> None:
        rewards, failures = reply.get("rewards"), reply.get("failures")
        if "error" in reply:
            rewards, failures = [None] * call.n, [reply["error"]] * call.n
        assert rewards is not None and failures is not None, reply
        result = RewardResult(call.ticket, rewards, failures, seconds)
        with self._lock:
            self._results.append(result)
            if len(self._results) == 1:
                os.write(self._signal_write, b"\0")


class _Call(NamedTuple):
    ticket: int
    n: int  # completions
    arguments: bytes  # pickled in `submit`, so that what cannot be pickled is refused there
    first_death: str | None = None  # what became of the worker that had this call before


@dataclass
class _Worker:
    """A worker process, which leads a process group of its own, and our ends of its pipes."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int  # never written: the watchdog on the other end notices when we are gone
    deadline: float | None  # monotonic; None: idle
    ready: bool = False  # has loaded the reward
    call: _Call | None = None
    assigned_at: float = 0.0

    @staticmethod
    def start(setup: dict[str, Any], pickled: bytes | None) -> _Worker:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        fds = {"connection": theirs.fileno(), "lifeline": lifeline_read}
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        connection = Connection(ours.detach())
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, json.dumps({**setup, **fds, "path": sys.path})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # stderr stays ours until the worker has loaded: a broken installation shows
                pass_fds=list(fds.values()),
                start_new_session=True,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            connection.close()
            os.close(lifeline_write)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        worker = _Worker(process, connection, lifeline_write, time.monotonic() + START_LIMIT_S)
        if pickled is not None:
            with contextlib.suppress(ConnectionError):  # it died: reading will tell
                connection.send_bytes(pickled)
        return worker

    def assign(self, call: _Call, timeout_s: float) -> None:
        self.call = call
        self.assigned_at = time.monotonic()
        self.deadline = self.assigned_at + timeout_s
        with contextlib.suppress(ConnectionError):  # it died: reading will tell
            self.connection.send_bytes(call.arguments)

    def how_it_ended(self) -> str:
        """How the process ended by itself; to be asked before `kill`, which would be the answer."""
        try:
            code = self.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        names = {-number: number.name for number in signal.Signals}
        return f"exit code {code}" if code >= 0 else names.get(code, f"signal {-code}")

    def kill(self) -> None:
        # the whole group, whose number stays its own while the watchdog is in it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self.lifeline)


def call_arguments(job: RewardJob) -> dict[str, Any]:
    """The keyword arguments of the call, as TRL makes them: lists with one entry per completion.
    A chat prompt's completion is [{"role": "assistant", "content": text}], a text prompt's text."""
    n = len(job.completions)
    completions: list[Any] = list(job.completions)
    if job.prompt.is_chat:
        completions = [[{"role": "assistant", "content": text}] for text in job.completions]
    return {
        "prompts": [job.prompt.content] * n,
        "completions": completions,
        "completion_ids": job.completion_ids,
        **{name: [value] * n for name, value in job.prompt.columns.items()},
    }


def _pickle(reward: Callable[..., Any]) -> bytes:
    import cloudpickle  # only here: a named reward needs it not

    try:
        pickled: bytes = cloudpickle.dumps(reward)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(
            f"reward.function: {reward!r} cannot be sent to a worker: {error}; "
            "make it an importable function and give module:function"
        ) from None
    return pickled
