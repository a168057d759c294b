"""The policy losses: where clips and bounds bind, ratio levels, what the KL term adds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from twofold.config import TrainConfig
from twofold.step.loss import Columns, TokenStats, policy_losses


def loss_and_gradient(
    ratio: float, advantage: float, reference_gap: float | None = None, **options: Any
) -> tuple[float, float, TokenStats]:
    """One token whose current probability is `ratio` x its behaviour probability, weight 1.
    `reference_gap` is reference log-prob minus current log-prob."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    behaviour = logprob.detach() - math.log(ratio)
    reference = None if reference_gap is None else logprob.detach() + reference_gap
    columns = Columns(
        lengths=torch.tensor([1]),
        behaviour=behaviour,
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1),
        proximal=None,
        ref_logprobs=reference,
    )
    options = {"clip_low": 0.2, "clip_high": 0.3} | options
    losses, stats = policy_losses(logprob, columns, TrainConfig(**options))
    (gradient,) = torch.autograd.grad(losses.sum(), logprob)
    return losses.item(), gradient.item(), stats


@pytest.mark.parametrize(
    ("ratio", "advantage", "binds"),
    [
        (1.31, 2.0, True),
        (1.29, 2.0, False),
        (0.5, 2.0, False),
        (0.79, -2.0, True),
        (0.81, -2.0, False),
        (1.5, -2.0, False),
    ],
)
def test_clip_binds_only_where_the_objective_would_gain(
    ratio: float, advantage: float, binds: bool
) -> None:
    loss, gradient, stats = loss_and_gradient(ratio, advantage)
    bounded = min(max(ratio, 0.8), 1.3) if binds else ratio
    assert loss == pytest.approx(-bounded * advantage, rel=1e-5)
    assert gradient == (0.0 if binds else pytest.approx(-ratio * advantage, rel=1e-5))
    assert stats.bound.item() == binds
    assert stats.ratio.item() == pytest.approx(ratio, rel=1e-5)


def test_zero_advantage_gives_zero_gradient() -> None:
    assert loss_and_gradient(1.7, 0.0)[1] == 0.0
    assert loss_and_gradient(1.7, 0.0, correction="token_truncated")[1] == 0.0


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.9, 1.9), (2.1, 2.0), (50.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_truncated_correction_weighs_by_the_capped_ratio(
    ratio: float, weight: float, advantage: float
) -> None:
    loss, gradient, stats = loss_and_gradient(ratio, advantage, correction="token_truncated")
    assert loss == pytest.approx(-weight * advantage, rel=1e-5)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
    assert stats.bound.item() == (ratio > 2.0)


def test_kl_is_schulmans_k3_with_its_own_gradient() -> None:
    gap = 0.7
    loss, gradient, stats = loss_and_gradient(1.0, 0.0, reference_gap=gap, kl_coef=0.5)
    assert stats.kl.item() == pytest.approx(math.exp(gap) - gap - 1, rel=1e-6)
    assert loss == pytest.approx(0.5 * stats.kl.item(), rel=1e-6)
    assert gradient == pytest.approx(0.5 * (1 - math.exp(gap)), rel=1e-6)
    assert loss_and_gradient(1.0, 0.0, reference_gap=0.0, kl_coef=0.5)[:2] == (0.0, 0.0)
