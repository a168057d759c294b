"""Memory as the machine counts it: how much there is, and the most that each phase held.

Owns: the room that a device has for this process, and the peak per phase. Does not own: what is
expected (`ledger`).

On a CPU memory is the process's resident memory, on an accelerator what torch has allocated there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from twofold.memory.ledger import GB
from twofold.types import Phase


def room_bytes(device: torch.device) -> int:
    """The most that this process can come to hold on the device, with what it holds already."""
    if device.type == "cpu":
        return cpu_room_bytes()
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device)


def cpu_room_bytes(root: Path = Path("/")) -> int:
    """Resident memory that this process can come to have: what the system calls available, or less
    where a control group (a container) has a limit, and what the process holds. `root`: where
    /proc and /sys are."""
    if not (root / "proc/meminfo").is_file():  # not Linux: all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _kib(root / "proc/meminfo", "MemAvailable")
    # of what is mapped from files the system counts as available what it can drop
    held = _kib(root / "proc/self/status", "RssAnon")
    return min([available, *_cgroup_rooms(root)]) + held


def _kib(path: Path, key: str) -> int:
    """Bytes of the line `key:  123 kB`."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{path} has no {key}")


def _cgroup_rooms(root: Path) -> list[int]:
    """What is left in this process's control groups and all above them; files that are only cached
    count as left."""
    rooms: list[int] = []
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(mount):
                break
            if (folder / names[0]).is_file() and (room := _cgroup_room(folder, *names)) is not None:
                rooms.append(room)
    return rooms


def _cgroup_room(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    """None: no limit."""
    text = (folder / limit).read_text().strip()
    if text == "max" or int(text) >= 2**62:
        return None
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / usage).read_text()) - int(stat.get(cached, 0))
    return max(0, int(text) - used)


# ---------------------------------------------------------------- peaks


class PhaseMeter:
    """The most memory that each phase held since the last `take`. One phase runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: Phase | None = None
        self._peaks: dict[Phase, int] = {}

    def begin(self, phase: Phase) -> None:
        """The phase that ran ends, this one begins."""
        self._note()
        self._phase = phase
        reset_peak(self._device)

    def take(self) -> dict[str, float]:
        """memory/PHASE_gb for each phase that ran, in 10^9 bytes; the running one goes on."""
        self._note()
        metrics = {f"memory/{phase}_gb": peak / GB for phase, peak in self._peaks.items()}
        self._peaks.clear()
        return metrics

    def _note(self) -> None:
        if self._phase is not None:
            peak = peak_bytes(self._device)
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))


def reset_peak(device: torch.device) -> None:
    """`peak_bytes` counts from now on. On a CPU only under Linux, and where the process may: else
    it goes on counting from the process's start."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    clear = Path("/proc/self/clear_refs")
    if os.access(clear, os.W_OK):
        clear.write_text("5")  # proc(5): sets the peak resident size to the current one


def peak_bytes(device: torch.device) -> int:
    """The most memory held since `reset_peak`."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":
        return _kib(Path("/proc/self/status"), "VmHWM")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
