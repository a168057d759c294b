"""Estimators of KL(current || reference) from the sampled tokens alone.

Owns: the value of each estimator and what its gradient is. Does not own: the reference's log-probs
(`train.score`), the coefficient, where the term goes (`loss` adds it, `advantage` takes it off
rewards).

With l the current and q the reference's log-prob of a sampled token, and x the other tokens it
could have been, the gradient wanted is that of E_x[l - q], which is E_x[(l - q) grad l]:

    k1           value l - q, unbiased. Its own gradient, grad l, says nothing of q (its mean is 0),
                 so it gets the score function's: (l - q) grad l.
    k2           (l - q)^2 / 2, biased in value, but its gradient is the one wanted.
    k3           e^(q - l) - (q - l) - 1, unbiased and never negative; differentiated as it stands,
                 as GRPO does (arXiv 2402.03300, eq. 4): (1 - e^(q - l)) grad l.
    k3_unbiased  r k3 with r = e^(l - b), b the behaviour log-prob, differentiated through r as
                 well: the wanted gradient, for stale tokens too (DeepSeek-V3.2, arXiv
                 2512.02556).

k1, k2, k3: http://joschu.net/blog/kl-approx.html; their gradients as losses: arXiv 2506.09477.
"""

from __future__ import annotations

from torch import Tensor


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, behaviour: Tensor, estimator: str
) -> Tensor:
    """Each token's term, all float32 [n], nats; differentiable in `logprobs`."""
    gap = logprobs - ref_logprobs
    match estimator:
        case "k1":
            score = gap.detach()
            return score + score * (logprobs - logprobs.detach())
        case "k2":
            return gap.square() / 2
        case "k3":
            return _k3(gap)
        case "k3_unbiased":
            return (logprobs - behaviour).exp() * _k3(gap)
    raise AssertionError(f"no such estimator: {estimator}")


def _k3(gap: Tensor) -> Tensor:
    return (-gap).exp() + gap - 1
