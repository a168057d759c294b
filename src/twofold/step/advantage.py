"""Advantages of a group's samples from their rewards.

Owns: the group statistics. Does not own: where rewards come from (`reward`), which groups make a
batch (`sched`). Plain Python: importable without torch.
"""

from __future__ import annotations

import math
import statistics

from twofold.types import Group

STD_EPS = 1e-6  # rewards that differ by rounding only get no advantage of size 1


def group_advantages(rewards: list[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) with the sample standard deviation (n - 1), as GRPO does
    (arXiv 2402.03300, section 4.1.2). Equal rewards, or a single one, give 0 for all."""
    assert all(math.isfinite(reward) for reward in rewards), f"rewards {rewards} are not finite"
    if not rewards_vary(rewards):
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + STD_EPS) for reward in rewards]


def rewards_vary(rewards: list[float]) -> bool:
    return any(reward != rewards[0] for reward in rewards)


def valid_rewards(group: Group) -> list[float]:
    """Rewards of the samples that count, in sample order."""
    return [sample.reward for sample in group.samples if sample.valid and sample.reward is not None]


def set_advantages(group: Group) -> None:
    """Sets `advantage` of every sample: failed ones are left out of the statistics and get None."""
    advantages = iter(group_advantages(valid_rewards(group)))
    for sample in group.samples:
        sample.advantage = next(advantages) if sample.valid else None
