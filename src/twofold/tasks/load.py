"""Tasks: the prompts to train on, the prompts held out, and the reward that goes with them.

Owns: choosing a task by name and the split into training and held-out prompts; addition.
Does not own: the order of the prompts (`step.prompts`), running rewards (`step.reward`), several
sources at once (`tasks.mixture`). Importable without torch.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

from twofold.config import TaskConfig
from twofold.types import Prompt

TASK_NAMES = ("addition", "reasoning_gym", "jsonl", "csv", "parquet", "huggingface")


@dataclass(frozen=True)
class Task:
    """`held_out` shares no prompt with `train`; `reward` is the built-in that fits, by name.

    `shares`: of a mixture, how many of the `train` prompts each source has, one source after the
    other, and its weight.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    reward: str
    shares: tuple[tuple[int, float], ...] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rewards are given, besides prompts and completions."""
        return list(self.train[0].columns)


def load_task(config: TaskConfig) -> Task:
    """The task that `config` describes. Raises ValueError for anything wrong with it or its
    data."""
    if config.mixture:
        from twofold.tasks.mixture import load_mixture

        return load_mixture(config)
    if config.name == "addition":
        prompts, reward = addition_prompts(config.digits), "last_number"
    elif config.name == "reasoning_gym":
        from twofold.tasks.gym import gym_prompts

        prompts = gym_prompts(config.dataset, config.dataset_options, config.size, config.seed)
        reward = "reasoning_gym"
    elif config.name in TASK_NAMES:
        from twofold.tasks.files import file_prompts

        prompts, reward = file_prompts(config), "math_verify"
    else:
        raise ValueError(f"task.name: no task {config.name!r}{nearest(config.name, TASK_NAMES)}")
    train, held_out = split(prompts, config.held_out, config.seed)
    return Task(train, held_out, reward)


def addition_prompts(digits: int) -> list[Prompt]:
    """All sums a + b of two numbers with so many digits and without 0 in front: 81 with one digit
    (1 to 9), 8,100 with two (10 to 99). Column `answer` (text)."""
    numbers = range(10 ** (digits - 1), 10**digits)
    return [
        Prompt(
            [{"role": "user", "content": f"What is {a} + {b}? Reply with only the number."}],
            {"answer": str(a + b)},
        )
        for a in numbers
        for b in numbers
    ]


def split(prompts: list[Prompt], held_out: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out), both in data order; `held_out` different prompts are chosen by `seed`.

    Generated data repeats itself, so a further item that asks the same as a held-out one is in
    neither list: held out means never trained on. Raises ValueError when too many are asked for.
    """
    first_asked: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first_asked.setdefault(question(prompt), i)
    if not 0 <= held_out < len(first_asked):
        raise ValueError(
            f"task.held_out: {held_out} of {len(first_asked)} different prompts cannot be held "
            f"out; take 0 to {len(first_asked) - 1}"
        )
    chosen = random.Random(f"held out {seed}").sample(sorted(first_asked.values()), held_out)
    asked = {question(prompts[i]) for i in chosen}
    train = [prompt for prompt in prompts if question(prompt) not in asked]
    return train, [prompts[i] for i in sorted(chosen)]


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the valid name that was probably meant, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(valid)}" if len(valid) <= 12 else ""


def question(prompt: Prompt) -> str:
    """What is asked, as text that is equal when it is."""
    return json.dumps(prompt.content)
