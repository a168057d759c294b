"""Advantages of a batch's samples from their rewards.

Owns: what is taken off a reward (overlong penalty, KL), the baselines and the normalisation. Does
not own: where rewards come from (`reward`), which groups make a batch (`sched`), the critic's
advantages (`critic`). Importable without torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from twofold.config import TrainConfig
from twofold.types import Group, Sample, SampleId

STD_EPS = 1e-6  # rewards that differ by rounding only get no advantage of size 1

TokenValues = dict[SampleId, np.ndarray]
"""float64 [tokens of the sample], for the valid samples of a batch."""


# ---------------------------------------------------------------- within a group


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) with the sample standard deviation (n - 1), as GRPO does
    (arXiv 2402.03300, section 4.1.2). Equal rewards, or a single one, give 0 for all."""
    if not rewards_vary(rewards):
        return [0.0] * len(rewards)
    std = statistics.stdev(rewards)
    return [centred / (std + STD_EPS) for centred in group_centred(rewards)]


def group_centred(rewards: Sequence[float]) -> list[float]:
    """r - mean, as Dr. GRPO does (arXiv 2503.20783): dividing by the standard deviation would
    favour prompts that are almost always or almost never solved."""
    if not rewards_vary(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the others, as RLOO does (arXiv 2402.14740): n / (n - 1) times `group_centred`.
    A single reward gives 0."""
    n = len(rewards)
    return [n / max(1, n - 1) * centred for centred in group_centred(rewards)]


def no_baseline(rewards: Sequence[float]) -> list[float]:
    """r as it is; `batch_normalised` takes the batch's mean off."""
    return list(rewards)


GROUP_BASELINE: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": group_normalised,
    "dr_grpo": group_centred,
    "dapo": group_normalised,
    "rloo": leave_one_out,
    "reinforce_pp": no_baseline,
    "reinforce_pp_baseline": group_centred,
    "gspo": group_normalised,
    "cispo": group_normalised,
}
OVER_THE_BATCH = ("reinforce_pp", "reinforce_pp_baseline")  # normalised over the batch's tokens


# ---------------------------------------------------------------- over a batch


def advantages(groups: Sequence[Group], config: TrainConfig, max_new_tokens: int) -> TokenValues:
    """The advantage of every token of the batch's valid samples; failed ones are in no statistics.
    Not for loss "ppo"."""
    result: TokenValues = {}
    for group in groups:
        samples = [sample for sample in group.samples if sample.valid]
        kl = [kl_penalties(sample, config) for sample in samples]
        rewards = [shaped_reward(sample, config, max_new_tokens) for sample in samples]
        assert all(map(math.isfinite, rewards)), f"rewards {rewards} are not finite"
        by_token = config.loss in OVER_THE_BATCH
        if not by_token:  # the KL of the whole sample is taken off its reward
            rewards = [r - float(penalty.sum()) for r, penalty in zip(rewards, kl, strict=True)]
        scalars = GROUP_BASELINE[config.loss](rewards)
        for sample, scalar, penalty in zip(samples, scalars, kl, strict=True):
            still_to_come = to_go(penalty) if by_token else 0.0
            result[sample.sample_id] = np.full(len(penalty), scalar) - still_to_come
    return batch_normalised(result) if config.loss in OVER_THE_BATCH else result


def batch_normalised(values: TokenValues) -> TokenValues:
    """(A - mean) / (std + 1e-6) over all tokens of the batch, as REINFORCE++ (arXiv 2501.03262) and
    PPO do. Equal values give 0 for all."""
    flat = np.concatenate([*values.values()] or [np.zeros(1)])
    if (flat == flat[0]).all():
        return {sample_id: np.zeros_like(own) for sample_id, own in values.items()}
    mean, std = flat.mean(), flat.std()
    return {sample_id: (own - mean) / (std + STD_EPS) for sample_id, own in values.items()}


def shaped_reward(sample: Sample, config: TrainConfig, max_new_tokens: int) -> float:
    """The reward less DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): it rises from 0 to
    `overlong_penalty` over the last `overlong_buffer_tokens` before `max_new_tokens`."""
    assert sample.reward is not None
    buffer = config.overlong_buffer_tokens
    if buffer == 0:
        return sample.reward
    over = len(sample.token_ids) - (max_new_tokens - buffer)
    return sample.reward - config.overlong_penalty * max(0, over) / buffer


def kl_penalties(sample: Sample, config: TrainConfig) -> np.ndarray:
    """With `kl_in_reward`: kl_coef (b - q) for each token, b the behaviour and q the reference's
    log-prob; else 0. float64 [tokens]."""
    if config.kl_coef == 0 or not config.kl_in_reward:
        return np.zeros(len(sample.token_ids))
    assert sample.ref_logprobs is not None, f"sample {sample.sample_id} has no reference log-probs"
    return config.kl_coef * (np.array(sample.logprobs) - np.array(sample.ref_logprobs))


def to_go(values: np.ndarray) -> np.ndarray:
    """Sum from each token to the last."""
    return np.cumsum(values[::-1])[::-1]


# ---------------------------------------------------------------- views


def rewards_vary(rewards: Sequence[float]) -> bool:
    return any(reward != rewards[0] for reward in rewards)


def valid_rewards(group: Group) -> list[float]:
    """Rewards of the samples that count, in sample order."""
    return [sample.reward for sample in group.samples if sample.valid and sample.reward is not None]


def record_advantages(groups: Sequence[Group], values: TokenValues) -> None:
    """Sets `advantage` of every sample to the mean over its tokens; None when it has failed."""
    for sample in (sample for group in groups for sample in group.samples):
        sample.advantage = float(values[sample.sample_id].mean()) if sample.valid else None
