"""The numbers that a training step reports.

Owns: what is said of a batch before it is trained, and of its tokens once they are. Does not own:
the losses and log-probs they are made of (`loss`, `train`), who shows them.
"""

from __future__ import annotations

import statistics

import numpy as np

from twofold.step.advantage import rewards_vary, valid_rewards
from twofold.types import Group

TokenTable = np.ndarray
"""float32 [7, m tokens]: loss, entropy, kl, bound, ratio, gap, fresh (see `token_metrics`)."""


def token_metrics(table: TokenTable, n_updates: int, with_kl: bool) -> dict[str, float]:
    """Means over the tokens that were computed (loss: the mean over the updates). clip_fraction:
    share of them whose clip or importance bound bound; ratio: current over behaviour probability,
    of stale tokens too; logprob_gap: |log-prob in training - behaviour| of the tokens of the
    version being trained."""
    loss, entropy, kl, bound, ratio, gap, fresh = table.astype(np.float64)
    metrics = {
        "loss": loss.sum() / n_updates,
        "entropy": entropy.mean(),
        "clip_fraction": bound.mean(),
        "ratio/mean": ratio.mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
    }
    if with_kl:
        metrics["kl"] = kl.mean()
    if fresh.any():
        metrics["logprob_gap/mean"] = gap[fresh > 0].mean()
        metrics["logprob_gap/max"] = gap[fresh > 0].max()
    return {name: float(value) for name, value in metrics.items()}


def batch_metrics(updates: list[list[Group]], version: int) -> dict[str, float]:
    """What the batch says before it is trained; `updates` holds the groups of each update, the
    first of which trains `version`. Rewards, lengths and staleness are over valid samples and left
    out when there is none."""
    groups = list({group.group_id: group for update in updates for group in update}.values())
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in valid_rewards(group)]
    no_variance = [not rewards_vary(valid_rewards(group)) for group in groups]
    metrics = {
        "groups/no_variance": float(sum(no_variance)),
        "samples/failed": float(len(samples) - len(rewards)),
    }
    if not rewards:
        return metrics
    valid = [sample for sample in samples if sample.valid]
    lengths = [len(sample.token_ids) for sample in valid]
    staleness = np.concatenate(
        [
            version + i - np.array(sample.versions)
            for i, update in enumerate(updates)
            for group in update
            for sample in group.samples
            if sample.valid
        ]
    )
    return metrics | {
        "reward/mean": statistics.mean(rewards),  # exact: a sum of floats may overflow
        "reward/std": statistics.pstdev(rewards),
        "pass_rate": sum(reward >= 1 for reward in rewards) / len(rewards),
        "length/mean": statistics.fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": sum(s.finish_reason == "length" for s in valid) / len(valid),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
