"""Importance weights for stale tokens: which bound binds where, of tokens and of samples."""

from __future__ import annotations

import math

import pytest
import torch

from twofold.config import TrainConfig
from twofold.step.correction import importance_weights, sample_sums

LENGTHS = [2, 1, 2]
RATIOS = [0.5, 3.0, 0.2, 1.9, 1.2]  # of samples: 1.5, 0.2, 2.28
BEHAVIOUR = [-1.0, -2.0, -0.5, -0.1, -3.0]


@pytest.mark.parametrize(
    ("correction", "weights", "bound"),
    [
        ("decoupled", [0.5, 3.0, 0.2, 1.9, 1.2], [0, 0, 0, 0, 0]),
        ("token_truncated", [0.5, 2.0, 0.2, 1.9, 1.2], [0, 1, 0, 0, 0]),
        ("token_masked", [0.5, 0.0, 0.0, 1.9, 1.2], [0, 1, 1, 0, 0]),
        ("sequence_truncated", [1.5, 1.5, 0.2, 2.0, 2.0], [0, 0, 0, 1, 1]),
        ("sequence_masked", [1.5, 1.5, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1]),
    ],
)
def test_weights(correction: str, weights: list[float], bound: list[int]) -> None:
    behaviour = torch.tensor(BEHAVIOUR)
    proximal = behaviour + torch.tensor([math.log(ratio) for ratio in RATIOS])
    proximal.requires_grad_()
    config = TrainConfig(correction=correction, importance_cap=2.0, importance_floor=0.3)
    found, out = importance_weights(proximal, behaviour, torch.tensor(LENGTHS), config)
    torch.testing.assert_close(found, torch.tensor(weights))
    assert out.tolist() == bound
    assert not found.requires_grad


def test_fresh_tokens_have_weight_one() -> None:
    logprobs = torch.tensor(BEHAVIOUR)
    for correction in ("decoupled", "token_masked", "sequence_truncated"):
        config = TrainConfig(correction=correction)
        weights, _ = importance_weights(logprobs, logprobs, torch.tensor(LENGTHS), config)
        assert weights.tolist() == [1.0] * 5


def test_a_ratio_beyond_all_numbers_is_bounded_or_masked() -> None:
    proximal, behaviour = torch.zeros(3), torch.full((3,), -60.0)
    for correction, weight in (("sequence_truncated", 2.0), ("sequence_masked", 0.0)):
        config = TrainConfig(correction=correction)
        weights, _ = importance_weights(proximal, behaviour, torch.tensor([3]), config)
        assert weights.tolist() == [weight] * 3


def test_sums_of_samples() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert sample_sums(values, torch.tensor(LENGTHS)).tolist() == [3.0, 4.0, 24.0]
