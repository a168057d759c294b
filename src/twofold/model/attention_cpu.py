"""The compiled twin of `attention.attend`: the autograd function around `attention_cpu.cpp`.

Owns: the call and what is kept for the gradients. Does not own: the arithmetic (the C++ file), what
rows mean and when to use this (`attention`), the library (`cpu_kernels`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twofold.model import cpu_kernels

if TYPE_CHECKING:
    from twofold.model.attention import Rows

_PADDING = 16  # head sizes are padded to a multiple of this inside the kernel


class _View(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("row", c_int64), ("head", c_int64)]


class _Call(ctypes.Structure):
    """`Call` in the C++ file, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("n_rows", "heads", "kv_heads", "head_size", "n_key_rows")),
        *((name, c_int64) for name in ("n_spans", "n_key_index", "is_bfloat16", "threads")),
        ("parallel", c_void_p),
        *((name, _View) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("spans", "key_starts", "key_index", "out", "lse")),
        ("out_grad", _View),
        *((name, c_void_p) for name in ("q_grad", "k_grad", "v_grad", "partial")),
    ]


# ------------------------------------------------------------------ calling


def attend_cpu(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """`attention.attend` on the CPU: q [n, heads, head_size]; k, v [n_key_rows, kv_heads,
    head_size], all float32 or all bfloat16 (arithmetic in fp32); returns [n, heads, head_size],
    contiguous.

    The result of a row depends, to the last bit, only on its query and its keys and values in order
    of position. Gradients in q, k and v are the same in every run with the same number of threads.
    Only where `cpu_kernels.load()` is not None.
    """
    q, k, v = (_readable(x) for x in (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, rows)
    return _forward(q, k, v, rows, None)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        out = _forward(q, k, v, rows, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows = rows
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wants_keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        return *_backward(q, k, v, ctx.rows, out, lse, _readable(out_grad), wants_keys), None


def _readable(x: Tensor) -> Tensor:
    """Any stride between rows and heads is fine (a slice of a fused projection)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(x: Tensor) -> _View:
    return _View(x.data_ptr(), x.stride(0), x.stride(1))


def _call(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> _Call:
    assert q.dtype in cpu_kernels.DTYPES and q.dtype == k.dtype == v.dtype
    assert q.is_cpu and k.is_cpu and v.is_cpu
    n_rows, heads, head_size = q.shape
    n_key_rows, kv_heads, _ = k.shape
    assert k.shape == v.shape == (n_key_rows, kv_heads, head_size) and heads % kv_heads == 0
    if not rows.checked:
        rows.checked.append(_rows_part(rows))
    call = _Call.from_buffer_copy(rows.checked[0])
    assert call.n_rows == n_rows, "the spans do not cover the rows"
    call.heads, call.kv_heads, call.head_size = heads, kv_heads, head_size
    call.n_key_rows = n_key_rows
    call.is_bfloat16 = q.dtype == torch.bfloat16
    call.threads, call.parallel = cpu_kernels.threads(), cpu_kernels.parallel()
    call.q, call.k, call.v = _view(q), _view(k), _view(v)
    return call


def _rows_part(rows: Rows) -> _Call:
    """What a call says about rows alone; a model's layers share it."""
    spans, starts, index = rows.spans, rows.key_starts, rows.key_index
    assert spans.dtype == np.int64 and spans.flags.c_contiguous and spans.shape == (len(starts), 3)
    assert starts.dtype == index.dtype == torch.int64 and starts.is_cpu and index.is_cpu
    assert starts.is_contiguous() and index.is_contiguous()
    return _Call(
        n_rows=int(spans[:, 1].sum()),
        n_spans=len(spans),
        n_key_index=len(index),
        spans=spans.ctypes.data,
        key_starts=starts.data_ptr(),
        key_index=index.data_ptr(),
    )


@functools.cache
def _kernel(name: str) -> Callable[..., int]:
    return cpu_kernels.function(f"twofold_attention_{name}", [POINTER(_Call)])


def _check(status: int) -> None:
    assert status != 1, "a span, key_starts or key_index points outside the rows or keys"
    if status:
        raise MemoryError("attention kernel: no memory for a tile")


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows, lse: Tensor | None) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _call(q, k, v, rows)
    call.out = out.data_ptr()
    call.lse = None if lse is None else lse.data_ptr()
    _check(_kernel("forward")(call))
    return out


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    wants_keys: bool,
) -> tuple[Tensor | None, ...]:
    call = _call(q, k, v, rows)
    call.out, call.lse, call.out_grad = out.data_ptr(), lse.data_ptr(), _view(out_grad)
    q_grad = torch.empty(q.shape, dtype=q.dtype)
    call.q_grad = q_grad.data_ptr()
    k_grad = v_grad = None
    if wants_keys:
        k_grad, v_grad = (torch.empty(k.shape, dtype=k.dtype) for _ in range(2))
        padded = -(-q.shape[2] // _PADDING) * _PADDING
        partial = torch.empty(call.threads * 2 * k.shape[0] * k.shape[1] * padded)
        call.k_grad, call.v_grad = k_grad.data_ptr(), v_grad.data_ptr()
        call.partial = partial.data_ptr()
    _check(_kernel("backward")(call))
    return q_grad, k_grad, v_grad
