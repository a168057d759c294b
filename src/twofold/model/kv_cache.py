"""The paged KV cache: keys and values of generated tokens, and who holds which part of it.

Owns: the tensors, and the blocks of slots with their reference counts. A slot keeps one token's
keys and values of every layer; a block is `block_tokens` slots, the unit of allocation. Block 0 is
never given out: padding rows write and read its slot 0. Does not own: which position of which
sample lies in which slot, and who gets blocks first (`step.generate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from twofold.model.spec import ModelSpec


class KVCache:
    """keys, values: [n_layers, n_slots, kv_heads, head_size]; slot s belongs to block
    s // block_tokens. Blocks count their holders: the samples of a group share its prompt's."""

    def __init__(
        self,
        spec: ModelSpec,
        n_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`n_blocks` blocks to give out, and one more for padding."""
        self.block_tokens = block_tokens
        self.references = [1]  # of each block; the padding block's own never goes away
        self._free: list[int] = []
        nothing = torch.empty(
            (spec.n_layers, 0, spec.n_kv_heads, spec.head_size), dtype=dtype, device=device
        )
        self.keys = self.values = nothing
        self.grow(n_blocks)

    @property
    def n_blocks(self) -> int:
        """Blocks that can be given out, free or held."""
        return len(self.references) - 1

    @property
    def n_free(self) -> int:
        return len(self._free)

    def grow(self, n_blocks: int) -> None:
        """Makes room for `n_blocks` in all; what is held stays where it is. For a moment the old
        and the new keys, then values, exist side by side."""
        added = range(len(self.references), n_blocks + 1)
        self.keys = self._widened(self.keys, (n_blocks + 1) * self.block_tokens)
        self.values = self._widened(self.values, (n_blocks + 1) * self.block_tokens)
        self.references += [0] * len(added)
        self._free = [*reversed(added), *self._free]

    def allocate(self, n: int) -> list[int] | None:
        """`n` free blocks, held once each; None, and nothing taken, when there are fewer."""
        if n > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of blocks that are held already."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is free, it cannot be shared"
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less; blocks that nobody holds any more are free."""
        for block in blocks:
            assert block > 0 and self.references[block] > 0, f"block {block} is not held"
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free.append(block)

    def slots(self, blocks: Sequence[int]) -> np.ndarray:
        """The slots of these blocks in order: int64 [len(blocks) * block_tokens]."""
        first = np.asarray(blocks, dtype=np.int64) * self.block_tokens
        return (first[:, None] + np.arange(self.block_tokens)).reshape(-1)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Counts everything again: `holders` are the block lists of all who hold some.
        AssertionError when a block leaked, is free and held, or is counted wrongly."""
        held = Counter(block for blocks in holders for block in blocks)
        expected = [1] + [held[block] for block in range(1, self.n_blocks + 1)]
        assert held[0] == 0 and not held.keys() - set(range(self.n_blocks + 1)), held
        assert self.references == expected, f"counts {self.references}, held {dict(held)}"
        free = {block for block in range(1, self.n_blocks + 1) if not held[block]}
        assert len(self._free) == len(free) and set(self._free) == free, (self._free, free)
        assert self.keys.shape[1] == (self.n_blocks + 1) * self.block_tokens

    @staticmethod
    def _widened(old: torch.Tensor, n_slots: int) -> torch.Tensor:
        # Not zeroed: a slot is written before it is read, and untouched host memory costs nothing.
        wider = old.new_empty((old.shape[0], n_slots, *old.shape[2:]))
        wider[:, : old.shape[1]] = old
        return wider
