"""Prompts from reasoning-gym's procedural datasets, with what its scorers need to judge.

Owns: dataset name and options -> prompts. Does not own: scoring (`tasks.rewards.reasoning_gym`).
Importable without torch; imports reasoning_gym (about a second), so only by who needs it.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from twofold.tasks.load import nearest
from twofold.types import Prompt


def gym_prompts(dataset: str, options: dict[str, Any], size: int, seed: int) -> list[Prompt]:
    """`size` items of a dataset as user messages.

    Columns: `answer` (text, or None where the dataset accepts many), and for the dataset's own
    scorer `question`, `metadata`, `dataset`, `dataset_options`; all of it JSON, so that a recorded
    group is judged like a fresh one. Raises ValueError for names and values that do not exist.
    """
    items = make_dataset(dataset, options, size, seed)
    prompts = []
    for i in range(size):
        entry = items[i]
        try:
            metadata = json.loads(json.dumps(entry["metadata"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"task.dataset: {dataset} is no JSON: {error}") from None
        columns = {
            "answer": entry["answer"],
            "question": entry["question"],
            "metadata": metadata,
            "dataset": dataset,
            "dataset_options": options,
        }
        prompts.append(Prompt([{"role": "user", "content": entry["question"]}], columns))
    # two datasets compare tuples, which JSON turns into lists: they would judge everything wrong
    first = items[0]
    rewritten = {**first, "metadata": prompts[0].columns["metadata"]}
    if items.score_answer(first["answer"], first) != items.score_answer(first["answer"], rewritten):
        raise ValueError(
            f"task.dataset: {dataset}'s scorer needs metadata that JSON cannot hold; "
            "take another dataset"
        )
    return prompts


def make_dataset(dataset: str, options: dict[str, Any], size: int, seed: int) -> Any:
    """The reasoning_gym dataset itself. Raises ValueError as `gym_prompts` does."""
    if not dataset:
        raise ValueError("task.dataset: the reasoning_gym task needs a dataset, e.g. chain_sum")
    if dataset not in DATASETS:
        raise ValueError(
            f"task.dataset: reasoning_gym has no {dataset!r}{nearest(dataset, DATASETS)}"
        )
    if size < 1:
        raise ValueError(f"task.size: {size} items cannot be made; take 1 or more")
    valid = {f.name for f in fields(DATASETS[dataset][1])} - {"size", "seed"}
    for name in options:
        if name in ("size", "seed"):
            raise ValueError(f"task.dataset_options.{name}: set task.{name} instead")
        if name not in valid:
            raise ValueError(
                f"task.dataset_options: {dataset} has no option {name!r}{nearest(name, valid)}"
            )
    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:  # how its configurations refuse
        cause = str(error) or type(error).__name__
        raise ValueError(f"task.dataset_options: {dataset} refuses {options}: {cause}") from None
