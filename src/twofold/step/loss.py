"""The GRPO loss on flat per-token tensors.

Owns: ratio, clip, staleness correction, KL term.
Does not own: log-probs (`logprob`), advantages (`advantage`), denominators and packing (`pack`).

For a token with log-prob l under the current weights, behaviour log-prob b, advantage A, weight w:

    correction "none"       r = exp(l - b);  objective  min(r A, clip(r, 1 - low, 1 + high) A)
        PPO's clipped objective (arXiv 1707.06347) with GRPO's advantages (arXiv 2402.03300); two
        clip bounds as in DAPO (arXiv 2503.14476).
    correction "truncated"  r = exp(l - p);  objective  c min(r A, clip(r, 1 - low, 1 + high) A),
        c = min(exp(p - b), cap), without gradient
        The decoupled objective (arXiv 2110.00641, eq. 3; for stale rollouts arXiv 2505.24298), p
        the log-prob under the weights before the update, with the importance weight capped as in
        V-trace (arXiv 1802.01561). A batch gives one update here, so p is l without its gradient,
        r is exactly 1 and this clip cannot bind: the cap is what limits a stale token.

    loss = sum of w (-objective + kl_coef k3),  k3 = exp(q - l) - (q - l) - 1
        q the reference's log-prob; Schulman's k3 estimator of KL(current || reference)
        (http://joschu.net/blog/kl-approx.html), differentiated as it stands, as GRPO does.

w holds the whole step's denominator, 1 / (samples of the step x tokens of the sample), so the
losses of any split into micro-batches add up to the same step. b is taken before truncation (top-k,
top-p, min-p) and so is l.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.config import TrainConfig


@dataclass(frozen=True)
class TokenStats:
    """For the metrics, without gradient: float32 [n] each."""

    ratio: Tensor  # exp(l - b)
    bound: Tensor  # 1 where the clip ("none") or the cap ("truncated") bound, else 0
    kl: Tensor  # k3; 0 without a reference


def grpo_token_losses(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None,
    config: TrainConfig,
) -> tuple[Tensor, TokenStats]:
    """All tensors float32 [n tokens], log-probs in nats. -> each token's share of the step's loss,
    float32 [n] (their sum is the loss)."""
    behaviour_ratio = (logprobs.detach() - behaviour).exp()
    proximal = behaviour if config.correction == "none" else logprobs.detach()
    ratio = (logprobs - proximal).exp()
    surrogate = ratio * advantages
    clipped_surrogate = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    objective = torch.minimum(surrogate, clipped_surrogate)
    bound = clipped_surrogate < surrogate
    if config.correction == "truncated":
        objective = behaviour_ratio.clamp(max=config.importance_cap) * objective
        bound = behaviour_ratio > config.importance_cap
    kl = torch.zeros_like(objective)
    if ref_logprobs is not None:
        gap = ref_logprobs - logprobs
        kl = gap.exp() - gap - 1
    losses = weights * (config.kl_coef * kl - objective)
    return losses, TokenStats(behaviour_ratio, bound.float(), kl.detach())
