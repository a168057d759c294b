"""Importance weights for tokens that older weights sampled.

Owns: what a token's weight is. Does not own: the objective that it multiplies (`loss`), the
proximal log-probs (`train`).

With b the behaviour log-prob and p the proximal one, under the weights that the step begins with,
the weight is w = exp(p - b) for a token, exp(sum of p - b over the sample) for all of a sample's
tokens alike ("sequence_"), without gradient:

    none                       1, and the ratio of the objective is taken against b instead of p
    decoupled                  w of the token, uncapped: decoupled PPO (arXiv 2110.00641, eq. 3;
                               for stale rollouts AReaL, arXiv 2505.24298)
    token_truncated,           min(w, cap): truncated importance sampling, as in V-trace (arXiv
    sequence_truncated         1802.01561) and in TRL's `*_truncate`
    token_masked,              w, but 0 outside [floor, cap]: masked importance sampling, as in
    sequence_masked            IcePop (arXiv 2510.18855) and in TRL's `*_mask`
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofold.config import TrainConfig


@torch.no_grad()
def importance_weights(
    proximal: Tensor, behaviour: Tensor, lengths: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """proximal, behaviour float32 [n tokens]; lengths int64 [n samples], the tokens of each, in
    order. -> (weights, bound) float32 [n tokens]; bound is 1 where cap or floor changed a weight.
    """
    assert config.correction != "none"
    gap = proximal - behaviour
    if config.correction.startswith("sequence_"):
        gap = spread(sample_sums(gap, lengths), lengths, len(gap))
    weights = gap.exp()
    if config.correction == "decoupled":
        return weights, torch.zeros_like(weights)
    out = weights > config.importance_cap
    if config.correction.endswith("_truncated"):
        return weights.clamp(max=config.importance_cap), out.float()
    out |= weights < config.importance_floor
    return weights.masked_fill(out, 0.0), out.float()


def sample_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """values float32 [n tokens] summed over the tokens of each sample: [n samples]."""
    # unsafe: the check that the lengths add up would wait for the device
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def spread(values: Tensor, lengths: Tensor, n_tokens: int) -> Tensor:
    """values [n samples] -> [n tokens]: each sample's at all of its tokens."""
    return values.repeat_interleave(lengths, output_size=n_tokens)
