"""Several sources of prompts as one task.

Owns: what a source of `task.mixture` may say, and making their prompts fit together. Does not own:
which source a group asks (`step.prompts.PromptSource`, from the weights). Importable without torch.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from twofold.config import Config, TaskConfig, check, from_dict
from twofold.tasks.load import Task, load_task, nearest, question
from twofold.types import Prompt

OWN_REWARD = "own_reward"
"""The column that names each source's own reward, where they differ (`tasks.rewards.own`)."""

_ONCE = ("mixture", "system_prompt")  # options of [task] that are no source's own
_PER_SOURCE = {f.name for f in fields(TaskConfig)} - set(_ONCE)


def load_mixture(config: TaskConfig) -> Task:
    """The sources one after the other, each with its own held-out prompts; a prompt that one source
    holds out is trained from none. Every prompt has the columns of all, None where its source has
    no such column. Raises ValueError that names the source."""
    tasks: list[Task] = []
    weights: list[float] = []
    for i, entry in enumerate(config.mixture):
        try:
            source, weight = _source(config, entry)
            tasks.append(load_task(source))
        except ValueError as error:
            raise ValueError(f"task.mixture[{i}]: {error}") from None
        weights.append(weight)
    held_out = {question(prompt) for task in tasks for prompt in task.held_out}
    parts = [[p for p in task.train if question(p) not in held_out] for task in tasks]
    for i, part in enumerate(parts):
        if not part:
            raise ValueError(f"task.mixture[{i}]: other sources hold out all its prompts")
    rewards = [task.reward for task in tasks]
    reward = rewards[0]
    if len(set(rewards)) > 1:
        reward = "own"
        parts = [_with_reward(part, name) for part, name in zip(parts, rewards, strict=True)]
        held = [_with_reward(t.held_out, t.reward) for t in tasks]
    else:
        held = [task.held_out for task in tasks]
    names = {name: None for part in parts for prompt in part for name in prompt.columns}
    return Task(
        [_widened(prompt, names) for part in parts for prompt in part],
        [_widened(prompt, names) for part in held for prompt in part],
        reward,
        tuple((len(part), weight) for part, weight in zip(parts, weights, strict=True)),
    )


def _source(config: TaskConfig, entry: dict[str, Any]) -> tuple[TaskConfig, float]:
    """The options of one source: its own, else those of [task]; and its weight."""
    own = dict(entry)
    weight = own.pop("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"weight = {weight!r} is refused: give a number above 0")
    for name in own:
        if name in _ONCE:
            raise ValueError(f"{name} is an option of [task] itself, not of one of its sources")
        if name not in _PER_SOURCE:
            raise ValueError(f"{name} is not an option{nearest(name, _PER_SOURCE | {'weight'})}")
    values = from_dict({"task": {**vars(replace(config, mixture=[])), **own}}).task
    check(Config(task=values))
    return values, float(weight)


def _with_reward(prompts: list[Prompt], reward: str) -> list[Prompt]:
    return [Prompt(p.content, {**p.columns, OWN_REWARD: reward}) for p in prompts]


def _widened(prompt: Prompt, names: dict[str, None]) -> Prompt:
    return Prompt(prompt.content, {**names, **prompt.columns})
