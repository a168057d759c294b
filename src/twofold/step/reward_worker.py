"""The other side of `step.reward`: what runs inside a reward process.

Owns: calling the reward function, turning what it returns into plain numbers, and the end of the
process group when the parent is gone. Does not own: time limits, queues (`step.reward`).

A fresh interpreter imports this and nothing of the parent's program; start-up is part of every
replacement of a killed worker, so nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from twofold.tasks.rewards import RewardFunction, resolve_reward

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

LOG_BYTES = 1 << 20
"""Rewards may print this much into the pool's log; the rest is read and dropped."""


def main(setup: dict[str, Any]) -> None:
    """Serves jobs until the parent closes the connection.

    `setup`: `connection` (fd, jobs come pickled, replies go as JSON so that nothing that a reward
    does can make the parent run code), `lifeline` (fd, at its end the parent is gone), `log` (path
    or None: nowhere), `cpus` (where to run), `reward` (name or None: a pickle follows).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.platform == "linux":
        os.sched_setaffinity(0, setup["cpus"])
    connection = Connection(setup["connection"])
    os.set_inheritable(setup["connection"], False)
    _start_watchdog(setup["lifeline"], setup["log"], connection)
    # a process that the reward forks must not keep the connection open: its end means "worker died"
    os.register_at_fork(after_in_child=connection.close)
    try:
        function = _function(setup["reward"], connection)
        _reply(connection, {"ready": _parameters(function)})
    except BaseException as error:
        _print_exception()
        _reply(connection, {"error": describe(error)})
        return
    while True:
        try:
            pickled = connection.recv_bytes()
        except EOFError:
            return
        _reply(connection, judge(function, pickled))


def judge(function: RewardFunction, pickled: bytes) -> dict[str, Any]:
    """One call with pickled keyword arguments. `rewards` and `failures` have one entry per
    completion, exactly one of the two is not None; or `error` when the call is worth nothing."""
    try:
        arguments = pickle.loads(pickled)
        n = len(arguments["completions"])
        returned: Any = function(**arguments)
        values = _listed(returned)
        if values is None:
            kind = type(returned).__name__
            return {"error": f"reward returned {kind} instead of a list of {n} numbers"}
        if len(values) != n:
            return {"error": f"reward returned {len(values)} values for {n} completions"}
        judged = [_number(value) for value in values]
    except BaseException as error:  # sys.exit() in a reward ends the call, not the worker
        _print_exception()
        return {"error": describe(error)}
    return {"rewards": [reward for reward, _ in judged], "failures": [why for _, why in judged]}


def describe(error: BaseException) -> str:
    """One line: type, message, and where it was raised unless that is in this package."""
    try:
        message = " ".join(str(error).split())[:300]
    except BaseException:  # the reward's own class may do anything
        message = ""
    # nobody could print or store half a surrogate pair
    message = message.encode(errors="backslashreplace").decode()
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    files = [(file, line) for file, line in files if "importlib" not in file]
    if not files or files[-1][0].startswith(os.path.dirname(os.path.dirname(__file__))):
        # a ValueError of ours is a whole sentence
        return message if isinstance(error, ValueError) else text
    return f"{text} ({os.path.basename(files[-1][0])}:{files[-1][1]})"


def _listed(returned: Any) -> list[Any] | None:
    """The entries of a list, a tuple, or an array or tensor (by their `tolist`), None for anything
    else: a set has no order, a dict or text would give keys or letters, an iterator may not end."""
    if isinstance(returned, list | tuple):
        return list(returned)
    try:
        values = returned.tolist()
    except AttributeError:
        return None
    return values if isinstance(values, list) else None


def _number(value: Any) -> tuple[float | None, str | None]:
    """(reward, None) or (None, why there is none)."""
    if value is None:
        return None, "reward returned None"
    if isinstance(value, str):
        return None, f"reward returned text {value[:40]!r} instead of a number"
    if isinstance(value, bytes | bytearray):  # float() would read them as text
        return None, f"reward returned {type(value).__name__} instead of a number"
    try:
        number = float(value)
    except OverflowError:
        return None, "reward is beyond float32"
    except (TypeError, ValueError):
        return None, f"reward returned {type(value).__name__} instead of a number"
    if not math.isfinite(number):
        return None, f"reward returned {number}"
    if abs(number) > FLOAT32_MAX:
        return None, f"reward {number:g} is beyond float32"
    return number, None


def _function(reward: str | None, connection: Connection) -> RewardFunction:
    if reward is not None:
        return resolve_reward(reward)
    function: RewardFunction = connection.recv()  # cloudpickle's bytes are plain pickle to read
    return function


def _parameters(function: RewardFunction) -> dict[str, Any] | None:
    """Which keyword arguments it needs and takes; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "needs": [p.name for p in named if p.default is p.empty],
        "takes": [p.name for p in named],
        "takes_all": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def _print_exception() -> None:
    with contextlib.suppress(BaseException):  # the reward may have closed or replaced stderr
        traceback.print_exc()


def _reply(connection: Connection, body: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(body).encode())
    except BrokenPipeError:  # the parent closed the pool in the meantime
        os._exit(0)


def _start_watchdog(lifeline: int, log: str | None, connection: Connection) -> None:
    """A tiny process of the same group that kills the group when the parent is gone, and copies
    what the group prints into the log. A process and not a thread: a reward that holds the
    interpreter lock, or a child that it forked, must end as well."""
    output = None
    if log is not None:
        output, write_end = os.pipe()
        os.dup2(write_end, 1)
        os.close(write_end)
    os.dup2(1, 2)
    child = os.fork()
    if child == 0:
        # forked twice: the reward may wait for "any child", and this one never ends
        if os.fork() == 0:
            connection.close()
            _watch(lifeline, output, log)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(lifeline)
    if output is not None:
        os.close(output)


def _watch(lifeline: int, output: int | None, log: str | None) -> None:
    if log is None:
        os.read(lifeline, 1)
    else:
        assert output is not None
        while lifeline not in wait([lifeline, output]):
            printed = os.read(output, 1 << 16)
            with contextlib.suppress(OSError):  # no folder, a full disk: the run goes on without
                _append(log, printed)
    os.killpg(0, signal.SIGKILL)


def _append(log: str, printed: bytes) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.dirname(log))
    with open(log, "ab", buffering=0) as file:
        file.write(printed[: max(0, LOG_BYTES - os.fstat(file.fileno()).st_size)])
