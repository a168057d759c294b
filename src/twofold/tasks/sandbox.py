"""Running code that a model wrote, with tests, where it can do little harm.

Owns: one process per piece of code, its limits, and how many tests passed. Does not own: what the
process may do (`tasks.sandbox_child`; in words: docs/rewards.md), the reward (`tasks.rewards`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from twofold.threads import usable_cpus

_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """Of one piece of code with all its tests. Time of the processor decides, so that a busy
    machine makes no code wrong; `wall_s` is for code that waits."""

    cpu_s: int = 2
    wall_s: float = 6.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True)
class Outcome:
    """`n_passed` of the tests; `containment` says which means held the code."""

    n_passed: int
    containment: str


def run(
    code: str, tests: Sequence[str], limits: Limits = Limits(), *, kernel: bool = True
) -> Outcome:
    """Runs `code`, then each of `tests` in its names: a test passes when it raises nothing. Code
    that raises, ends the program or exceeds a limit passes none from there on.

    `kernel` False: only what works on every system. Raises RuntimeError when the sandbox itself
    cannot start: that is no verdict on the code.
    """
    token = secrets.token_hex(16)
    job = {
        "code": code, "tests": list(tests), "token": token, "kernel": kernel,
        "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes,
    }  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )  # in our process group, which a reward worker's end takes along
    assert child.stdin is not None and child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it died: what it said will tell
            child.stdin.write(json.dumps(job).encode())
            child.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limits.wall_s)
    finally:
        child.kill()
        child.wait()
    # read when it is dead: it can have written no more than fits into a pipe
    os.set_blocking(child.stdout.fileno(), False)
    said = os.read(child.stdout.fileno(), 1 << 16).split(b"\n")
    child.stdout.close()
    if len(said) < 2:
        raise RuntimeError("the sandbox did not start")
    return Outcome(said[1:].count(token.encode()), containment(json.loads(said[0])))


def containment(means: dict[str, bool]) -> str:
    """One line about what `run` holds code with, from what the kernel had."""
    calls = "seccomp" if means["calls"] else "the interpreter's refusal (weak)"
    files = "Landlock" if means["files"] else "the interpreter's refusal (weak)"
    return f"network and processes: {calls}; files: {files}; CPU, memory, file size: limits"


def run_all(jobs: Sequence[tuple[str, Sequence[str]]], limits: Limits = Limits()) -> list[Outcome]:
    """`run` for each (code, tests), as many at a time as there are processors."""
    with ThreadPoolExecutor(len(usable_cpus())) as threads:
        return list(threads.map(lambda job: run(*job, limits), jobs))
