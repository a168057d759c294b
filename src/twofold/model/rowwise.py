"""What a decoder does to each token row between its matrix products.

Owns: residual add and RMS norm, rotary positions, the gated activation: what they mean, and their
plain torch twins. Does not own: the compiled CPU kernels (`rowwise_cpu`), which frequencies
(`transformer`).

All are differentiable and compute in fp32 whatever the dtype. A row's result does not depend on the
other rows. The kernels round once where a value is stored; the twins also in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.model import cpu_kernels, rowwise_cpu


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019), in fp32; rounded
    to the dtype of x before the gain is applied, as Hugging Face's models do.

    x [n, width], gain [width]: fast on a CPU. Any other shapes that broadcast: plain torch."""
    if x.ndim == 2 and gain.ndim == 1 and cpu_kernels.used_for(x):
        return rowwise_cpu.rms_norm(x, gain, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return gain * (wide * scale).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream one step on, and its norm: (x + delta, rms_norm(x + delta, gain)).
    x, delta [n, width] of one dtype."""
    if cpu_kernels.used_for(x):
        return rowwise_cpu.add_norm(x, delta, gain, eps)
    total = x + delta
    return total, rms_norm(total, gain, eps)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, GLU variants improve transformer, 2020): gate_up [n, 2 width], the
    gates first -> [n, width]."""
    if cpu_kernels.used_for(gate_up):
        return rowwise_cpu.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(
    qk: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    n_kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and keys by the angles of their rows (Su et al., RoFormer, 2021), element i
    of a head with element i + head_size / 2.

    qk [n, heads, head_size] holds the heads of queries, keys and, where `v` is None, values; else v
    is [n, kv_heads, head_size]. cos, sin fp32 [n, head_size / 2]. -> q [n, heads, head_size], k
    and v [n, kv_heads, head_size]. With a cache (keys, values [n_slots, kv_heads, head_size], slots
    int64 [n]) the keys and values are written into it and the whole of it is returned; then
    nothing has a gradient.
    """
    if cpu_kernels.used_for(qk):
        return rowwise_cpu.rotary(qk, v, cos, sin, n_kv_heads, cache)
    if v is None:
        qk, v = qk.split((qk.shape[1] - n_kv_heads, n_kv_heads), dim=1)
    wide = qk.float()
    low, high = wide.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    cos, sin = (torch.cat([x, x], dim=-1)[:, None] for x in (cos, sin))
    rotated = (wide * cos + turned * sin).to(qk.dtype)
    q, k = rotated.split((rotated.shape[1] - n_kv_heads, n_kv_heads), dim=1)
    if cache is None:
        return q, k, v
    keys, values, slots = cache
    with torch.no_grad():
        return q, keys.index_copy_(0, slots, k), values.index_copy_(0, slots, v)
