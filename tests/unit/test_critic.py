"""The critic: advantages from values, its loss, its head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twofold.config import TrainConfig
from twofold.step.critic import (
    ValueHead,
    critic_advantages,
    explained_variance,
    gae,
    value_losses,
)
from twofold.types import Group, Prompt, Sample, SampleId

VALUES = np.array([0.4, 0.1, 0.7])
REWARDS = np.array([0.0, 0.0, 1.0])


def test_gae_of_lambda_1_is_the_return_less_the_value() -> None:
    advantages, returns = gae(REWARDS, VALUES, gamma=1.0, gae_lambda=1.0)
    assert advantages == pytest.approx([0.6, 0.9, 0.3])
    assert returns == pytest.approx([1.0, 1.0, 1.0])


def test_gae_of_lambda_0_looks_one_token_ahead() -> None:
    advantages, _ = gae(REWARDS, VALUES, gamma=0.9, gae_lambda=0.0)
    assert advantages == pytest.approx([0.9 * 0.1 - 0.4, 0.9 * 0.7 - 0.1, 1 - 0.7])


def test_gae_between_is_the_discounted_sum_of_the_deltas() -> None:
    deltas, _ = gae(REWARDS, VALUES, gamma=0.9, gae_lambda=0.0)
    advantages, returns = gae(REWARDS, VALUES, gamma=0.9, gae_lambda=0.8)
    c = 0.9 * 0.8
    assert advantages[0] == pytest.approx(deltas[0] + c * deltas[1] + c * c * deltas[2])
    assert returns == pytest.approx(advantages + VALUES)


def group_of(rewards: list[float | None], n_tokens: list[int]) -> Group:
    samples = [
        Sample(SampleId(0, i), [7] * n, [-1.0] * n, reward=reward, ref_logprobs=[-1.5] * n)
        for i, (reward, n) in enumerate(zip(rewards, n_tokens, strict=True))
    ]
    for sample in samples:
        sample.failed = "timed out" if sample.reward is None else None
    return Group(0, Prompt(""), [1], 0, 0, samples)


def test_advantages_are_normalised_over_the_tokens_of_valid_samples() -> None:
    group = group_of([1.0, None, 0.0], [1, 9, 3])
    values = {s.sample_id: np.zeros(len(s.token_ids)) for s in group.samples if s.valid}
    config = TrainConfig(loss="ppo", gae_lambda=1.0)
    advantages, returns = critic_advantages([group], values, config, max_new_tokens=9)
    assert list(advantages) == [SampleId(0, 0), SampleId(0, 2)]
    assert returns[SampleId(0, 0)].tolist() == [1.0]
    flat = np.concatenate(list(advantages.values()))
    assert flat.mean() == pytest.approx(0) and flat.std() == pytest.approx(1, rel=1e-5)
    assert flat[0] > 0 > flat[1] == flat[2] == flat[3]


def test_kl_comes_off_the_reward_of_each_token() -> None:
    group = group_of([1.0, 0.0], [2, 2])
    values = {s.sample_id: np.zeros(2) for s in group.samples}
    config = TrainConfig(
        loss="ppo", gae_lambda=1.0, kl_coef=0.1, kl_in_reward=True, kl_estimator="k1"
    )
    _, returns = critic_advantages([group], values, config, max_new_tokens=9)
    assert returns[SampleId(0, 0)] == pytest.approx([0.9, 0.95])  # 0.1 x (-1.0 + 1.5) a token


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (0.5, 0.0, 0.125, -0.5),  # half of (0.5 - 1) squared
        (0.5, 0.2, 0.32, 0.0),  # held at 0.2, which is further off: no gradient
        (0.1, 0.2, 0.405, -0.9),
        (-0.5, 0.2, 1.125, -1.5),  # moved away from the return: the larger error counts
    ],
)
def test_value_loss(value: float, clip: float, loss: float, slope: float) -> None:
    """The value before the step was 0, the return is 1."""
    values = torch.tensor([value], requires_grad=True)
    losses = value_losses(values, torch.zeros(1), torch.ones(1), clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert (losses.item(), gradient.item()) == pytest.approx((loss, slope), rel=1e-5)


def test_explained_variance() -> None:
    key = SampleId(0, 0)
    returns = {key: np.array([0.0, 1.0, 2.0])}
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance({key: np.ones(3)}, returns) == 0.0
    assert explained_variance(returns, {key: np.ones(3)}) == 0.0, "nothing to explain"


def test_the_head_starts_at_zero_and_is_float32() -> None:
    head = ValueHead(8, "cpu")
    hidden = torch.randn(5, 8).bfloat16()
    assert head(hidden).tolist() == [0.0] * 5
    assert {p.dtype for p in head.parameters()} == {torch.float32}
