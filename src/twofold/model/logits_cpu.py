"""What is read out of logits by compiled kernels: calls of `logits_cpu.cpp`.

Owns: the calls. Does not own: the arithmetic (the C++ file), the product that makes the logits,
what the numbers mean, their plain twins and when to use these (`step.logprob`, `step.sampling`).
Nothing here has a gradient. logits are float32 or bfloat16 [n, vocabulary], before the division by
the temperature; a row's results depend on that row alone, to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from twofold.model import cpu_kernels

_P, _I = c_void_p, c_int64
_ARGUMENTS = {
    "read_logits": [_I, _I, c_double, *[_P] * 7],
    "logit_gradient": [_I, _I, c_double, *[_P] * 5],
}


@functools.cache
def _kernel(name: str) -> dict[torch.dtype, Callable[..., int]]:
    return cpu_kernels.for_rows(name, _ARGUMENTS[name])


def logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Of token_ids int64 [n]: float32 [n], nats."""
    (out,) = _columns(logits, 1)
    _read(logits, temperature, None, _checked(token_ids, logits), out, None, None, None)
    return out


def read(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-probs of token_ids int64 [n], the entropy of each row, and what `gradient_` needs: the
    largest logit, and 1 / the sum of exp((logit - largest) / temperature). float32 [n] each."""
    columns = _columns(logits, 4)
    _read(logits, temperature, None, _checked(token_ids, logits), *columns)
    return tuple(columns)


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF of uniforms float64 [n] in (0, 1): ids int64 [n] and their
    log-probs float32 [n]. A token of probability 0 is never drawn."""
    assert uniforms.dtype == torch.float64 and uniforms.shape == logits.shape[:1]
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    (out,) = _columns(logits, 1)
    _read(logits, temperature, uniforms.contiguous(), token_ids, out, None, None, None)
    return token_ids, out


def gradient_(
    logits: Tensor,
    token_ids: Tensor,
    largest: Tensor,
    inverse_sum: Tensor,
    scale: Tensor,
    temperature: float,
) -> Tensor:
    """Writes scale (float32 [n]) times the gradient of each token's log-prob over its logits."""
    assert logits.is_contiguous()
    columns = [_checked(token_ids, logits), largest, inverse_sum, scale]
    assert all(c.is_contiguous() and c.shape == logits.shape[:1] for c in columns)
    assert all(c.dtype == torch.float32 for c in columns[1:])
    pointers = [column.data_ptr() for column in columns]
    _kernel("logit_gradient")[logits.dtype](
        *logits.shape, temperature, logits.data_ptr(), *pointers
    )
    return logits


def _columns(logits: Tensor, n: int) -> list[Tensor]:
    return [torch.empty(len(logits), dtype=torch.float32) for _ in range(n)]


def _checked(token_ids: Tensor, logits: Tensor) -> Tensor:
    assert token_ids.dtype == torch.int64 and token_ids.shape == logits.shape[:1]
    in_range = (token_ids >= 0) & (token_ids < logits.shape[1])
    assert in_range.all(), "a token is outside the vocabulary"
    return token_ids.contiguous()


def _read(
    logits: Tensor,
    temperature: float,
    uniforms: Tensor | None,
    token_ids: Tensor,
    *columns: Tensor | None,
) -> None:
    logits = logits.contiguous()
    optional = [None if x is None else x.data_ptr() for x in (uniforms, token_ids, *columns)]
    _kernel("read_logits")[logits.dtype](*logits.shape, temperature, logits.data_ptr(), *optional)
