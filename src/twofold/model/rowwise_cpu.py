"""The compiled twins of `rowwise`: autograd functions around `rowwise_cpu.cpp`.

Owns: the calls and what is kept for the gradients. Does not own: the arithmetic (the C++ file),
what the functions mean and when to use these (`rowwise`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from twofold.model import cpu_kernels

_P, _I = c_void_p, c_int64
_HEADS = [_I, _I, _I, _I, _P, _P]  # rows, heads, kv heads, head size, cos, sin
_ARGUMENTS = {
    "add_norm": [_I, _I, c_float, *[_P] * 6],
    "norm_gradient": [_I, _I, *[_P] * 7],
    "rotary": [*_HEADS, _P, _I, _P, _I, _P, _I, _P, _P, _P, _I],
    "rotary_gradient": [*_HEADS, _P, _P, _P, _P, _I, _P, _I],
    "gated": [_I, _I, _P, _P],
    "gated_gradient": [_I, _I, _P, _P, _P],
}


@functools.cache
def _kernel(name: str) -> dict[torch.dtype, Callable[..., int]]:
    return cpu_kernels.for_rows(name, _ARGUMENTS[name])


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# ------------------------------------------------------------------ residual and norm


def add_norm(x: Tensor, delta: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if _wants_gradient(x, delta, gain):
        return _AddNorm.apply(x, delta, gain, eps)
    return _add_norm(x, delta, gain, eps, None)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    if _wants_gradient(x, gain):
        return _Norm.apply(x, gain, eps)
    return _add_norm(x, None, gain, eps, None)[1]


def _add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, gain = x.contiguous(), gain.contiguous()
    normed = torch.empty_like(x)
    assert gain.dtype == x.dtype and gain.shape == x.shape[1:], (x.shape, gain.shape)
    total, delta_data = x, None
    if delta is not None:
        delta = delta.contiguous()
        assert delta.dtype == x.dtype and delta.shape == x.shape
        total, delta_data = torch.empty_like(x), delta.data_ptr()
    _kernel("add_norm")[x.dtype](
        *x.shape,
        eps,
        x.data_ptr(),
        delta_data,
        gain.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        None if scales is None else scales.data_ptr(),
    )
    return total, normed


def _norm_gradient(
    saved: tuple[Tensor, ...], grad: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients in x (+ `added`) and in the gain."""
    x, gain, scales = saved
    grad = grad.contiguous()
    added = None if added is None else added.contiguous()
    x_grad, gain_grad = torch.empty_like(x), torch.empty_like(gain)
    _kernel("norm_gradient")[x.dtype](
        *x.shape,
        x.data_ptr(),
        scales.data_ptr(),
        gain.data_ptr(),
        grad.data_ptr(),
        None if added is None else added.data_ptr(),
        x_grad.data_ptr(),
        gain_grad.data_ptr(),
    )
    return x_grad, gain_grad


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        scales = x.new_empty(len(x), dtype=torch.float32)
        x, gain = x.contiguous(), gain.contiguous()
        normed = _add_norm(x, None, gain, eps, scales)[1]
        ctx.save_for_backward(x, gain, scales)
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_gradient(ctx.saved_tensors, grad, None), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        scales = x.new_empty(len(x), dtype=torch.float32)
        gain = gain.contiguous()
        total, normed = _add_norm(x, delta, gain, eps, scales)
        ctx.save_for_backward(total, gain, scales)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, total_grad: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:  # the norm was not used
            return total_grad, total_grad, None, None
        x_grad, gain_grad = _norm_gradient(ctx.saved_tensors, grad, total_grad)
        return x_grad, x_grad, gain_grad, None


# ------------------------------------------------------------------ rotary positions


def rotary(
    qk: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    n_kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cache is None and _wants_gradient(qk, v):
        return _Rotary.apply(qk, v, cos, sin, n_kv_heads)
    return _rotary(qk, v, cos, sin, n_kv_heads, cache)


def _heads_contiguous(x: Tensor) -> Tensor:
    """Any distance between rows is fine (a slice of a fused projection)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _rotary(
    qk: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    n_kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    qk = _heads_contiguous(qk)
    n, n_both, size = qk.shape
    if v is None:  # the last heads of qk
        n_both -= n_kv_heads
        v_data, v_row = qk.data_ptr() + n_both * size * qk.itemsize, qk.stride(0)
    else:
        v = _heads_contiguous(v)
        assert v.dtype == qk.dtype and v.shape == (n, n_kv_heads, size)
        v_data, v_row = v.data_ptr(), v.stride(0)
    assert cos.shape == sin.shape == (n, size // 2) and size % 2 == 0
    assert cos.dtype == sin.dtype == torch.float32
    cos, sin = cos.contiguous(), sin.contiguous()
    q = qk.new_empty(n, n_both - n_kv_heads, size)
    if cache is None:
        k, values = (qk.new_empty(n, n_kv_heads, size) for _ in range(2))
        slots = None
    else:
        k, values, slots = cache
        assert k.shape == values.shape and k.shape[1:] == (n_kv_heads, size)
        assert k.dtype == values.dtype == qk.dtype and k.is_contiguous() and values.is_contiguous()
        assert slots.dtype == torch.int64 and slots.shape == (n,) and slots.is_contiguous()
    in_range = _kernel("rotary")[qk.dtype](
        n,
        n_both - n_kv_heads,
        n_kv_heads,
        size,
        cos.data_ptr(),
        sin.data_ptr(),
        qk.data_ptr(),
        qk.stride(0),
        v_data,
        v_row,
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        values.data_ptr(),
        None if slots is None else slots.data_ptr(),
        len(k),
    )
    assert in_range, "a slot is outside the cache"
    return q, k, values


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qk: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, n_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        ctx.fused = v is None
        return _rotary(qk, v, cos, sin, n_kv_heads, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        q_grad, k_grad, v_grad = (x.contiguous() for x in (q_grad, k_grad, v_grad))
        (n, n_heads, size), n_kv_heads = q_grad.shape, k_grad.shape[1]
        n_both = n_heads + n_kv_heads
        if ctx.fused:
            qk_grad = q_grad.new_empty(n, n_both + n_kv_heads, size)
            v_out = qk_grad[:, n_both:]
        else:
            qk_grad, v_out = q_grad.new_empty(n, n_both, size), torch.empty_like(v_grad)
        _kernel("rotary_gradient")[q_grad.dtype](
            n,
            n_heads,
            n_kv_heads,
            size,
            cos.data_ptr(),
            sin.data_ptr(),
            q_grad.data_ptr(),
            k_grad.data_ptr(),
            v_grad.data_ptr(),
            qk_grad.data_ptr(),
            qk_grad.stride(0),
            v_out.data_ptr(),
            v_out.stride(0),
        )
        return qk_grad, None if ctx.fused else v_out, None, None, None


# ------------------------------------------------------------------ gated activation


def gated(gate_up: Tensor) -> Tensor:
    return _Gated.apply(gate_up) if _wants_gradient(gate_up) else _gated(gate_up.contiguous())


def _gated(gate_up: Tensor) -> Tensor:
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    _kernel("gated")[gate_up.dtype](n, width, gate_up.data_ptr(), out.data_ptr())
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, gate_up_grad = grad.contiguous(), torch.empty_like(gate_up)
        n, width = grad.shape
        _kernel("gated_gradient")[grad.dtype](
            n, width, gate_up.data_ptr(), grad.data_ptr(), gate_up_grad.data_ptr()
        )
        return gate_up_grad
