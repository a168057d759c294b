"""Rewards for `test_kinds`. Imports little: a reward process loads this file."""

from __future__ import annotations

import os
import time
from typing import Any


def hostile(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Does what rewards do in the wild, decided by a sample's tokens: hangs, raises, leaves a child
    behind that hangs, prints without end. The others get 0.5 or 1.0, never 0."""
    for ids in completion_ids:
        kind = kind_of(ids)
        if kind == "hangs":
            time.sleep(60)
        if kind == "raises":
            raise RuntimeError("no such file")
        if kind == "forks" and os.fork() == 0:
            time.sleep(60)
        if kind == "prints":
            print("x" * 5_000_000)
    return [0.5 + sum(ids) % 2 / 2 for ids in completion_ids]


def kind_of(ids: list[int]) -> str:
    return ("hangs", "raises", "forks", "prints", "", "", "")[sum(ids) % 7]
