"""Policy losses on flat per-token tensors.

Owns: ratio and its level, clip, denominators, where the KL term goes.
Does not own: log-probs (`logprob`), advantages (`advantage`, `critic`), the importance weights for
stale tokens (`correction`), the KL estimators (`kl`), packing (`pack`).

For a token with log-prob l under the current weights, behaviour log-prob b, proximal log-prob p
(under the weights that the step begins with), advantage A, weight w:

    r = exp(l - b), or exp(l - p) with a correction, whose importance weight c multiplies the
        objective; at the loss's level: of the token, or for all tokens of a sample alike the
        geometric mean (GSPO) or the product (RLOO) of their ratios
    objective  c min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     all but CISPO
               c sg(min(r, 1 + clip_high)) A l                        CISPO
    loss = sum of w (kl_coef KL - objective)

PPO's clipped objective is arXiv 1707.06347, the two bounds DAPO's (arXiv 2503.14476). Each loss is
a choice of advantage, level and denominator; docs/losses.md has the table with the papers.

w holds the denominator of the whole update (`DENOMINATORS`), so the losses of any split into
micro-batches add up to the same. b and l are taken before truncation (top-k, top-p, min-p).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.config import TrainConfig
from twofold.step.correction import importance_weights, sample_sums, spread
from twofold.step.kl import kl_estimate

LEVELS = {"gspo": "mean", "rloo": "sum"}
"""Over what the ratio is taken; losses that are not here take it for each token."""


class Totals(NamedTuple):
    """Of one update. Failed samples are in neither; samples masked for being truncated are not
    in `n_tokens`."""

    n_samples: int
    n_tokens: int
    max_new_tokens: int


def _mean_of_samples(totals: Totals, length: int) -> float:
    return 1 / (totals.n_samples * length)


def _mean_of_tokens(totals: Totals, length: int) -> float:
    return 1 / totals.n_tokens


def _constant(totals: Totals, length: int) -> float:
    return 1 / (totals.n_samples * totals.max_new_tokens)


DENOMINATORS: dict[str, Callable[[Totals, int], float]] = {
    "grpo": _mean_of_samples,
    "dr_grpo": _constant,
    "dapo": _mean_of_tokens,
    "rloo": _mean_of_samples,  # of a value that is the sample's, see `ratio_logs`
    "reinforce_pp": _mean_of_tokens,
    "reinforce_pp_baseline": _mean_of_tokens,
    "gspo": _mean_of_samples,
    "cispo": _mean_of_tokens,
    "ppo": _mean_of_tokens,
}
"""The weight of each token of a sample of `length` tokens."""


@dataclass(frozen=True)
class Columns:
    """What the loss needs of each token beside its log-prob: float32 [n tokens], tokens of a sample
    contiguous."""

    lengths: Tensor  # int64 [n samples]: tokens of each, in order
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    proximal: Tensor | None  # None: the update is the step's first, so it is l without gradient
    ref_logprobs: Tensor | None


@dataclass(frozen=True)
class TokenStats:
    """For the metrics, without gradient: float32 [n] each."""

    ratio: Tensor  # exp(l - b) of the token
    bound: Tensor  # 1 where the clip or a bound of the importance weight bound, else 0
    kl: Tensor  # the estimator's value; 0 without a reference


def policy_losses(
    logprobs: Tensor, columns: Columns, config: TrainConfig
) -> tuple[Tensor, TokenStats]:
    """logprobs float32 [n tokens] in nats -> each token's share of the update's loss, float32 [n]
    (their sum is the loss)."""
    current = logprobs.detach()
    proximal = current if columns.proximal is None else columns.proximal
    anchor = columns.behaviour if config.correction == "none" else proximal
    level = LEVELS.get(config.loss, "token")
    ratio = ratio_logs(logprobs, anchor, columns.lengths, level).exp()
    if config.loss == "cispo":
        objective, bound = cispo_objective(logprobs, ratio, columns.advantages, config)
    else:
        objective, bound = clipped_objective(ratio, columns.advantages, config)
    if config.correction != "none":
        importance, out = importance_weights(proximal, columns.behaviour, columns.lengths, config)
        if level != "token":  # the objective is the sample's, so it has one weight: their mean
            means = sample_sums(importance, columns.lengths) / columns.lengths
            importance = spread(means, columns.lengths, len(importance))
        objective = importance * objective
        bound = torch.maximum(bound, out)
    losses = -objective
    kl = torch.zeros_like(current)
    if columns.ref_logprobs is not None:
        kl = kl_estimate(logprobs, columns.ref_logprobs, columns.behaviour, config.kl_estimator)
        if not config.kl_in_reward:
            losses = losses + config.kl_coef * kl
    behaviour_ratio = (current - columns.behaviour).exp()
    return columns.weights * losses, TokenStats(behaviour_ratio, bound, kl.detach())


def ratio_logs(logprobs: Tensor, anchor: Tensor, lengths: Tensor, level: str) -> Tensor:
    """log of each token's ratio at a level, float32 [n tokens].

    For "mean" and "sum" it has the sample's value at every token, but the gradient of its own token
    alone (times the sample's length for "sum"). Tokens of a sample share their advantage, so the
    gradient of their mean is that of the sample's objective (GSPO, arXiv 2507.18071, section 4.3),
    and no gradient has to cross from token to token.
    """
    gap = logprobs - anchor
    if level == "token":
        return gap
    slope = gap - gap.detach()  # 0, with the gradient of the log-prob
    sums, n = sample_sums(gap.detach(), lengths), len(gap)
    if level == "sum":
        return spread(sums, lengths, n) + spread(lengths, lengths, n) * slope
    return spread(sums / lengths, lengths, n) + slope


def clipped_objective(
    ratio: Tensor, advantages: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """PPO's: no gain from moving further than the clip allows. -> objective, bound [n]"""
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return torch.minimum(surrogate, clipped), (clipped < surrogate).float()


def cispo_objective(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE whose importance weight is clipped from above, so that every token keeps a gradient
    (MiniMax-M1, arXiv 2506.13585; there is no lower bound). -> objective, bound [n]"""
    ratio = ratio.detach()
    weight = ratio.clamp(max=1 + config.clip_high)
    return weight * advantages * logprobs, (weight < ratio).float()
