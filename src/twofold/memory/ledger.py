"""The byte ledger: who holds how many bytes of a card, in which phase.

Owns: its key (card, owner, kind, phase), and the forecast of a run from its options and the
decoder's shape. Does not own: what a machine has and what was measured (`meter`), what to do when
it does not fit (`fit`). Pure arithmetic, importable without torch; docs/memory.md has the formulae.

A forecast is for the largest case that the options allow: every completion as long as it may be,
every micro-batch full.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twofold.config import Config
from twofold.memory.activations import FLOAT32, passing_bytes_per_row, saved_bytes_per_row
from twofold.model.spec import ModelSpec
from twofold.types import Phase

GB = 1e9  # bytes, in what people read
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

# Measured, on a CPU with glibc; docs/memory.md says how.
PROCESS_BYTES = 400_000_000  # Python with torch, a tokenizer, this package
HEAP_FACTOR = 1.2  # freed blocks that later tensors of other sizes do not fill
SAMPLE_TOKEN_BYTES = 150  # a sampled token in Python's lists

# As in the modules that use them, which load torch; a test compares.
PREFILL_ROWS = 2048
LOGITS_CHUNK_BYTES = 50_000_000
ROW_MULTIPLE = 64


class Owner(StrEnum):
    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    DECODE_COPY = "decode copy"
    KV = "KV"
    ACTIVATIONS = "activations"
    HOST = "host"


class Key(NamedTuple):
    card: int
    owner: Owner
    kind: str  # in words: "weights", "logits"
    phase: Phase


@dataclass
class Ledger:
    """bytes by key. Phases are in the order in which they were first entered."""

    entries: Counter[Key] = field(default_factory=Counter)

    def add(self, owner: Owner, kind: str, n_bytes: float, *phases: Phase, card: int = 0) -> None:
        for phase in phases:
            self.entries[Key(card, owner, kind, phase)] += int(n_bytes)

    @property
    def phases(self) -> list[Phase]:
        return list(dict.fromkeys(key.phase for key in self.entries))

    def total(self, phase: Phase, card: int = 0) -> int:
        """0 for a phase that the run does not have."""
        return sum(n for key, n in self.entries.items() if (key.card, key.phase) == (card, phase))

    @property
    def peak(self) -> int:
        """The most that a card ever holds. On a CPU it is held from then on: what is freed stays
        with the process (`threads.keep_freed_memory`)."""
        cards = {key.card for key in self.entries}
        return max(self.total(phase, card) for phase in self.phases for card in cards)

    def by_owner(self, phase: Phase, card: int = 0) -> dict[Owner, int]:
        owners: Counter[Owner] = Counter()
        for key, n in self.entries.items():
            if (key.card, key.phase) == (card, phase):
                owners[key.owner] += n
        return dict(owners)


def forecast(
    spec: ModelSpec,
    config: Config,
    longest_prompt_tokens: int,
    device_type: str,
    kernels: bool | None = None,
) -> Ledger:
    """What one card holds in each phase of the run. `kernels`: the compiled ones for CPUs are used
    (None: on a CPU)."""
    kernels = device_type == "cpu" if kernels is None else kernels
    shape = _Shape(spec, config, longest_prompt_tokens, device_type == "cpu", kernels)
    phases = [Phase.GENERATE, Phase.TRAIN]
    if config.train.kl_coef > 0:
        phases.insert(1, Phase.SCORE)
    if config.task.held_out > 0:
        phases.append(Phase.EVAL)
    ledger = Ledger()
    _add_residents(ledger, shape, phases)
    _add_generation(ledger, shape, phases)
    _add_training(ledger, shape, phases)
    return ledger


@dataclass(frozen=True)
class _Shape:
    """The numbers that everything else is made of."""

    spec: ModelSpec
    config: Config
    longest_prompt: int
    on_cpu: bool
    kernels: bool

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def live_groups(self) -> int:
        """The StaleSync rule's bound, in batches of `updates_per_batch` versions."""
        ahead = (self.config.sched.max_staleness + 1) // self.config.train.updates_per_batch
        return max(1, ahead) * self.config.sched.groups_per_step

    @property
    def longest_sample(self) -> int:
        return self.longest_prompt + self.config.rollout.max_new_tokens

    @property
    def train_rows(self) -> int:
        """Rows of the largest micro-batch: it is full, or one sample that is longer, or all."""
        completion = self.config.rollout.max_new_tokens - 1
        group = self.longest_prompt + self.config.rollout.group_size * completion
        largest = max(self.config.train.micro_batch_tokens, self.longest_prompt + completion)
        return max(ROW_MULTIPLE, min(largest, self.config.sched.groups_per_step * group))

    def kv_bytes(self, n_running: int, n_groups: int, cache_tokens: int) -> int:
        """Of the cache. On an accelerator all of it; on a CPU what is ever written, as pages that
        nobody writes cost nothing: the prompt of a group once, however many samples run."""
        size = self.config.rollout.kv_block_tokens
        prompt, own = (
            -(-n // size) for n in (self.longest_prompt, self.config.rollout.max_new_tokens)
        )
        blocks = self.config.rollout.max_running_samples * (prompt + own)
        if cache_tokens:
            blocks = cache_tokens // size
        if self.on_cpu:
            blocks = min(blocks, n_running * own + min(n_running, n_groups) * prompt)
        return (blocks + 1) * size * self.spec.kv_bytes_per_token(self.dtype_bytes)

    def logits_bytes(self, n_rows: int) -> int:
        """Of n rows; plain torch needs up to four float32 copies."""
        copies = 0 if self.kernels else 4 * FLOAT32
        return max(ROW_MULTIPLE, n_rows) * self.spec.vocab_size * (self.dtype_bytes + copies)

    def chunk_bytes(self, n_rows: int) -> int:
        """Of the logits that training makes at once."""
        chunk = LOGITS_CHUNK_BYTES // (self.spec.vocab_size * self.dtype_bytes) // 8 * 8
        return self.logits_bytes(min(n_rows, max(ROW_MULTIPLE, chunk)))

    def gathered_key_bytes(self, n_running: int) -> int:
        """Plain torch decodes on keys and values gathered for each sample, of one layer: as they
        are, in float32, and repeated for every query head."""
        if self.kernels:
            return 0
        spec = self.spec
        row = 2 * spec.n_kv_heads * (self.dtype_bytes + FLOAT32) + 2 * spec.n_heads * FLOAT32
        return n_running * self.longest_sample * row * spec.head_size


def _add_residents(ledger: Ledger, shape: _Shape, phases: list[Phase]) -> None:
    """What is there in every phase, and the gradients."""
    spec, config = shape.spec, shape.config
    n, dtype_bytes = spec.n_parameters, shape.dtype_bytes
    if shape.on_cpu:
        samples = shape.live_groups * config.rollout.group_size
        tokens = samples * config.rollout.max_new_tokens
        ledger.add(Owner.HOST, "process", PROCESS_BYTES, *phases)
        ledger.add(Owner.HOST, "samples", tokens * SAMPLE_TOKEN_BYTES, *phases)
    ledger.add(Owner.POLICY, "weights", n * dtype_bytes, *phases)
    if config.train.kl_coef > 0:
        ledger.add(Owner.REFERENCE, "weights", n * dtype_bytes, *phases)
    if dtype_bytes != FLOAT32:  # float32 parameters are their own masters
        ledger.add(Owner.OPTIMIZER, "masters", n * FLOAT32, *phases)
    ledger.add(Owner.OPTIMIZER, "moments", 2 * n * FLOAT32, *phases)
    ledger.add(Owner.GRADIENTS, "gradients", n * FLOAT32, Phase.TRAIN)
    if config.train.loss == "ppo":
        ledger.add(Owner.CRITIC, "value head and moments", 3 * (spec.width + 1) * FLOAT32, *phases)


def _add_generation(ledger: Ledger, shape: _Shape, phases: list[Phase]) -> None:
    rollout, task, run = shape.config.rollout, shape.config.task, shape.config.run
    live = shape.live_groups
    running = min(rollout.max_running_samples, live * rollout.group_size)
    asked = task.held_out * max(1, run.eval_samples)
    passes = {
        Phase.GENERATE: (running, live, rollout.kv_cache_tokens),
        Phase.EVAL: (min(rollout.max_running_samples, asked), task.held_out, 0),
    }
    for phase, (n_running, n_groups, cache_tokens) in passes.items():
        if phase not in phases:
            continue
        # a cache that is kept over the update is there in all other phases too
        keep = phase == Phase.GENERATE and rollout.kv_after_update == "keep"
        where = phases if keep else [phase]
        ledger.add(Owner.KV, "cache", shape.kv_bytes(n_running, n_groups, cache_tokens), *where)
        if shape.on_cpu and shape.dtype_bytes == 2:
            copy = shape.spec.n_parameters * shape.dtype_bytes
            ledger.add(Owner.DECODE_COPY, "packed weights", copy, *where)
        rows = max(shape.longest_sample, min(PREFILL_ROWS, n_running * shape.longest_sample))
        passing = rows * passing_bytes_per_row(shape.spec, shape.dtype_bytes, shape.kernels)
        ledger.add(Owner.ACTIVATIONS, "forward", passing, phase)
        ledger.add(Owner.ACTIVATIONS, "keys gathered", shape.gathered_key_bytes(n_running), phase)
        ledger.add(Owner.ACTIVATIONS, "logits", shape.logits_bytes(n_running), phase)


def _add_training(ledger: Ledger, shape: _Shape, phases: list[Phase]) -> None:
    spec, rows = shape.spec, shape.train_rows
    passing = rows * passing_bytes_per_row(spec, shape.dtype_bytes, shape.kernels)
    if Phase.SCORE in phases:
        ledger.add(Owner.ACTIVATIONS, "forward", passing, Phase.SCORE)
        ledger.add(Owner.ACTIVATIONS, "logits", shape.chunk_bytes(rows), Phase.SCORE)
    saved = rows * saved_bytes_per_row(
        spec, shape.dtype_bytes, shape.kernels, min(rows, shape.longest_sample)
    )
    ledger.add(
        Owner.ACTIVATIONS, "saved", saved * (HEAP_FACTOR if shape.on_cpu else 1), Phase.TRAIN
    )
    ledger.add(Owner.ACTIVATIONS, "logits", shape.chunk_bytes(rows), Phase.TRAIN)
    # its gradient in float32, that of a chunk, and what the matmul lays out (measured)
    head = 3 * spec.vocab_size * spec.width * FLOAT32
    ledger.add(Owner.ACTIVATIONS, "head gradient", head, Phase.TRAIN)
    if shape.config.train.loss == "ppo":
        ledger.add(Owner.ACTIVATIONS, "value head", rows * spec.width * FLOAT32, Phase.TRAIN)
        ledger.add(Owner.GRADIENTS, "value head", (spec.width + 1) * FLOAT32, Phase.TRAIN)
