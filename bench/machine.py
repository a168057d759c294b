"""What a measurement ran on, in one line."""

from __future__ import annotations

from pathlib import Path


def dtypes() -> list[str]:
    """What a side can be tried in: bfloat16 and float32; float32 alone, and that is printed, where
    the CPU has no instructions for bfloat16 and emulates it many times slower."""
    from twofold.runtime.device import bfloat16_instructions

    if bfloat16_instructions():
        return ["bfloat16", "float32"]
    print("dtype    float32 only: this CPU has no instructions for bfloat16")
    return ["float32"]


def describe() -> str:
    """CPU, cores this process may use, torch."""
    import torch

    from twofold.threads import usable_cpus

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    name, cores = names[0] if names else "CPU", len(usable_cpus())
    return f"{name}, {cores} cores, {capability}, torch {torch.__version__}"
