"""The inside of the sandbox: runs as a program of its own, and imports nothing of Twofold.

Owns: giving up rights (limits, files, system calls), then running code and its tests. Does not own:
starting, waiting and killing (`tasks.sandbox`). What is contained and what is not: docs/rewards.md.

Standard input brings {"code", "tests", "token", "kernel", and the limits}; for each test that
passes the token goes out as a line, which code that ends early or prints at will cannot do for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# ---------------------------------------------------------------- files: Landlock

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_N_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights on files that each version of Landlock knows, as bits from 0 on; 16 from version 5."""


def readable_places() -> list[str]:
    """What a Python program reads without meaning to: its library, shared libraries, time zones."""
    return [
        sys.prefix, sys.base_prefix, "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib",
        "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/null", "/dev/urandom",
    ]  # fmt: skip


def forbid_files(libc: ctypes.CDLL) -> bool:
    """From here on nothing can be written, nor read but in `readable_places`. False: this kernel
    cannot. linux/landlock.h."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = struct.pack("Q", (1 << _N_RIGHTS.get(version, 16)) - 1)
    rules = libc.syscall(_LANDLOCK_CREATE, rights, len(rights), 0)
    if rules < 0:
        return False
    for place in readable_places():
        try:
            folder = os.open(place, os.O_PATH)
        except OSError:
            continue
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(place) else 0)
        libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, folder), 0)
        os.close(folder)
    done = libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


# ---------------------------------------------------------------- system calls: seccomp

# names are for readers; numbers are those of linux/unistd.h
_REFUSED = {
    "x86_64": (0xC000003E, {
        "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
        "kill": 62, "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "rt_sigqueueinfo": 129, "setrlimit": 160, "mount": 165, "tkill": 200, "tgkill": 234,
        "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "rt_tgsigqueueinfo": 297, "prlimit64": 302, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "execveat": 322,
        "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434,
        "clone3": 435, "pidfd_getfd": 438,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "socketpair": 199, "clone": 220, "execve": 221, "kill": 129, "shmget": 194,
        "semget": 190, "msgget": 186, "ptrace": 117, "syslog": 116, "rt_sigqueueinfo": 138,
        "setrlimit": 164, "mount": 40, "tkill": 130, "tgkill": 131, "mq_open": 180, "add_key": 217,
        "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "rt_tgsigqueueinfo": 240, "prlimit64": 261, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "bpf": 280, "execveat": 281, "userfaultfd": 282,
        "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "clone3": 435,
        "pidfd_getfd": 438,
    }),
}  # fmt: skip
_X32 = 0x40000000  # calls of another numbering that the same x86 processor takes
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1: "operation not permitted"


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def forbid_calls(libc: ctypes.CDLL) -> bool:
    """From here on no process or thread starts, no socket opens, no signal is sent, no limit is
    raised. False: this system cannot. linux/seccomp.h, linux/filter.h."""
    if platform.machine() not in _REFUSED:
        return False
    architecture, calls = _REFUSED[platform.machine()]
    numbers = sorted(calls.values())

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [step(_LOAD, 4), step(_EQUAL, architecture, 1), step(_RETURN, _KILL), step(_LOAD, 0)]
    n = len(numbers)
    program.append(step(_AT_LEAST, _X32, n + 1))
    program += [step(_EQUAL, number, n - i) for i, number in enumerate(numbers)]
    program += [step(_RETURN, _ALLOW), step(_RETURN, _REFUSE)]
    code = b"".join(program)
    filter_ = _Program(len(program), code)
    return libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) == 0


# ---------------------------------------------------------------- where the kernel has neither

_REFUSED_EVENTS = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
    "os.kill", "os.putenv", "pty.", "ctypes.", "signal.pthread_kill", "_thread.start_new_thread",
    "resource.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown",
)  # fmt: skip


def forbid_in_python() -> None:
    """Weaker: the interpreter refuses. Good against mistakes, not against code that sets out to get
    around it."""
    places = tuple(os.path.realpath(place) + os.sep for place in readable_places())

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED_EVENTS):
            raise PermissionError(f"{event} is not permitted here")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes or not os.path.realpath(os.fsdecode(path)).startswith(places):
                raise PermissionError(f"opening {path!r} is not permitted here")

    sys.addaudithook(refuse)


# ---------------------------------------------------------------- all of it


def limit(cpu_s: int, memory_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def give_up_rights(kernel: bool) -> dict[str, bool]:
    """Which of the kernel's means were there: {"files": Landlock, "calls": seccomp}."""
    files = calls = False
    if kernel and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges: what lets everybody do the rest
        files = forbid_files(libc)
        # who is root keeps no capability that would undo a limit
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
        calls = forbid_calls(libc)
    if not (files and calls):
        forbid_in_python()
    return {"files": files, "calls": calls}


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    limit(job["cpu_s"], job["memory_bytes"])
    os.write(out, (json.dumps(give_up_rights(job["kernel"])) + "\n").encode())
    token = (job["token"] + "\n").encode()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["code"], "code", "exec"), names)
    for test in job["tests"]:
        try:
            exec(compile(test, "test", "exec"), names)
        except Exception:  # the next may pass
            continue
        os.write(out, token)


if __name__ == "__main__":
    main()
