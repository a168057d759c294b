"""The rewards that ship with the package, and finding a reward by name.

Owns: built-in reward functions, "module:function" and "file.py:function". Runs inside reward
workers, so it imports nothing heavy until a reward needs it.
Does not own: processes, time limits, what a failed call means (`step.reward`).

A reward has the signature that TRL users know:

    def reward(prompts, completions, completion_ids=None, **columns) -> list[float | None]

All arguments are lists with one entry per completion. For chat prompts `prompts` holds lists of
messages and a completion is [{"role": "assistant", "content": text}]; for text prompts both are
text.
Every other column of the data arrives by its name. None means: this reward does not apply here;
those of the package say so where the column that they need is None.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import ModuleType
from typing import Any

from twofold.tasks.load import nearest

RewardFunction = Callable[..., list[float | None]]
Completion = str | list[dict[str, str]]
RewardName = str | Callable[..., Any]
"""A built-in's name, "module:function", "file.py:function", or a function."""

# a sign counts only where no digit is before it: the last number of "5-3" is 3
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")

# math_verify gives up on one expression after this long (it takes whole seconds): one runaway
# completion should cost itself, not the whole group at reward.timeout_s
MATH_LIMIT_S = 1


def text_of(completion: Completion) -> str:
    """The reply as text, whether the prompt was chat or text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(
    completions: list[Completion], answer: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the last number in the reply equals the column `answer`, else 0.0."""
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        if expected is None:
            rewards.append(None)
            continue
        try:
            value = Decimal(str(expected).replace(",", "").strip())
        except InvalidOperation:
            raise ValueError(f"answer {expected!r} is not a number") from None
        found = _NUMBER.findall(text_of(completion).replace("\u2212", "-"))
        correct = bool(found) and Decimal(found[-1].replace(",", "")) == value
        rewards.append(float(correct))
    return rewards


def exact_match(
    completions: list[Completion], answer: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the reply is the column `answer`, white space at both ends aside, else 0.0."""
    return [
        None if expected is None else float(text_of(reply).strip() == str(expected).strip())
        for reply, expected in zip(completions, answer, strict=True)
    ]


def math_verify(
    completions: list[Completion], answer: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where math_verify finds the reply's last expression equal to the column `answer`.

    `answer` is plain text or LaTeX, with or without dollar signs or a box. Must run in a process's
    main thread (math_verify's own limits are alarm signals).
    """
    from math_verify import parse, verify

    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        if expected is None:
            rewards.append(None)
            continue
        gold = _parse_answer(str(expected))
        reply = parse(text_of(completion), parsing_timeout=MATH_LIMIT_S)
        rewards.append(float(verify(gold, reply, timeout_seconds=MATH_LIMIT_S)))
    return rewards


@functools.lru_cache(maxsize=64)  # a group shares one answer
def _parse_answer(answer: str) -> Any:
    from math_verify import parse

    delimited = "$" in answer or "\\boxed" in answer or "\\[" in answer or "\\(" in answer
    # bare LaTeX needs delimiters to be seen; what is no LaTeX is then found as it stands
    for text in (answer,) if delimited else (f"${answer}$", answer):
        gold = parse(text, parsing_timeout=MATH_LIMIT_S)
        if any(not isinstance(value, str) for value in gold):  # more than the text as it stands
            return gold
    raise ValueError(f"math_verify cannot read the answer {answer!r}")


def reasoning_gym(
    completions: list[Completion],
    answer: list[Any],
    question: list[str],
    metadata: list[dict[str, Any]],
    dataset: list[str],
    dataset_options: list[dict[str, Any]],
    **columns: Any,
) -> list[float | None]:
    """The dataset's own score (0 to 1) of what stands in the last <answer> tags, or of the whole
    reply where there are none."""
    from reasoning_gym.utils import extract_answer

    rewards: list[float | None] = []
    for i, completion in enumerate(completions):
        if dataset[i] is None:
            rewards.append(None)
            continue
        score = _gym_scorer(dataset[i], json.dumps(dataset_options[i], sort_keys=True))
        text = text_of(completion)
        tagged = extract_answer(text)
        entry = {"question": question[i], "answer": answer[i], "metadata": metadata[i]}
        rewards.append(float(score(text.strip() if tagged is None else tagged, entry)))
    return rewards


@functools.lru_cache(maxsize=16)
def _gym_scorer(dataset: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    from twofold.tasks.gym import make_dataset

    scorer: Callable[[str, dict[str, Any]], float]
    # the item is in its metadata, so size and seed do not matter
    scorer = make_dataset(dataset, json.loads(options), size=1, seed=0).score_answer
    return scorer


def code(
    completions: list[Completion], tests: list[str | list[str] | None], **columns: Any
) -> list[float | None]:
    """The share of its tests that the code in the reply passes, in a sandbox (docs/rewards.md).

    The column `tests` holds Python that raises when the code is wrong ("assert double(2) == 4"), or
    a list of such texts, which count one by one. The code is the reply's last block marked as
    Python, else its last block, else all of it.
    """
    from twofold.tasks import sandbox

    listed = [_tests(given) for given in tests]
    jobs = [
        (code_of(text_of(completion)), given)
        for completion, given in zip(completions, listed, strict=True)
        if given is not None
    ]
    outcomes = iter(sandbox.run_all(jobs))
    rewards: list[float | None] = []
    for given in listed:
        if given is None:
            rewards.append(None)
            continue
        outcome = next(outcomes)
        _say_once(f"code runs in a sandbox: {outcome.containment}")
        rewards.append(outcome.n_passed / len(given))
    return rewards


def _tests(given: Any) -> list[str] | None:
    tests = [given] if isinstance(given, str) else given
    if tests is not None and (
        not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests)
    ):
        raise ValueError(f"column 'tests' must be text or a list of texts, not {given!r:.60}")
    return tests


_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def code_of(reply: str) -> str:
    """The last block of a reply that is marked as Python, else the last one, else the reply; a
    block that is not closed (a stop string may have cut it off) ends with the reply."""
    blocks = _BLOCK.findall(reply)
    python = [text for language, text in blocks if language.lower() in ("python", "python3", "py")]
    chosen: list[str] = python or [text for _, text in blocks] or [reply]
    return chosen[-1]


@functools.cache
def _say_once(line: str) -> None:
    print(line, flush=True)  # into the run's reward.log


def own(completions: list[Completion], own_reward: list[str], **columns: Any) -> list[float | None]:
    """In a mixture: the own reward of the source that the prompt is from (all are from one)."""
    return _own(own_reward[0])(completions=completions, **columns)


@functools.lru_cache
def _own(name: str) -> RewardFunction:
    return resolve_reward(name)


BUILT_IN: dict[str, RewardFunction] = {
    "last_number": last_number,
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "code": code,
    "own": own,
}


def resolve_reward(name: str) -> RewardFunction:
    """The function that a name means: a built-in, "module:function" or "file.py:function".

    The working directory, and the folder of a file, can be imported from. Raises ValueError with
    one line; what importing the user's code raises comes through as it is.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in BUILT_IN:
            raise ValueError(
                f"no reward {name!r}{nearest(name, BUILT_IN)}; an own one is module:function or "
                "file.py:function"
            )
        if name == "math_verify":
            # its first call builds parsers for half a second, too near its own limit
            math_verify(["$\\frac{1}{2}$"], ["0.5"])
        return BUILT_IN[name]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    functions: dict[str, RewardFunction] = dict(inspect.getmembers(module, callable))
    if attribute not in functions:
        raise ValueError(f"{where} has no function {attribute!r}{nearest(attribute, functions)}")
    return functions[attribute]


def as_list(reward: RewardName | Sequence[RewardName]) -> list[RewardName]:
    return [reward] if isinstance(reward, str) or callable(reward) else list(reward)


def reward_names(rewards: RewardName | Sequence[RewardName]) -> list[str]:
    """What the functions are called in metrics: unique, and without where they are from."""
    names: list[str] = []
    for reward in as_list(rewards):
        if isinstance(reward, str):
            name = reward.rpartition(":")[2]
        else:
            try:
                name = reward.__name__
            except AttributeError:  # an object with __call__, a partial
                name = type(reward).__name__
        names.append(name)
    seen: Counter[str] = Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[i] = f"{name}_{seen[name]}"
    return names


def _load_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"no file {path}")
    sys.path.insert(0, str(file.parent))
    name = f"reward_file_{file.stem}"  # a file called json.py must not replace the library's json
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
