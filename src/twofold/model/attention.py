"""Attention over ragged rows: one contract for prefill, decode and training.

Owns: `Rows` (which keys each row sees), `attend` and its plain torch twin `attend_eager`.
Does not own: the compiled CPU kernel (`attention_cpu`), the cache's allocation (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.model import attention_cpu, cpu_kernels


@dataclass(frozen=True)
class Rows:
    """A flat batch of n token rows and the keys each of them sees.

    The rows of one sequence are contiguous and consecutive in position; the spans cover the
    n rows in order. The row at position p of sequence s sees the keys of positions 0..p of s, in
    that order; the key of position p is row `key_index[key_starts[s] + p]` of the k and v given to
    `attend`: a slot of the cache, or a row of the pack itself. Sequences may share keys.

    Example: a prompt of 3 tokens computed once and two completions of 2 tokens, in one pack:
    spans [[0, 3, 0], [3, 2, 3], [5, 2, 3]], key_starts [0, 3, 8],
    key_index [0, 1, 2,  0, 1, 2, 3, 4,  0, 1, 2, 5, 6].
    """

    spans: np.ndarray  # int64 [n_sequences, 3], on the host: first row, rows, first position
    positions: Tensor  # int64 [n]: position of each row within its sequence
    key_starts: Tensor  # int64 [n_sequences]
    key_index: Tensor  # int64 [*]
    checked: list[Any] = field(default_factory=list, init=False, repr=False)  # by `attention_cpu`

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        first_positions: Sequence[int],
        keys: Sequence[np.ndarray],
        device: torch.device | str = "cpu",
    ) -> Rows:
        """Lays sequences end to end: the s-th has `lengths[s]` rows from position
        `first_positions[s]` on, and sees `keys[s]` (int64, one key row per position)."""
        count = np.asarray(lengths, dtype=np.int64)
        first = np.asarray(first_positions, dtype=np.int64)
        first_rows = np.cumsum(count) - count
        n_keys = np.array([len(key) for key in keys], dtype=np.int64)
        assert (n_keys >= first + count).all(), "a sequence has fewer keys than positions"
        positions = np.arange(count.sum()) + np.repeat(first - first_rows, count)
        return cls(
            spans=np.stack([first_rows, count, first], axis=1),
            positions=torch.from_numpy(positions).to(device),
            key_starts=torch.from_numpy(np.cumsum(n_keys) - n_keys).to(device),
            key_index=torch.from_numpy(np.concatenate(keys).astype(np.int64)).to(device),
        )

    @classmethod
    def whole(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Rows:
        """Independent sequences from position 0 on, each seeing its own rows (no cache)."""
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        keys = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        return cls.build(lengths, [0] * len(keys), keys, device)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Causal grouped-query attention of n rows, scores scaled by head_size**-0.5, in fp32 inside.

    q [n, heads, head_size]; k, v [n_key_rows, kv_heads, head_size], all of one dtype; returns
    [n, heads, head_size] in that dtype. Query head h reads key head h // (heads // kv_heads).
    Differentiable in q, k and v.
    """
    if cpu_kernels.used_for(q):
        return attention_cpu.attend_cpu(q, k, v, rows)
    return attend_eager(q, k, v, rows)


def kernel_name(device_type: str = "cpu") -> str:
    """What `attend` uses for tensors on the device, and why if it is not the compiled kernel."""
    if device_type != "cpu":
        return f"eager: {device_type}"
    reason = cpu_kernels.why_not_used()
    return f"eager: {reason}" if reason else "cpu kernel"


def attend_eager(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The contract of `attend` in plain torch, on any device."""
    if (rows.spans[:, 1] == 1).all():
        return _attend_single_rows(q, k, v, rows)
    parts = [
        _attend_span(q[first : first + count], k, v, _keys_of(rows, s, position + count))
        for s, (first, count, position) in enumerate(rows.spans.tolist())
        if count
    ]
    return torch.cat(parts)


def _keys_of(rows: Rows, sequence: int, n_keys: int) -> Tensor:
    # Indexed on the device: reading key_starts on the host would wait for an accelerator.
    offsets = torch.arange(n_keys, device=rows.key_index.device)
    return rows.key_index[rows.key_starts[sequence] + offsets]


def _attend_span(q: Tensor, k: Tensor, v: Tensor, key_rows: Tensor) -> Tensor:
    """The last len(q) positions of one sequence against all its keys: [rows, heads, head_size]."""
    n_rows, n_keys = len(q), len(key_rows)
    causal = torch.ones(n_rows, n_keys, dtype=torch.bool, device=q.device)
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        k[key_rows].float().transpose(0, 1)[None],
        v[key_rows].float().transpose(0, 1)[None],
        attn_mask=causal.tril(n_keys - n_rows),
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).to(q.dtype)


def _attend_single_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Decode: one row per sequence, keys gathered into [n, longest] and masked."""
    offsets = torch.arange(int(rows.spans[:, 2].max()) + 1, device=q.device)
    seen = offsets <= rows.positions[:, None]
    places = rows.key_starts[:, None] + offsets
    key_rows = rows.key_index[torch.where(seen, places, 0)]
    out = F.scaled_dot_product_attention(
        q.float()[:, :, None],
        k[key_rows].float().transpose(1, 2),
        v[key_rows].float().transpose(1, 2),
        attn_mask=seen[:, None, None],
        enable_gqa=True,
    )
    return out[:, :, 0].to(q.dtype)
