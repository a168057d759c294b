"""How many CPU threads compute, and on which cores they stay.

Owns: the OpenMP environment, which is read once, when torch is loaded. Does not own: options
(`run.threads` in `config`). Importable without torch, and only useful before it.

Why: two OpenMP threads that are not bound stall each other for milliseconds at a time as soon as
anything else runs on the machine; bound to a core each they do not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_CHOSEN: list[str] = []  # the line of the first call; threads are bound once in a process
_CPUS_BEFORE: set[int] = set()


def bind_threads(n: int) -> str:
    """Sets up `n` OpenMP threads (0: one per physical core this process may use), each on a core of
    its own, and returns one line that says what was chosen. Variables that the user has set
    (OMP_NUM_THREADS, MKL_NUM_THREADS, OMP_PROC_BIND, OMP_PLACES) stay.

    Must run before torch is loaded; a later call changes nothing and returns the same line. Once
    torch is loaded the main thread is on one core, and so is all that it starts: child processes
    that work beside it (rewards) need `usable_cpus`.
    """
    if _CHOSEN:
        return _CHOSEN[0]
    assert "torch" not in sys.modules, "bind_threads() is too late: torch is loaded"
    _CPUS_BEFORE.update(_affinity())
    cores = physical_cores(_CPUS_BEFORE)
    kept = os.environ.get("OMP_NUM_THREADS")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(n or cores))
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    why = "OMP_NUM_THREADS is set" if kept else "run.threads" if n else "one per physical core"
    if threads.isdecimal() and int(threads) > cores:
        line = f"threads  {threads} ({why}), not bound: there are {cores} cores"
    else:
        bind = os.environ.setdefault("OMP_PROC_BIND", "close")
        places = os.environ.setdefault("OMP_PLACES", "cores")
        line = f"threads  {threads} ({why}), OMP_PROC_BIND={bind}, OMP_PLACES={places}"
    keep_freed_memory()
    _CHOSEN.append(line)
    return line


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep what is freed instead of giving it back to the system.

    Training and decoding free and take the same tens of megabytes at every step; by default each
    such block is unmapped, and zeroed page by page when it is taken again (a quarter of a training
    step). Elsewhere than under glibc nothing happens.
    """
    if sys.platform != "linux" or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
        libc.mallopt(parameter, value)


def bound() -> bool:
    """`bind_threads` has run in this process."""
    return bool(_CHOSEN)


def usable_cpus() -> set[int]:
    """The logical CPUs that this process may use, or might before its threads were bound."""
    return set(_CPUS_BEFORE) or _affinity()


def physical_cores(cpus: set[int]) -> int:
    """How many physical cores the logical `cpus` belong to; each counts as one where the system
    does not say."""
    siblings = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.exists() else str(cpu))
    return len(siblings)


def _affinity() -> set[int]:
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
