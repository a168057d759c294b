"""The decoder: one definition for prefill, decode and training.

Owns: the parameters and the forward pass over ragged rows. Does not own: which keys a row sees
(`attention.Rows`), what happens between matrix products (`attention`, `rowwise`), the output
projection's use (`step.logprob`), files (`weights`).

One definition serves every family: what a family has beside the common parts (biases of queries,
keys and values; norms of queries and keys; stretched rotary frequencies) is said by `ModelSpec`.

The numbers follow Hugging Face's models: norms in fp32, rounded to the model dtype before the gain;
rotary angles in fp32. Rotation is done in fp32 and rounded once. A row's result depends on the
other rows of the call only as far as F.linear's does.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.model.attention import Rows, attend
from twofold.model.packed import PackedWeights
from twofold.model.rowwise import add_norm, gated, rms_norm, rotary
from twofold.model.spec import ModelSpec


class LayerCaches(Protocol):
    """What the forward pass needs of a cache: keys[layer] and values[layer] are tensors
    [n_slots, kv_heads, head_size] in the model dtype."""

    keys: Tensor
    values: Tensor


class Layer(nn.Module):
    """Parameters of one decoder layer. Projections that read the same rows are stored fused (one
    matmul instead of two or three): `qkv` = queries, keys, values; `gate_up` = gate, up. What the
    family lacks is None. Matrices have two dimensions, gains and biases one."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str):
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.attention_norm = weight(spec.width)
        self.qkv = weight(spec.qkv_width, spec.width)
        self.qkv_bias = weight(spec.qkv_width) if spec.qkv_bias else None
        self.q_norm = weight(spec.head_size) if spec.qk_norm else None
        self.k_norm = weight(spec.head_size) if spec.qk_norm else None
        self.out = weight(spec.width, spec.n_heads * spec.head_size)
        self.ff_norm = weight(spec.width)
        self.gate_up = weight(2 * spec.ff_width, spec.width)
        self.down = weight(spec.width, spec.ff_width)


class Transformer(nn.Module):
    """Uninitialised until `weights.load_model` or `load_state_dict` fills it."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__()
        self.spec = spec
        table = (spec.vocab_size, spec.width)
        self.embedding = nn.Parameter(torch.empty(table, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(spec, dtype, device) for _ in range(spec.n_layers))
        self.final_norm = nn.Parameter(torch.empty(spec.width, dtype=dtype, device=device))
        self.head: nn.Parameter | None = None
        if not spec.tied_embeddings:
            self.head = nn.Parameter(torch.empty(table, dtype=dtype, device=device))
        self.packed = PackedWeights()

    @property
    def head_weight(self) -> Tensor:
        """The output projection [vocab, width]: the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> [n, vocab] in the model dtype, not divided by a temperature."""
        return self.packed.linear(hidden, self.head_weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(
        self,
        token_ids: Tensor,
        rows: Rows,
        cache: LayerCaches | None = None,
        write_slots: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [n, width] after the final norm, in the model dtype.

        token_ids int64 [n]. Without a cache the rows attend over the n rows themselves
        (`rows.key_index` points at rows); with one, the n new keys and values of each layer are
        first written at `write_slots` (int64 [n]) and `rows.key_index` points at slots; only
        without one is there a gradient.
        """
        linear, eps = self.packed.linear, self.spec.norm_eps
        angles = rotary_angles(rows.positions, self.spec)
        next_gains = [layer.attention_norm for layer in self.layers[1:]] + [self.final_norm]
        hidden = F.embedding(token_ids, self.embedding)
        normed = rms_norm(hidden, self.layers[0].attention_norm, eps)
        for index, layer in enumerate(self.layers):
            slots = None
            if cache is not None:
                assert write_slots is not None
                slots = (cache.keys[index], cache.values[index], write_slots)
            q, k, v = self._project_qkv(layer, normed, angles, slots)
            attended = attend(q, k, v, rows)
            delta = linear(attended.flatten(1), layer.out)
            hidden, normed = add_norm(hidden, delta, layer.ff_norm, eps)
            delta = linear(gated(linear(normed, layer.gate_up)), layer.down)
            hidden, normed = add_norm(hidden, delta, next_gains[index], eps)
        return normed

    def _project_qkv(
        self,
        layer: nn.Module,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [n, heads, head_size], and the k and v that `attend` gets."""
        spec = self.spec
        qkv = self.packed.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.unflatten(-1, (-1, spec.head_size))
        if not spec.qk_norm:
            return rotary(qkv, None, *angles, spec.n_kv_heads, slots)
        qk, v = qkv.split((spec.n_heads + spec.n_kv_heads, spec.n_kv_heads), dim=1)
        gains = [layer.q_norm.expand(spec.n_heads, -1), layer.k_norm.expand(spec.n_kv_heads, -1)]
        qk = rms_norm(qk, torch.cat(gains), spec.norm_eps)
        return rotary(qk, v, *angles, spec.n_kv_heads, slots)


def rotary_angles(positions: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of each row, fp32 [n, head_size / 2]."""
    angles = positions.float()[:, None] * rotary_frequencies(spec, positions.device)
    return angles.cos(), angles.sin()


def rotary_frequencies(spec: ModelSpec, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each pair of elements, fp32 [head_size / 2], in the order of
    operations of Hugging Face (`RopeScaling` says what is stretched)."""
    pair = torch.arange(0, spec.head_size, 2, dtype=torch.int64, device=device).float()
    plain = 1.0 / (spec.rope_theta ** (pair / spec.head_size))
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_context_tokens / (2 * math.pi / plain)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
