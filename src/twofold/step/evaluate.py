"""Held-out evaluation under one version: sampled at temperature 1, and greedy.

Owns: which completions are made and how they are counted. Does not own: when (the scheduler), the
reward processes (`step/reward`, handed in as `judge`), the generator of the training samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from twofold.model.transformer import Transformer
from twofold.step.generate import Generator
from twofold.step.prompts import decode_completion
from twofold.step.reward import RewardJob, RewardResult, reward_job
from twofold.step.sampling import Sampling
from twofold.types import Group, Prompt, Sample, SampleId

Judge = Callable[[list[RewardJob]], list[RewardResult] | None]
"""One result per job, waited for; None: a stop was asked for meanwhile."""


@dataclass(frozen=True)
class EvalSet:
    """What is asked: held-out prompts with their token ids."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]


def evaluate(
    model: Transformer,
    tokenizer: object,
    items: EvalSet,
    judge: Judge,
    sampling: Sampling,
    *,
    version: int,
    n_samples: int,
    seed: int,
    max_running_samples: int,
    kv_block_tokens: int,
    stopped: Callable[[], bool],
) -> dict[str, float] | None:
    """Pass rates over `items`; a sample passes when its reward is at least 1. None: `stopped()`
    became true before the end.

    Sampling noise is keyed by (seed, "eval", prompt, sample), so two versions are compared on the
    same draws. `eval/pass_rate_stderr` is the standard error over all samples, counted as
    independent. Failed rewards are left out, and counted in `eval/failed`. The same names with
    `eval/greedy_` are of the greedy completions.
    """
    metrics: dict[str, float] = {}
    plain = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    for greedy, count in ((False, n_samples), (True, 1)):
        if count == 0:
            continue
        generator = Generator(
            model,
            replace(plain, greedy=greedy),
            seed=seed,
            stream="eval",
            max_running_samples=max_running_samples,
            kv_cache_tokens=0,
            kv_block_tokens=kv_block_tokens,
        )
        generator.version = version
        groups = [
            Group(i, prompt, ids, version, version, [Sample(SampleId(i, j)) for j in range(count)])
            for i, (prompt, ids) in enumerate(zip(items.prompts, items.prompt_ids, strict=True))
        ]
        generator.admit(groups)
        while generator.unfinished:
            if stopped():
                return None
            generator.run(max_decode_steps=16)
        generator.release()
        for sample in (sample for group in groups for sample in group.samples):
            sample.text = decode_completion(
                tokenizer, sample.token_ids, sampling.stop_ids, sampling.stop_strings
            )
        results = judge([reward_job(group) for group in groups])
        if results is None:
            return None
        metrics |= _count(results, groups, greedy)
    return metrics


def _count(results: list[RewardResult], groups: list[Group], greedy: bool) -> dict[str, float]:
    """Without a single reward there is no pass rate, rather than one of 0."""
    prefix = "eval/greedy_" if greedy else "eval/"
    rewards = [reward for result in results for reward in result.rewards if reward is not None]
    n_asked = sum(len(group.samples) for group in groups)
    n_tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    metrics = {
        f"{prefix}length": n_tokens / n_asked,
        f"{prefix}failed": float(n_asked - len(rewards)),
    }
    if rewards:
        rate = sum(reward >= 1 for reward in rewards) / len(rewards)
        error = math.sqrt(rate * (1 - rate) / len(rewards))
        metrics |= {f"{prefix}pass_rate": rate, f"{prefix}pass_rate_stderr": error}
    return metrics
