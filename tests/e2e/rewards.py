"""Rewards for whole runs of a random model. Imports little: a reward process loads this file."""

from __future__ import annotations

import os
import time
from pathlib import Path
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


def unhurried(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """As `even_sum`, after a moment: a run with it lasts long enough to be interrupted."""
    time.sleep(0.05)
    return even_sum(prompts, completions, completion_ids)


def none_at_all(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[None]:
    return [None] * len(completions)


def talkative(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """As `even_sum`, and says what it saw."""
    print(f"judged {len(completions)} completions")
    return even_sum(prompts, completions, completion_ids)


def beside_another(
    folder: Path, prompts: Any, completions: Any, completion_ids: Any, **columns: Any
) -> list[float | None]:
    """A reward only if another process judges at the same time: each leaves its mark in `folder`
    and waits for the other's."""
    (folder / str(os.getpid())).touch()
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        if len(list(folder.iterdir())) > 1:
            return [float(i) for i in range(len(completions))]
        time.sleep(0.01)
    return [None] * len(completions)


def always_right(
    prompts: Any, completions: Any, completion_ids: Any, **columns: Any
) -> list[float]:
    """A solved task: no group has variance."""
    return [1.0] * len(completions)


def often_right(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Most completions are right, so some groups are right as a whole."""
    return [float(sum(ids) % 5 != 0) for ids in completion_ids]


STOPS = ["a", "1", "\ufffd\ufffd"]


async def no_stop(completions: Any, **columns: Any) -> list[float]:
    """1.0 where no stop string is to be seen."""
    return [float(not any(stop in text for stop in STOPS)) for text in completions]


def odd_if_level(completion_ids: Any, level: Any, **columns: Any) -> list[float | None]:
    """Does not apply where the column is None, as of a source that has no such column."""
    return [
        None if of is None else float(sum(ids) % 2)
        for ids, of in zip(completion_ids, level, strict=True)
    ]
