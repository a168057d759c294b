"""The one definition of a token's log-probability, for sampling and for training.

Owns: logits scaled by temperature, the log-prob of a target, and both in chunks of rows with a
gradient. Does not own: truncation (`sampling`), what is made of log-probs (`loss`).

A row's result does not depend, bit for bit, on which other rows are computed with it, so what the
sampler recorded is what training finds again. On a CPU this holds for float32 from 16 rows on and
for bfloat16 always; hence `padded_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 256  # 50 MB of float32 logits for a vocabulary of 49,152


def padded_rows(n: int) -> int:
    """The number of rows to compute when `n` are wanted: a multiple of 8, at least 16."""
    return max(16, -(-n // 8) * 8)


def scaled_logits(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    """hidden [n, width], head_weight [vocabulary, width], both in the model's dtype
    -> logits / temperature, float32 [n, vocabulary]. The product is made in the model's dtype."""
    logits = F.linear(hidden, head_weight).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """logits float32 [n, vocabulary] (see `scaled_logits`), targets int64 [n] -> float32 [n], nats.

    n must be above 1: the reduction of a single row may be split over threads, and then its
    rounding differs.
    """
    return _target_logits(logits, targets) - logits.logsumexp(-1)


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` int64 [n] after hidden [n, width], and the entropy of each row's whole
    distribution: (float32 [n], float32 [n]), both in nats at `temperature`.

    The log-probs have a gradient in `hidden` and `head_weight`; the entropy is a metric and has
    none. No tensor of more than max(chunk_rows, 16) x vocabulary exists at any time: the backward
    pass computes the logits of each chunk again, and adds up the head's gradient in float32.
    """
    return _ChunkedLogprobs.apply(hidden, head_weight, targets, temperature, chunk_rows)


def _target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """d log p(y) / d z = onehot(y) - softmax(z), with z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _chunk_forward(chunk, head_weight, chunk_targets, temperature)
            for chunk, chunk_targets in zip(
                hidden.split(chunk_rows), targets.split(chunk_rows), strict=True
            )
        ]
        logprobs, logsumexp, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head_weight, targets, logsumexp)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, logsumexp = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        scale = grads[0] / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(head_weight, dtype=torch.float32) if need_weight else None
        for start in range(0, len(hidden), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            probs = scaled_logits(hidden[rows], head_weight, ctx.temperature)
            probs = probs.sub_(logsumexp[rows, None]).exp_()
            grad_logits = probs.mul_(-scale[rows, None])
            grad_logits.scatter_add_(1, targets[rows, None], scale[rows, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, head_weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        weight_result = None if grad_weight is None else grad_weight.to(head_weight.dtype)
        return grad_hidden, weight_result, None, None, None


def _chunk_forward(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> log-probs, logsumexp, entropy: float32 [n] each."""
    n = len(hidden)
    extra = padded_rows(n) - n
    logits = scaled_logits(F.pad(hidden, (0, 0, 0, extra)), head_weight, temperature)
    logsumexp = logits.logsumexp(-1)
    # token_logprobs, keeping the logsumexp for the backward pass
    logprobs = _target_logits(logits, F.pad(targets, (0, extra))) - logsumexp
    # logsumexp - sum of p z would cancel for a peaked distribution
    log_probs = logits.sub_(logsumexp[:, None])
    entropy = -log_probs.exp().mul_(log_probs).sum(-1)
    return logprobs[:n], logsumexp[:n], entropy[:n]
