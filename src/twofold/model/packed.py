"""Matrix products of few rows, as decoding makes them, from copies of the weights that are laid out
for them.

Owns: the copies. Does not own: the weights, whose storage is the only truth: a copy is made when
the same values have been multiplied often enough to earn it, and is dropped at the first use after
its weight changed. For bfloat16 on CPUs where oneDNN has it; everywhere else this is F.linear.

Results are those of F.linear, bit for bit: both multiply through oneDNN in the same order, only
that F.linear lays the weight out anew at every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Laying all weights out costs about what 20 decode steps of 32 to 64 rows gain by it (2 cores).
PACK_AFTER = 20
MAX_ROWS = 256  # with more rows nothing is gained


@dataclass
class _Copy:
    weight: Tensor
    version: int  # of the weight, counted by torch at every change in place
    uses: int = 0
    packed: Tensor | None = None


class PackedWeights:
    """`linear` for one model's weights."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}  # by the weight's identity
        self._usable = (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear. x [n, in], weight [out, in], bias [out]."""
        plain = torch.is_grad_enabled() or x.dtype != torch.bfloat16 or len(x) > MAX_ROWS
        if plain or not x.is_cpu or not self._usable:
            return F.linear(x, weight, bias)
        copy = self._copies.get(id(weight))
        if copy is None or copy.version != weight._version:
            copy = self._copies[id(weight)] = _Copy(weight, weight._version)
        if copy.packed is None:
            copy.uses += 1
            if copy.uses <= PACK_AFTER:
                return F.linear(x, weight, bias)
            copy.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), len(x))
        return torch.ops.mkldnn._linear_pointwise(x, copy.packed, bias, "none", [], "")

    def clear(self) -> None:
        """Gives the memory back."""
        self._copies.clear()
