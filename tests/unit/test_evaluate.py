"""Evaluation: which completions are judged, and how they are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tiny import tiny_model
from twofold.model.transformer import Transformer
from twofold.step.evaluate import EvalSet, Judge, evaluate
from twofold.step.generate import Generator
from twofold.step.reward import RewardJob, RewardResult
from twofold.step.sampling import Sampling
from twofold.types import Group, Prompt, Sample, SampleId

SAMPLING = Sampling(max_new_tokens=8, stop_ids=tuple(range(0, 300, 9)))
PROMPT_IDS = [[5, 6, 8], [9, 10, 11, 12, 13], [40]]
ITEMS = EvalSet([Prompt(f"question {n}") for n in range(len(PROMPT_IDS))], PROMPT_IDS)
N_SAMPLES = 4


class Words:
    """A tokenizer whose words are the ids."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))


class Judging:
    """Notes the jobs of each call; every reward is `judge(token ids)`."""

    def __init__(self, judge: Callable[[list[int]], float | None] = lambda ids: 0.0) -> None:
        self._judge = judge
        self.calls: list[list[RewardJob]] = []

    def __call__(self, jobs: list[RewardJob]) -> list[RewardResult]:
        self.calls.append(jobs)
        results = []
        for ticket, job in enumerate(jobs):
            rewards = [self._judge(ids) for ids in job.completion_ids]
            failures = ["broke" if reward is None else None for reward in rewards]
            results.append(RewardResult(ticket, rewards, failures, 0.0))
        return results

    def ids(self, call: int = 0) -> list[list[list[int]]]:
        return [job.completion_ids for job in self.calls[call]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(1).requires_grad_(False)


def run(
    model: Transformer, judge: Judge, sampling: Sampling = SAMPLING, **changes: Any
) -> dict[str, float] | None:
    options: dict[str, Any] = {
        "version": 3, "n_samples": N_SAMPLES, "seed": 11, "max_running_samples": 8,
        "kv_block_tokens": 4, "stopped": lambda: False,
    }  # fmt: skip
    return evaluate(model, Words(), ITEMS, judge, sampling, **{**options, **changes})


def drawn(model: Transformer, sampling: Sampling, stream: str, n: int) -> list[list[list[int]]]:
    """The same completions by a generator of that stream."""
    generator = Generator(model, sampling, seed=11, stream=stream, max_running_samples=16,
                          kv_cache_tokens=0, kv_block_tokens=16)  # fmt: skip
    groups = [
        Group(i, Prompt(""), ids, 0, 0, [Sample(SampleId(i, j)) for j in range(n)])
        for i, ids in enumerate(PROMPT_IDS)
    ]
    generator.admit(groups)
    while generator.unfinished:
        generator.run(100)
    return [[sample.token_ids for sample in group.samples] for group in groups]


def sampled(model: Transformer, **changes: Any) -> list[list[list[int]]]:
    judge = Judging()
    run(model, judge, **changes)
    return judge.ids()


# ---------------------------------------------------------------- which completions


def test_temperature_1_without_truncation_from_a_stream_of_its_own(model: Transformer) -> None:
    """Whatever the rollout uses: pass rates of runs are comparable, and no training sample's noise
    is used twice."""
    rollout = replace(SAMPLING, temperature=0.3, top_k=2, top_p=0.4, min_p=0.2)
    expected = drawn(model, SAMPLING, "eval", N_SAMPLES)
    assert sampled(model) == sampled(model, sampling=rollout) == expected
    assert drawn(model, rollout, "eval", N_SAMPLES) != expected
    assert drawn(model, SAMPLING, "train", N_SAMPLES) != expected


def test_greedy_is_greedy_and_one_a_prompt(model: Transformer) -> None:
    judge = Judging()
    run(model, judge, replace(SAMPLING, temperature=0.5, top_k=3))
    assert len(judge.calls) == 2
    assert judge.ids(1) == drawn(model, replace(SAMPLING, greedy=True), "eval", 1)
    alone = Judging()
    metrics = run(model, alone, n_samples=0)
    assert alone.ids() == judge.ids(1) and len(alone.calls) == 1
    assert metrics is not None and all(name.startswith("eval/greedy_") for name in metrics)


def test_judges_see_prompts_and_texts_without_the_end_token(model: Transformer) -> None:
    judge = Judging()
    run(model, judge)
    ended = 0
    for job, prompt in zip(judge.calls[0], ITEMS.prompts, strict=True):
        assert job.prompt is prompt
        for text, ids in zip(job.completions, job.completion_ids, strict=True):
            words = ids[:-1] if ids[-1] in SAMPLING.stop_ids else ids
            ended += words is not ids
            assert text == " ".join(map(str, words))
    assert ended > 0, "no completion ended by itself"


def test_two_versions_are_compared_on_the_same_draws(model: Transformer) -> None:
    """The noise depends on seed, prompt and sample alone."""
    expected = sampled(model)
    assert sampled(model, version=9, max_running_samples=3, kv_block_tokens=16) == expected
    assert [row[:2] for row in sampled(model, n_samples=2)] == [row[:2] for row in expected]
    assert sampled(model, seed=12) != expected
    updated = tiny_model(1).requires_grad_(False)
    for parameter in updated.parameters():
        parameter.mul_(1 + 1e-4)
    rows = zip(sampled(updated), expected, strict=True)
    same = sum(a == b for row in rows for a, b in zip(*row, strict=True))
    assert same >= 10, "of 12: other noise would change them all"


# ---------------------------------------------------------------- how they are counted


def test_pass_rates_and_failures_are_counted(model: Transformer) -> None:
    """A pass is a reward of 1 or more. Failed samples are neither passes nor misses."""
    rewards: list[float | None] = [1.0, 0.999, 2.5, None, -1.0, 1.0, None, 0.0, 0.5, 1.0, 0.0, 0.0]
    greedy: list[float | None] = [0.0, 1.0, 0.0]
    given = iter(rewards + greedy)
    judge = Judging(lambda ids: next(given))
    metrics = run(model, judge)
    lengths = [[len(ids) for row in judge.ids(call) for ids in row] for call in (0, 1)]
    assert len(set(lengths[0])) > 1
    assert metrics == {
        "eval/pass_rate": pytest.approx(4 / 10),
        "eval/pass_rate_stderr": pytest.approx(math.sqrt(0.4 * 0.6 / 10)),
        "eval/length": pytest.approx(sum(lengths[0]) / 12),
        "eval/failed": 2.0,
        "eval/greedy_pass_rate": pytest.approx(1 / 3),
        "eval/greedy_pass_rate_stderr": pytest.approx(math.sqrt(2 / 27)),
        "eval/greedy_length": pytest.approx(sum(lengths[1]) / 3),
        "eval/greedy_failed": 0.0,
    }


def test_without_a_single_reward_there_is_no_pass_rate(model: Transformer) -> None:
    n = 0

    def judge(ids: list[int]) -> float | None:
        nonlocal n
        n += 1
        return None if n <= 12 else 1.0

    metrics = run(model, Judging(judge))
    assert metrics is not None
    assert metrics["eval/failed"] == 12.0
    assert "eval/pass_rate" not in metrics and "eval/pass_rate_stderr" not in metrics
    assert metrics["eval/greedy_pass_rate"] == 1.0, "the greedy ones are counted for themselves"


# ---------------------------------------------------------------- stopping


def test_a_stop_ends_it_without_a_result(model: Transformer) -> None:
    """While it generates (the first look or a later one) and while it waits for rewards."""
    judge = Judging()
    assert run(model, judge, stopped=lambda: True) is None
    assert judge.calls == []
    looks = iter([False] * 2 + [True] * 100)
    long = replace(SAMPLING, max_new_tokens=64, stop_ids=())
    assert run(model, judge, long, stopped=lambda: next(looks)) is None
    assert judge.calls == [] and len(list(looks)) == 99, "it went on after the stop"
    assert run(model, lambda jobs: None) is None


def test_the_model_is_left_as_it_was(model: Transformer) -> None:
    twin = tiny_model(1)
    run(twin, Judging())
    assert all(
        torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True)
    )
    assert all(p.requires_grad and p.grad is None for p in twin.parameters())
