"""The KL estimators: right on average, and their gradients are what their sources say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twofold.step.kl import kl_estimate

SEED = 5


def distributions(n: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the current policy, log-probs of the reference and of an older policy."""
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    logits = [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3)]
    return logits[0].requires_grad_(), logits[1].log_softmax(0), logits[2].log_softmax(0)


def exact(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """KL(current || reference) over the whole distribution, and its gradient."""
    current = logits.log_softmax(0)
    value = (current.exp() * (current - reference)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def expected(estimator: str, stale: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean of the estimator's value and gradient over tokens that the current policy sampled, or
    an older one (`stale`); and the exact ones."""
    logits, reference, older = distributions()
    current = logits.log_softmax(0)
    sampler = older if stale else current.detach()
    terms = kl_estimate(current, reference, sampler, estimator)
    mean = (sampler.exp() * terms).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.detach(), gradient, *exact(logits, reference)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_unbiased"])
def test_the_value_is_unbiased(estimator: str) -> None:
    value, _, exact_value, _ = expected(estimator, stale=False)
    torch.testing.assert_close(value, exact_value)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3_unbiased"])
def test_the_gradient_is_that_of_the_kl(estimator: str) -> None:
    _, gradient, _, exact_gradient = expected(estimator, stale=False)
    torch.testing.assert_close(gradient, exact_gradient)


def test_only_k3_unbiased_is_right_for_stale_tokens() -> None:
    for estimator in ("k1", "k2", "k3", "k3_unbiased"):
        value, gradient, exact_value, exact_gradient = expected(estimator, stale=True)
        right = torch.allclose(value, exact_value) and torch.allclose(gradient, exact_gradient)
        assert right == (estimator == "k3_unbiased"), estimator


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.7, 0.7),
        ("k2", 0.7**2 / 2, 0.7),
        ("k3", math.exp(-0.7) + 0.7 - 1, 1 - math.exp(-0.7)),
    ],
)
def test_one_token(estimator: str, value: float, slope: float) -> None:
    """The current log-prob is 0.7 above the reference's."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    term = kl_estimate(logprob, torch.tensor([-1.7]), torch.tensor([-1.1]), estimator)
    (gradient,) = torch.autograd.grad(term.sum(), logprob)
    assert (term.item(), gradient.item()) == pytest.approx((value, slope), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_unbiased"])
def test_the_reference_itself_has_neither_value_nor_gradient(estimator: str) -> None:
    logprobs = torch.tensor([-1.0, -0.2], requires_grad=True)
    terms = kl_estimate(logprobs, logprobs.detach(), torch.tensor([-0.5, -0.5]), estimator)
    (gradient,) = torch.autograd.grad(terms.sum(), logprobs)
    assert terms.tolist() == gradient.tolist() == [0.0, 0.0]
