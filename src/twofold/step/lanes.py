"""Which samples run, and which part of the KV cache each of them holds.

Owns: the lanes (a lane runs one sample), the queue of samples that wait for one, the blocks of the
cache and the index from positions to slots; who starts first and who is preempted. Does not own:
the decode loop (`generate`), the counting of blocks (`model.kv_cache`).

The samples of a group share the blocks of its prompt: the first computes it, the others start at
its last token. A cached prompt belongs to one version of the weights, and a sample that starts
under another version does not use it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from twofold.model.kv_cache import KVCache
from twofold.model.transformer import Transformer
from twofold.types import Group, Sample

PREFILL_ROWS = 2048  # samples start in one step until they bring this many rows: bounds activations


@dataclass(eq=False)
class CachedPrompt:
    """A group's prompt in the cache."""

    version: int
    blocks: list[int]


@dataclass(eq=False)
class Run:
    """A sample on its way, waiting or running."""

    group: Group
    sample: Sample
    noise_key: int
    n_reported: int  # tokens that are in a chunk already, or came with the sample
    prompt: CachedPrompt | None = None  # while running
    blocks: list[int] = field(default_factory=list)  # of the completion, while running

    @property
    def n_prompt(self) -> int:
        return len(self.group.prompt_ids)

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + len(self.sample.token_ids)

    @property
    def order(self) -> tuple[int, int, int]:
        """Preemption takes the last in this order."""
        return (self.group.deadline, *self.sample.sample_id)

    @property
    def waiting_order(self) -> tuple[int, bool, int, int]:
        """Earliest deadline first, resumed before new."""
        return (self.group.deadline, not self.sample.token_ids, *self.sample.sample_id)


class Lanes:
    """Columns with one entry per lane, so that a decode step costs the same Python however many
    run. `tokens` counts a sample's prompt and completion; the first `cached` of them have keys in
    the cache, `capacity` positions have a slot. Where a lane is not `running`, they mean nothing.
    """

    def __init__(
        self,
        model: Transformer,
        n_lanes: int,
        cache_tokens: int,
        block_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """`cache_tokens` 0: what `n_lanes` samples with the longest admitted prompt can fill."""
        self._model = model
        self._cache_tokens = cache_tokens
        self._block_tokens = block_tokens
        self._max_new_tokens = max_new_tokens
        self._longest_prompt = 0
        self._waiting: list[tuple[tuple[int, bool, int, int], Run]] = []  # a heap
        self._prompts: dict[int, CachedPrompt] = {}  # by group id, only the newest version
        self._runs: list[Run | None] = [None] * n_lanes
        self.running = np.zeros(n_lanes, dtype=bool)
        self.tokens = np.zeros(n_lanes, dtype=np.int64)
        self.prompt_tokens = np.zeros(n_lanes, dtype=np.int64)
        self.cached = np.zeros(n_lanes, dtype=np.int64)
        self.capacity = np.zeros(n_lanes, dtype=np.int64)
        self.last_token = np.zeros(n_lanes, dtype=np.int64)
        self.noise_keys = np.zeros(n_lanes, dtype=np.uint64)
        self.release()

    def release(self) -> None:
        """Gives the memory back. Nothing may be running."""
        assert not self.running.any()
        self.cache: KVCache | None = None
        # index[lane * width + p] is the slot of position p; one more line, all 0, is for padding
        self.index = torch.empty(0, dtype=torch.int64)
        self.width = 0

    def __getitem__(self, lane: int) -> Run:
        run = self._runs[lane]
        assert run is not None, f"lane {lane} is empty"
        return run

    @property
    def runs(self) -> list[Run]:
        return [run for run in self._runs if run is not None]

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def wait(self, run: Run) -> None:
        self._longest_prompt = max(self._longest_prompt, run.n_prompt)
        heapq.heappush(self._waiting, (run.waiting_order, run))

    # ------------------------------------------------------------ memory

    def check_fits(self, group: Group) -> None:
        """ValueError when a sample of this group could not be finished even alone."""
        n_prompt, n_new = len(group.prompt_ids), self._max_new_tokens
        name = f"group {group.group_id}: a prompt of {n_prompt} tokens"
        if n_prompt == 0:
            raise ValueError(f"{name} cannot be continued; use a chat template or add a bos token")
        limit = self._model.spec.context_tokens
        if n_prompt + n_new > limit:
            raise ValueError(
                f"{name} and max_new_tokens = {n_new} exceed the model's context of {limit}; "
                "shorten the prompt or lower max_new_tokens"
            )
        needed = self._most_blocks(n_prompt) * self._block_tokens
        if self._cache_tokens and needed > self._cache_tokens:
            raise ValueError(
                f"{name} and max_new_tokens = {n_new} need a KV cache of {needed} tokens, "
                f"kv_cache_tokens is {self._cache_tokens}; raise it or lower max_new_tokens"
            )

    def make_room(self) -> None:
        """The cache, and an index wide enough for the longest sample seen so far."""
        n_lanes = len(self._runs)
        n_blocks = self._cache_tokens // self._block_tokens
        if not self._cache_tokens:
            n_blocks = n_lanes * self._most_blocks(self._longest_prompt)
        if self.cache is None:
            model = self._model
            self.cache = KVCache(
                model.spec, n_blocks, self._block_tokens, model.dtype, model.device
            )
        elif n_blocks > self.cache.n_blocks:
            self.cache.grow(n_blocks)
        width = self._longest_prompt + self._blocks(self._max_new_tokens) * self._block_tokens
        if width > self.width:
            self.width = width
            size = (n_lanes + 1) * width
            self.index = torch.zeros(size, dtype=torch.int64, device=self._model.device)
            for lane in np.flatnonzero(self.running).tolist():
                self._write_index(lane)

    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self._block_tokens)

    def _most_blocks(self, n_prompt: int) -> int:
        """What one sample can come to hold; a completion starts in a block of its own."""
        return self._blocks(n_prompt) + self._blocks(self._max_new_tokens)

    def _write_index(self, lane: int) -> None:
        run, cache = self[lane], self.cache
        assert cache is not None and run.prompt is not None
        prompt_slots = cache.slots(run.prompt.blocks)[: run.n_prompt]
        slots = np.concatenate([prompt_slots, cache.slots(run.blocks)])
        start = lane * self.width
        self.index[start : start + len(slots)] = self._to_device(slots)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)

    # ------------------------------------------------------------ starting and leaving

    def fill(self, version: int) -> list[Run]:
        """Waiting samples start in free lanes, as long as there are blocks and this step has room
        for their rows. Strictly in order: none overtakes one that does not fit yet."""
        started: list[Run] = []
        n_rows = 0
        free = np.flatnonzero(~self.running).tolist() if self._waiting else []
        while self._waiting and len(started) < len(free):
            run = self._waiting[0][1]
            prompt = self._prompts.get(run.group.group_id)
            if prompt is not None and prompt.version != version:
                prompt = None
            # a new sample feeds the prompt's last token again: it needs what follows from it
            cached = min(run.n_prompt, run.n_tokens - 1) if prompt else 0
            n_rows += run.n_tokens - cached
            if (started and n_rows > PREFILL_ROWS) or not self._take_blocks(run, prompt, version):
                break
            heapq.heappop(self._waiting)
            self._enter(free[len(started)], run, cached)
            started.append(run)
        return started

    def _take_blocks(self, run: Run, prompt: CachedPrompt | None, version: int) -> bool:
        """Blocks for the tokens that `run` already has. Leaves one for each running sample that can
        still grow, so that no sample starts only to be preempted at once."""
        cache = self.cache
        assert cache is not None
        n_growing = int((self.running & (self.capacity < self._most_positions())).sum())
        n_prompt = 0 if prompt else self._blocks(run.n_prompt)
        n_own = self._blocks(len(run.sample.token_ids))
        if cache.n_free < n_prompt + n_own + n_growing:
            return False
        blocks = cache.allocate(n_prompt + n_own)
        assert blocks is not None
        if prompt is None:
            prompt = CachedPrompt(version, blocks[:n_prompt])
            self._prompts[run.group.group_id] = prompt
        else:
            cache.share(prompt.blocks)
        run.prompt, run.blocks = prompt, blocks[n_prompt:]
        return True

    def _most_positions(self) -> np.ndarray:
        return self.prompt_tokens + self._max_new_tokens

    def _enter(self, lane: int, run: Run, cached: int) -> None:
        self._runs[lane] = run
        self.running[lane] = True
        self.tokens[lane] = run.n_tokens
        self.prompt_tokens[lane] = run.n_prompt
        self.cached[lane] = cached
        self.capacity[lane] = run.n_prompt + len(run.blocks) * self._block_tokens
        self.last_token[lane] = (run.sample.token_ids or run.group.prompt_ids)[-1]
        self.noise_keys[lane] = run.noise_key
        self._write_index(lane)

    def leave(self, lane: int) -> Run:
        """The sample gives its blocks back; its prompt's are free when nobody else holds them."""
        run, cache = self[lane], self.cache
        assert cache is not None and run.prompt is not None
        cache.release(run.blocks)
        cache.release(run.prompt.blocks)
        unused = cache.references[run.prompt.blocks[0]] == 0
        if unused and self._prompts.get(run.group.group_id) is run.prompt:
            del self._prompts[run.group.group_id]
        run.prompt, run.blocks = None, []
        self._runs[lane] = None
        self.running[lane] = False
        return run

    def leave_all(self) -> None:
        """Everything that runs waits again, without keys."""
        for lane in np.flatnonzero(self.running).tolist():
            self.wait(self.leave(lane))

    def give_blocks(self) -> int:
        """A block to each running sample whose next token has no slot yet, earliest deadline first.
        When none is free, the sample with the latest deadline loses its keys and waits; returns how
        many did."""
        cache, n_preempted = self.cache, 0
        assert cache is not None
        given: list[tuple[int, int]] = []
        full = np.flatnonzero(self.running & (self.tokens > self.capacity)).tolist()
        for lane in sorted(full, key=lambda lane: self[lane].order):
            while self.running[lane] and not cache.n_free:
                lanes = np.flatnonzero(self.running).tolist()
                self.wait(self.leave(max(lanes, key=lambda lane: self[lane].order)))
                n_preempted += 1
            if self.running[lane] and (blocks := cache.allocate(1)):
                self[lane].blocks += blocks
                given.append((lane * self.width + int(self.capacity[lane]), blocks[0]))
                self.capacity[lane] += self._block_tokens
        if given:  # one write for all
            starts, new_blocks = zip(*given, strict=True)
            places = np.array(starts)[:, None] + np.arange(self._block_tokens)
            self.index[self._to_device(places.ravel())] = self._to_device(cache.slots(new_blocks))
        return n_preempted

    def check_integrity(self) -> None:
        """Compares the cache's bookkeeping with what the running samples hold: AssertionError."""
        assert [run is not None for run in self._runs] == self.running.tolist()
        assert {run.group.group_id for run in self.runs} >= self._prompts.keys()
        if self.cache is not None:
            held: list[Sequence[int]] = [run.blocks for run in self.runs]
            held += [run.prompt.blocks for run in self.runs if run.prompt]
            self.cache.check_integrity(held)
