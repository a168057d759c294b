"""Rewards for whole runs of a random model. Imports little: a reward process loads this file."""

from __future__ import annotations

import time
from typing import Any


def even_sum(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Half of what a random model says has an even sum of token ids: most groups vary."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def some_fail(
    prompts: Any, completions: Any, completion_ids: Any, **columns: Any
) -> list[float | None]:
    """As `even_sum`, but a third of the samples has no reward, decided by their tokens."""
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]


def slow(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Takes longer than anybody should wait."""
    time.sleep(45)
    return [0.0] * len(completions)
