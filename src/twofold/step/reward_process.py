"""A reward process as its parent sees it.

Owns: starting one, handing it a call, ending it with all that it started. Does not own: which call
it gets and for how long (`step.reward`), what it does with it (`step.reward_worker`).
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from twofold.types import Prompt

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

    def one(self, index: int) -> RewardJob:
        """The job with one of its completions alone."""
        return RewardJob(self.prompt, [self.completions[index]], [self.completion_ids[index]])


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


class Call(NamedTuple):
    """A whole group, or one completion of it (`index`) when the group's call failed."""

    ticket: int
    job: RewardJob
    arguments: bytes  # pickled when the job comes in, so that what cannot be pickled is refused
    index: int | None = None
    first_death: str | None = None  # what became of the worker that had this call before

    @staticmethod
    def of(ticket: int, job: RewardJob, index: int | None = None) -> Call:
        return Call(ticket, job, pickle.dumps(call_arguments(job)), index)


@dataclass
class WorkerProcess:
    """A worker process, which leads a process group of its own, and our ends of its pipes."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int  # never written: the watchdog on the other end notices when we are gone
    deadline: float | None  # monotonic; None: idle
    ready: bool = False  # has loaded the rewards
    call: Call | None = None
    assigned_at: float = 0.0

    @staticmethod
    def start(setup: dict[str, Any], pickled: bytes | None) -> WorkerProcess:
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
        deadline = time.monotonic() + START_LIMIT_S
        worker = WorkerProcess(process, connection, lifeline_write, deadline)
        if pickled is not None:
            with contextlib.suppress(ConnectionError):  # it died: reading will tell
                connection.send_bytes(pickled)
        return worker

    def assign(self, call: Call, timeout_s: float) -> None:
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


def pickle_functions(rewards: list[Callable[..., Any]]) -> bytes:
    import cloudpickle  # only here: named rewards need it not

    try:
        pickled: bytes = cloudpickle.dumps(rewards)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        names = ", ".join(map(repr, rewards))
        raise ValueError(
            f"reward.function: {names} cannot be sent to a worker: {error}; "
            "make it an importable function and give module:function"
        ) from None
    return pickled
