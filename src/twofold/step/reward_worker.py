"""The other side of `step.reward`: what runs inside a reward process.

Owns: calling the reward function, turning what it returns into plain numbers, and the end of the
process group when the parent is gone. Does not own: time limits, queues (`step.reward`).

A fresh interpreter imports this and nothing of the parent's program; start-up is part of every
replacement of a killed worker, so nothing heavy is imported here.
"""

from __future__ import annotations

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
        traceback.print_exc()
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
        try:
            values = list(returned)  # lists, arrays and tensors alike
        except TypeError:
            kind = type(returned).__name__
            return {"error": f"reward returned {kind} instead of a list of {n} numbers"}
        if len(values) != n:
            return {"error": f"reward returned {len(values)} values for {n} completions"}
        judged = [_number(value) for value in values]
    except BaseException as error:  # sys.exit() in a reward ends the call, not the worker
        traceback.print_exc()
        return {"error": describe(error)}
    return {"rewards": [reward for reward, _ in judged], "failures": [why for _, why in judged]}


def describe(error: BaseException) -> str:
    """One line: type, message, and where it was raised unless that is in this package."""
    message = " ".join(str(error).split())[:300]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    files = [(file, line) for file, line in files if "importlib" not in file]
    if not files or files[-1][0].startswith(os.path.dirname(os.path.dirname(__file__))):
        # a ValueError of ours is a whole sentence
        return message if isinstance(error, ValueError) else text
    return f"{text} ({os.path.basename(files[-1][0])}:{files[-1][1]})"


def _number(value: Any) -> tuple[float | None, str | None]:
    """(reward, None) or (None, why there is none)."""
    if value is None:
        return None, "reward returned None"
    if isinstance(value, str):
        return None, f"reward returned text {value[:40]!r} instead of a number"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None, f"reward returned {type(value).__name__} instead of a number"
    if not math.isfinite(number):
        return None, f"reward returned {number}"
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
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        while lifeline not in wait([lifeline, output]):
            printed = os.read(output, 1 << 16)
            room = LOG_BYTES - os.fstat(file).st_size
            if room > 0:
                os.write(file, printed[:room])
    os.killpg(0, signal.SIGKILL)
