"""Completions of a step, laid out as micro-batches of token rows without padding.

Owns: which completions share a forward pass, and the tensors of one pass: a group's prompt is
computed once, each completion is a sequence of its own that sees the prompt's rows and its own.
Does not own: advantages (`advantage`), the loss, when a batch is trained.

Packs are a pure function of the batch: groups ascending, samples by index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twofold.model.attention import Rows
from twofold.step.logprob import ROW_MULTIPLE
from twofold.types import Group, Sample


@dataclass(frozen=True)
class Part:
    """A prompt and those of its completions that one pack holds."""

    prompt_ids: list[int]
    samples: list[Sample]

    @property
    def n_rows(self) -> int:
        return len(self.prompt_ids) + sum(map(_own_rows, self.samples))


@dataclass(frozen=True)
class Pack:
    """One forward pass of n rows, and the m targets that its hidden states predict.

    A completion's first token is predicted by the prompt's last row, and its last token is only a
    target: c tokens have c - 1 rows. Targets of a sample are contiguous, in order.

    Example: prompt [7, 8, 9] with completions [1, 2] and [3]: token_ids [7, 8, 9, 1],
    hidden_index [2, 3, 2], targets [1, 2, 3], sample_of_target [0, 0, 1].
    """

    token_ids: Tensor  # int64 [n]; a multiple of ROW_MULTIPLE, by rows that predict nothing
    rows: Rows
    hidden_index: Tensor  # int64 [m]: the row that predicts each target
    targets: Tensor  # int64 [m]
    samples: list[Sample]
    sample_of_target: np.ndarray  # int64 [m] on the host: place in `samples`


def plan_packs(
    groups: list[Group], max_rows: int, keep: Callable[[Sample], bool]
) -> list[list[Part]]:
    """The parts of each pack of at most `max_rows` rows, for the samples that `keep` accepts.

    A group that fits into a pack is not split; one that does not is split by completions, its
    prompt repeated. A single completion that is too long with its prompt gets a pack of its own,
    larger than `max_rows`.
    """
    packs: list[list[Part]] = []
    free = 0
    for group in sorted(groups, key=lambda group: group.group_id):
        kept = sorted(filter(keep, group.samples), key=lambda sample: sample.sample_id.index)
        for part in _split(group.prompt_ids, kept, max_rows):
            if part.n_rows > free:
                packs.append([])
                free = max_rows
            packs[-1].append(part)
            free -= part.n_rows
    return packs


def build_pack(parts: list[Part], device: torch.device | str) -> Pack:
    """The tensors of one pack."""
    tokens: list[int] = []
    lengths, positions, keys = [], [], []
    hidden_index: list[np.ndarray] = []

    def add_sequence(token_ids: list[int], prefix: np.ndarray) -> np.ndarray:
        own = np.arange(len(tokens), len(tokens) + len(token_ids))
        if token_ids:
            tokens.extend(token_ids)
            lengths.append(len(token_ids))
            positions.append(len(prefix))
            keys.append(np.concatenate([prefix, own]))
        return own

    nothing = np.arange(0)
    for part in parts:
        prompt = add_sequence(part.prompt_ids, nothing)
        for sample in part.samples:
            own = add_sequence(sample.token_ids[:-1], prompt)
            hidden_index.append(np.concatenate([prompt[-1:], own]))
    add_sequence([0] * (-len(tokens) % ROW_MULTIPLE), nothing)
    samples = [sample for part in parts for sample in part.samples]
    return Pack(
        token_ids=torch.tensor(tokens, device=device),
        rows=Rows.build(lengths, positions, keys, device),
        hidden_index=torch.from_numpy(np.concatenate(hidden_index)).to(device),
        targets=torch.tensor([t for s in samples for t in s.token_ids], device=device),
        samples=samples,
        sample_of_target=np.repeat(np.arange(len(samples)), [len(s.token_ids) for s in samples]),
    )


def _own_rows(sample: Sample) -> int:
    return len(sample.token_ids) - 1


def _split(prompt_ids: list[int], samples: list[Sample], max_rows: int) -> Iterator[Part]:
    """The group as few parts of at most `max_rows` rows, each with at least one sample."""
    start, rows = 0, len(prompt_ids)
    for place, sample in enumerate(samples):
        if place > start and rows + _own_rows(sample) > max_rows:
            yield Part(prompt_ids, samples[start:place])
            start, rows = place, len(prompt_ids)
        rows += _own_rows(sample)
    if samples:
        yield Part(prompt_ids, samples[start:])
