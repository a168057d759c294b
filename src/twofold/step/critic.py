"""The critic of PPO: what reward is still to come, said before each token.

Owns: the value head on the policy's trunk, advantages from its values, its loss. Does not own: the
trunk's forward pass and the update (`train`), the policy's loss (`loss`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.config import TrainConfig
from twofold.step.advantage import TokenValues, batch_normalised, kl_penalties, shaped_reward
from twofold.types import Group


class ValueHead(nn.Module):
    """A linear layer from the policy's last hidden state to one number, in float32. It starts at 0,
    so the first advantages are those without a critic."""

    def __init__(self, width: int, device: torch.device | str) -> None:
        super().__init__()
        options = {"dtype": torch.float32, "device": device}
        self.weight = nn.Parameter(torch.zeros(1, width, **options))
        self.bias = nn.Parameter(torch.zeros(1, **options))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] of the rows that predict n tokens -> values float32 [n]."""
        return F.linear(hidden.float(), self.weight, self.bias).squeeze(-1)


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over one completion's tokens,
    float64 [tokens] each; after the last token nothing is to come, in a truncated one neither.
    -> (advantages, returns): sum of (gamma lambda)^k delta, with delta = r + gamma V' - V; and the
    value's target, advantage + V."""
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    advantages = np.zeros_like(deltas)
    running = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + gamma * gae_lambda * running
        advantages[t] = running
    return advantages, advantages + values


def critic_advantages(
    groups: Sequence[Group], values: TokenValues, config: TrainConfig, max_new_tokens: int
) -> tuple[TokenValues, TokenValues]:
    """(advantages normalised over the batch's tokens, returns) of its valid samples. A completion's
    reward comes with its last token, the KL of `kl_in_reward` with each."""
    advantages: TokenValues = {}
    returns: TokenValues = {}
    for sample in (s for group in groups for s in group.samples if s.valid):
        rewards = -kl_penalties(sample, config)
        rewards[-1] += shaped_reward(sample, config, max_new_tokens)
        own = values[sample.sample_id]
        advantages[sample.sample_id], returns[sample.sample_id] = gae(
            rewards, own, config.gamma, config.gae_lambda
        )
    return batch_normalised(advantages), returns


def value_losses(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """(V - R)^2 / 2, or the same of V held within `clip` of its value `before` the step, whichever
    is larger, as in OpenAI's PPO (arXiv 2005.12729, section 3); clip 0: off. float32 [n] each."""
    errors = (values - returns).square()
    if clip > 0:
        near = before + (values - before).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return errors / 2


def explained_variance(values: TokenValues, returns: TokenValues) -> float:
    """1 - var(R - V) / var(R) over all tokens; 0 when the returns are all equal."""
    target = np.concatenate([returns[key] for key in values])
    error = target - np.concatenate([values[key] for key in values])
    return float(1 - error.var() / target.var()) if target.var() > 0 else 0.0
