"""Which device and which dtype a model computes in, where the options leave it open.

Owns: the choice, and reading what Linux says of the CPU. Does not own: telling the user (`run`,
`check`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from twofold.config import Config

# What Linux calls the instructions that multiply bfloat16.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "svebf16")


def choose_device(config: Config) -> torch.device:
    """`run.device`; auto: the accelerator that torch finds, else the CPU. ValueError if there is
    none such."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wanted = config.run.device
    if wanted == "auto":
        return accelerator or torch.device("cpu")
    if wanted.partition(":")[0] not in ("cpu", accelerator.type if accelerator else "cpu"):
        there = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
        raise ValueError(f"run.device = {wanted!r}: torch finds {there}; take auto or one of these")
    return torch.device(wanted)


def with_dtype(config: Config) -> Config:
    """The options with `model.dtype` = auto decided: bfloat16 on an accelerator and on a CPU that
    has instructions for it, else float32 (there bfloat16 is emulated, and many times slower)."""
    if config.model.dtype != "auto":
        return config
    fast = choose_device(config).type != "cpu" or bool(bfloat16_instructions())
    dtype = "bfloat16" if fast else "float32"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


def bfloat16_instructions() -> list[str]:
    """The CPU's instruction sets for bfloat16, as Linux names them; elsewhere none is known."""
    path = "/proc/cpuinfo"
    flags = (proc_value(path, "flags") or proc_value(path, "Features")).split()
    return [flag for flag in _BFLOAT16_FLAGS if flag in flags]


def proc_value(path: str, key: str) -> str:
    """The value of the first line `key : value` of a file of Linux's /proc; else empty."""
    if not Path(path).exists():
        return ""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
