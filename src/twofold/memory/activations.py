"""Bytes that a forward pass keeps for its backward pass, and those it needs while it runs.

Owns: the arithmetic, from the shape of a decoder. Does not own: who holds what else, and when
(`ledger`). Importable without torch.

What autograd saves follows from `model.transformer` and what it calls; a test counts the saved
tensors of small models and compares.
"""

from __future__ import annotations

from twofold.model.spec import ModelSpec

FLOAT32 = 4  # bytes


def saved_bytes_per_row(
    spec: ModelSpec, dtype_bytes: int, kernels: bool, keys_per_row: int = 0
) -> int:
    """Bytes that training keeps of one token row, over all layers, until their backward pass.

    `kernels`: the compiled ones for CPUs are used, else plain torch, which keeps more: float32
    copies, and of the attention one weight per head and key (`keys_per_row`) at the worst.
    """
    per_layer = (_with_kernels if kernels else _plain)(spec, dtype_bytes)
    per_layer += 0 if kernels else keys_per_row * FLOAT32 * (spec.n_heads + 1)  # and the mask
    # the last norm, the rows that predict something, ids, positions, shared angles
    rest = spec.width * 2 * dtype_bytes + 32 + spec.head_size * FLOAT32
    rest += 0 if kernels else FLOAT32 * spec.width
    return spec.n_layers * per_layer + rest


def _with_kernels(spec: ModelSpec, dtype_bytes: int) -> int:
    attended = spec.n_heads * spec.head_size
    # two norms: the sum that goes in and the norm that comes out; q, k, v; gate, up, their product
    elements = 4 * spec.width + spec.qkv_width + attended + 3 * spec.ff_width
    scales = 2 + spec.n_heads  # of the norms; log-sum-exp of the attention
    return elements * dtype_bytes + scales * FLOAT32 + _head_norms(spec, dtype_bytes)


def _head_norms(spec: ModelSpec, dtype_bytes: int) -> int:
    """The norms of queries and keys are plain torch everywhere."""
    if not spec.qk_norm:
        return 0
    heads = spec.n_heads + spec.n_kv_heads
    widened = spec.qkv_width if dtype_bytes == FLOAT32 else heads * spec.head_size
    return widened * FLOAT32 + heads * spec.head_size * dtype_bytes + heads * FLOAT32


def _plain(spec: ModelSpec, dtype_bytes: int) -> int:
    attended = spec.n_heads * spec.head_size
    keys = spec.n_kv_heads * spec.head_size
    norm = FLOAT32 * spec.width + FLOAT32 + 2 * dtype_bytes * spec.width
    attention = FLOAT32 * (2 * attended + 2 * keys + 2 * spec.head_size) + dtype_bytes * attended
    attention += 8 + FLOAT32 * spec.n_heads  # where the key is; log-sum-exp
    if dtype_bytes == FLOAT32:
        attention += FLOAT32 * keys  # q and k are parts of one rotated tensor
    feed_forward = 4 * spec.ff_width * dtype_bytes  # gate, up, silu(gate), the product
    return 2 * norm + attention + feed_forward + _head_norms(spec, dtype_bytes)


def passing_bytes_per_row(spec: ModelSpec, dtype_bytes: int, kernels: bool) -> int:
    """The most bytes of one row that exist at once in a forward pass without gradient."""
    width = FLOAT32 + dtype_bytes if not kernels else dtype_bytes
    attention = 2 * spec.qkv_width + spec.n_heads * spec.head_size
    return (3 * spec.width + max(attention, 3 * spec.ff_width)) * width
