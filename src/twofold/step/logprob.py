"""The one definition of a token's log-probability, for sampling and for training.

Owns: the log-prob of a target at a temperature, and logits with log-probs in chunks of rows with a
gradient; the plain torch twins of `model.logits_cpu`'s compiled kernels. Does not own: truncation
(`sampling`), what is made of log-probs (`loss`).

With m the largest logit x of a row and T the temperature, the log-prob of token y is
(x_y - m) / T - log(sum of exp((x - m) / T)): differences first, so that a division rounds little.

A row's result does not depend, bit for bit, on which other rows are computed with it, so what the
sampler recorded is what training finds again. On a CPU this holds for float32 from 16 rows on and
for bfloat16 always; hence `padded_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.model import cpu_kernels, logits_cpu

# Training computes multiples of this many rows: oneDNN keeps what it compiles for each number of
# rows (0.6 MB a matmul in bfloat16), scattered over the heap, which then grows at every step.
ROW_MULTIPLE = 64
CHUNK_BYTES = 50_000_000  # of a chunk's logits: 512 rows for a vocabulary of 49,152 in bfloat16


def padded_rows(n: int) -> int:
    """The number of rows to compute when `n` are wanted: a multiple of 8, at least 16."""
    return max(16, -(-n // 8) * 8)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [n, vocabulary] of any dtype (`Transformer.logits`), targets int64 [n] -> float32 [n],
    nats.

    n must be above 1: torch may split the reduction of a single row over threads, and then its
    rounding differs.
    """
    if cpu_kernels.used_for(logits):
        return logits_cpu.logprobs(logits, targets, temperature)
    return _read(logits, targets, temperature)[0]


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` int64 [n] after hidden [n, width], and the entropy of each row's whole
    distribution: (float32 [n], float32 [n]), both in nats at `temperature`.

    The log-probs have a gradient in `hidden` and `head_weight`; the entropy is a metric and has
    none. No tensor of more than max(chunk_rows, 64) x vocabulary exists at any time (0: what
    CHUNK_BYTES hold): the backward pass computes the logits of each chunk again, and adds up the
    head's gradient in float32.
    """
    n_blocks = CHUNK_BYTES // head_weight[:, 0].nbytes // ROW_MULTIPLE
    chunk_rows = chunk_rows or max(1, n_blocks) * ROW_MULTIPLE
    n, extra = len(hidden), -len(hidden) % ROW_MULTIPLE
    hidden, targets = F.pad(hidden, (0, 0, 0, extra)), F.pad(targets, (0, extra))
    results = _ChunkedLogprobs.apply(hidden, head_weight, targets, temperature, chunk_rows)
    return results[0][:n], results[1][:n]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        buffer = _logits_buffer(hidden, head_weight, chunk_rows)
        parts = []
        for chunk, chunk_targets in zip(
            hidden.split(chunk_rows), targets.split(chunk_rows), strict=True
        ):
            n = len(chunk)
            extra = padded_rows(n) - n
            if extra:
                chunk = F.pad(chunk, (0, 0, 0, extra))
            logits = torch.mm(chunk, head_weight.T, out=buffer[: n + extra])
            parts.append(_read_chunk(logits[:n], chunk_targets, temperature))
        logprobs, entropy, largest, inverse_sum = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head_weight, targets, largest, inverse_sum)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, *columns = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        columns.append(grads[0].contiguous())
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        buffer = _logits_buffer(hidden, head_weight, ctx.chunk_rows)
        for start in range(0, len(hidden), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            chunk = hidden[rows]
            logits = torch.mm(chunk, head_weight.T, out=buffer[: len(chunk)])
            grad_logits = _gradient_(logits, *(x[rows] for x in columns), ctx.temperature)
            if grad_hidden is not None:
                torch.mm(grad_logits, head_weight, out=grad_hidden[rows])
            if need_weight:
                part = grad_logits.T @ chunk
                grad_weight = part if grad_weight is None else grad_weight.float().add_(part)
        if grad_weight is not None:
            grad_weight = grad_weight.to(head_weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _logits_buffer(hidden: Tensor, head_weight: Tensor, chunk_rows: int) -> Tensor:
    # one for all chunks: fresh pages cost as much as a pass over them
    n = padded_rows(min(len(hidden), chunk_rows))
    return hidden.new_empty(n, len(head_weight))


def _read_chunk(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    if cpu_kernels.used_for(logits):
        return logits_cpu.read(logits, targets, temperature)
    return _read(logits, targets, temperature)


def _read(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Plain twin of `logits_cpu.read`: log-probs, entropy, largest logit, 1 / sum of weights."""
    wide = logits.float()
    largest = wide.amax(-1)
    gaps = (wide - largest[:, None]).div_(temperature)
    weights = gaps.exp()
    total = weights.sum(-1)
    logprobs = gaps.gather(-1, targets[:, None])[:, 0] - total.log()
    # -sum p log p, of two terms that are both positive: nothing cancels
    products = weights.mul_(gaps.clamp_(min=-1000.0))
    return logprobs, total.log() - products.sum(-1) / total, largest, 1 / total


def _gradient_(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    inverse_sum: Tensor,
    grad: Tensor,
    temperature: float,
) -> Tensor:
    """The gradient in the logits, from `grad` in the log-probs, in the dtype of the logits; may be
    written over them. d log p(y) / d z = onehot(y) - softmax(z), with z = logits / temperature."""
    if cpu_kernels.used_for(logits):
        return logits_cpu.gradient_(logits, targets, largest, inverse_sum, grad, temperature)
    scale = grad / temperature
    probs = (logits.float() - largest[:, None]).div_(temperature).exp_().mul_(inverse_sum[:, None])
    grad_logits = probs.mul_(-scale[:, None])
    grad_logits.scatter_add_(1, targets[:, None], scale[:, None])
    return grad_logits.to(logits.dtype)
