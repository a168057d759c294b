"""The other side of `step.reward`: what runs inside a reward process.

Owns: calling the reward functions, turning what they return into plain numbers and one reward, and
the end of the process group when the parent is gone. Does not own: time limits, queues, second
tries (`step.reward`).

A fresh interpreter imports this and nothing of the parent's program; start-up is part of every
replacement of a killed worker, so nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from twofold.tasks.rewards import RewardFunction, resolve_reward

if TYPE_CHECKING:
    import asyncio

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

LOG_BYTES = 1 << 20
"""Rewards may print this much into the pool's log; the rest is read and dropped."""


def main(setup: dict[str, Any]) -> None:
    """Serves jobs until the parent closes the connection.

    `setup`: `connection` (fd, jobs come pickled, replies go as JSON so that nothing that a reward
    does can make the parent run code), `lifeline` (fd, at its end the parent is gone), `log` (path
    or None: nowhere), `cpus` (where to run), `rewards` (for each a name for people, what to import
    or None, and its weight; a pickled list of those with None follows).
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
        rewards = _load(setup["rewards"], connection)
        _reply(connection, {"ready": [_parameters(reward.function) for reward in rewards]})
    except BaseException as error:
        _print_exception()
        _reply(connection, {"error": describe(error)})
        return
    while True:
        try:
            pickled = connection.recv_bytes()
        except EOFError:
            return
        _reply(connection, judge(rewards, pickled))


class Reward(NamedTuple):
    """One of the functions that judge a completion."""

    name: str
    function: RewardFunction
    weight: float


Value = tuple[float | None, str | None]
"""What one function says of one completion: (number, None); (None, None): it does not apply;
(None, why): it failed."""


def judge(rewards: list[Reward], pickled: bytes) -> dict[str, Any]:
    """One call of each function with pickled keyword arguments.

    `rewards` and `failures` have one entry per completion, exactly one of the two is not None;
    `parts` has, by the function's name, its own numbers. Or `error` when a function raised: then
    the call is worth nothing.
    """
    try:
        arguments = pickle.loads(pickled)
        n = len(arguments["completions"])
        returned = _awaited([reward.function(**arguments) for reward in rewards])
        values = [_values(one, n) for one in returned]
    except BaseException as error:  # sys.exit() in a reward ends the call, not the worker
        _print_exception()
        return {"error": describe(error)}
    totals = [_total(rewards, [column[i] for column in values]) for i in range(n)]
    return {
        "rewards": [total for total, _ in totals],
        "failures": [why for _, why in totals],
        "parts": {
            reward.name: [number for number, _ in column]
            for reward, column in zip(rewards, values, strict=True)
        },
    }


def _total(rewards: list[Reward], values: list[Value]) -> Value:
    """The weighted sum of those that apply to one completion; failed when one failed or none
    applies."""
    several = len(rewards) > 1
    for reward, (_, why) in zip(rewards, values, strict=True):
        if why is not None:
            return None, f"{reward.name}: {why}" if several else why
    terms = [
        reward.weight * number
        for reward, (number, _) in zip(rewards, values, strict=True)
        if number is not None
    ]
    if not terms:
        return None, "no reward applies: all returned None" if several else "reward returned None"
    return _number(sum(terms))


def _values(returned: Any, n: int) -> list[Value]:
    """What one function says of each completion. An answer of the wrong form is a mistake in the
    function: it fails all, and asking once more would not help."""
    values = _listed(returned)
    if values is None:
        kind = type(returned).__name__
        return [(None, f"reward returned {kind} instead of a list of {n} numbers")] * n
    if len(values) != n:
        return [(None, f"reward returned {len(values)} values for {n} completions")] * n
    return [_number(value) for value in values]


def _awaited(returned: list[Any]) -> list[Any]:
    """What async functions return is waited for, all at once."""
    waiting = [value for value in returned if inspect.isawaitable(value)]
    if not waiting:
        return returned
    import asyncio  # only for who needs it

    async def wait_for_all() -> list[Any]:
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = _event_loop().run_until_complete(wait_for_all())
    for result in results:
        if isinstance(result, BaseException):
            raise result
    ready = iter(results)
    return [next(ready) if inspect.isawaitable(value) else value for value in returned]


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for the process's life: clients that a reward keeps between calls belong to it."""
    import asyncio

    return asyncio.new_event_loop()


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


def _number(value: Any) -> Value:
    if value is None:
        return None, None
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


def _load(named: list[tuple[str, str | None, float]], connection: Connection) -> list[Reward]:
    pickled = iter(())
    if any(where is None for _, where, _ in named):
        pickled = iter(connection.recv())  # cloudpickle's bytes are plain pickle to read
    return [
        Reward(name, next(pickled) if where is None else resolve_reward(where), weight)
        for name, where, weight in named
    ]


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


def check_signature(what: str, parameters: dict[str, Any], given: set[str]) -> None:
    """ValueError, which begins with `what`, when a function with these parameters cannot be called
    with the arguments `given`."""
    missing = [name for name in parameters["needs"] if name not in given]
    if missing:
        raise ValueError(
            f"{what} needs {', '.join(missing)}, but a reward is called with "
            f"{', '.join(sorted(given))}"
        )
    refused = given - set(parameters["takes"])
    if refused and not parameters["takes_all"]:
        raise ValueError(
            f"{what} does not take {', '.join(sorted(refused))}; add **columns to its parameters"
        )


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
