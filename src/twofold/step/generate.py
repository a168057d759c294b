"""Continuous batching: samples grow token by token, and start and leave at any step.

Owns: the decode loop, what is recorded for each token, pause and resume. Does not own: which groups
are admitted and for how long to decode (the scheduler), who runs and who waits (`lanes`), the draw
(`sampling`, `noise`).

Each step feeds every running sample those of its tokens (prompt and completion) that have no keys
in the cache yet, and samples one more after the last of them. So decode (one token is fed), the
prefill of a new sample and the re-prefill of a resumed one are the same thing and share a forward
pass.

What a sample gets does not depend on what runs beside it: its noise is its own, and rows are padded
so that, on a CPU, every row's arithmetic is the same for any number of rows (see `logprob`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from twofold.model.attention import Rows
from twofold.model.transformer import Transformer
from twofold.step import noise
from twofold.step.lanes import Lanes, Run
from twofold.step.logprob import padded_rows
from twofold.step.sampling import Sampling, sample
from twofold.types import Chunk, Group, Sample


@dataclass
class Quantum:
    """What one call of `Generator.run` did."""

    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Sample] = field(default_factory=list)
    decode_steps: int = 0  # forward passes
    n_tokens: int = 0  # sampled
    prefill_tokens: int = 0  # fed beyond one per sampled token
    preemptions: int = 0  # samples that lost their keys because the cache was full


class Generator:
    """Generates on the model's device with the model's own weights; updates `Sample`s in place.

    `version` is stamped on every token; whoever changes the weights sets it, after `pause`.
    """

    def __init__(
        self,
        model: Transformer,
        sampling: Sampling,
        *,
        seed: int,
        stream: str,
        max_running_samples: int,
        kv_cache_tokens: int,
        kv_block_tokens: int,
    ) -> None:
        """`kv_cache_tokens` 0: as much as `max_running_samples` samples with the longest admitted
        prompt can fill, so that nothing is ever preempted."""
        assert max_running_samples > 0 and kv_cache_tokens >= 0 and kv_block_tokens > 0
        self.version = 0
        self._model = model
        self._sampling = sampling
        self._seed, self._stream = seed, stream
        self._lanes = Lanes(
            model, max_running_samples, kv_cache_tokens, kv_block_tokens, sampling.max_new_tokens
        )

    @property
    def unfinished(self) -> int:
        """Samples running or waiting."""
        return int(self._lanes.running.sum()) + self._lanes.n_waiting

    def check_fits(self, group: Group) -> None:
        """ValueError when a sample of this group could not be finished even alone."""
        self._lanes.check_fits(group)

    def admit(self, groups: Iterable[Group]) -> None:
        """The groups' unfinished samples wait for a lane, with whatever tokens they already have.
        ValueError, and nothing admitted, when one could not be finished."""
        groups = list(groups)
        for group in groups:
            self._lanes.check_fits(group)
        for group in groups:
            for member in group.samples:
                if not member.finished:
                    assert len(member.token_ids) < self._sampling.max_new_tokens, member.sample_id
                    key = noise.sample_key(self._seed, self._stream, *member.sample_id)
                    self._lanes.wait(Run(group, member, key, n_reported=len(member.token_ids)))

    @torch.no_grad()  # not inference_mode: what the model keeps must still be of use in training
    def run(self, max_decode_steps: int) -> Quantum:
        """Decodes until `max_decode_steps` forward passes are done or nothing is left."""
        quantum = Quantum()
        lanes = self._lanes
        seen = lanes.runs
        if self.unfinished:
            lanes.make_room()
        while self.unfinished and quantum.decode_steps < max_decode_steps:
            quantum.preemptions += lanes.give_blocks()
            seen += lanes.fill(self.version)
            self._step(quantum)
        quantum.chunks = [chunk for run in seen if (chunk := self._chunk(run))]
        return quantum

    def pause(self, keep_kv: bool) -> None:
        """Leaves generation at a token. Without `keep_kv` all keys and values are dropped, and each
        sample computes its own again when it goes on; with it, samples go on with what they have,
        and only their tokens from then on see changed weights."""
        if not keep_kv:
            self._lanes.leave_all()

    def release(self) -> None:
        """Gives the memory of the KV cache and of packed weights back; the next run takes it."""
        self._lanes.leave_all()
        self._lanes.release()
        self._model.packed.clear()

    def check_integrity(self) -> None:
        """AssertionError when the cache's bookkeeping is not what the running samples hold."""
        self._lanes.check_integrity()

    # ------------------------------------------------------------ a step

    def _step(self, quantum: Quantum) -> None:
        """One more token for every running sample."""
        lanes = self._lanes
        active = np.flatnonzero(lanes.running)
        n = len(active)
        assert n, "samples wait, none runs, and none fits into the empty cache"
        n_fed = int((lanes.tokens[active] - lanes.cached[active]).sum())
        hidden = self._forward(active, n_fed)
        logits = self._model.logits(hidden)
        uniforms = np.full(len(hidden), 0.5)
        positions = lanes.tokens[active] - lanes.prompt_tokens[active]
        uniforms[:n] = noise.uniforms(lanes.noise_keys[active], positions)
        drawn = sample(logits, self._to_device(uniforms), self._sampling)
        # one transfer; float32 holds every token id below 2**24 exactly
        columns = torch.stack([column[:n].float() for column in drawn]).tolist()
        self._append(active, columns, quantum)
        quantum.decode_steps += 1
        quantum.n_tokens += n
        quantum.prefill_tokens += n_fed - n

    def _forward(self, active: np.ndarray, n_fed: int) -> Tensor:
        """Feeds the samples in the lanes `active` their n_fed tokens without keys -> hidden states
        after the last of each: [padded_rows(len(active)), width]."""
        lanes, n = self._lanes, len(active)
        n_rows = padded_rows(n_fed)
        n_padding = n_rows - n_fed
        # a padding row is a sequence of its own: position 0, key in slot 0
        lines = np.concatenate([active, np.full(n_padding, len(lanes.running))])
        first = np.concatenate([lanes.cached[active], np.zeros(n_padding, dtype=np.int64)])
        counts = np.ones(len(lines), dtype=np.int64)
        counts[:n] = lanes.tokens[active] - lanes.cached[active]
        first_rows = np.cumsum(counts) - counts
        last_rows = first_rows + counts - 1
        positions = np.arange(n_rows) + np.repeat(first - first_rows, counts)
        key_starts = lines * lanes.width

        token_ids = np.zeros(n_rows, dtype=np.int64)
        token_ids[last_rows[:n]] = lanes.last_token[active]
        for i in np.flatnonzero(counts > 1).tolist():
            run = lanes[active[i]]
            tokens = run.group.prompt_ids + run.sample.token_ids
            token_ids[first_rows[i] : last_rows[i] + 1] = tokens[first[i] :]

        wanted = np.zeros(padded_rows(n), dtype=np.int64)
        wanted[:n] = last_rows[:n]
        places = np.repeat(key_starts, counts) + positions
        parts = (token_ids, positions, places, key_starts, wanted)
        packed = self._to_device(np.concatenate(parts)).split([len(part) for part in parts])
        spans = np.stack([first_rows, counts, first], axis=1)
        rows = Rows(spans, positions=packed[1], key_starts=packed[3], key_index=lanes.index)
        hidden = self._model(packed[0], rows, lanes.cache, lanes.index[packed[2]])
        return hidden[packed[4]]

    def _append(self, active: np.ndarray, columns: list[list[float]], quantum: Quantum) -> None:
        """columns: token ids, log-probs, kept log-mass, of the sample in each active lane."""
        if not all(map(math.isfinite, columns[1])):
            raise FloatingPointError(
                f"log-probs under version {self.version} are not finite: the weights are broken; "
                "lower train.learning_rate and start again from a checkpoint"
            )
        lanes, stop_ids = self._lanes, self._sampling.stop_ids
        stop_strings = self._sampling.stop_strings
        lanes.cached[active] = lanes.tokens[active]
        lanes.tokens[active] += 1
        lanes.last_token[active] = columns[0]
        for lane, token_id, logprob, logmass in zip(active.tolist(), *columns, strict=True):
            member = lanes[lane].sample
            member.token_ids.append(int(token_id))
            member.logprobs.append(logprob)
            member.kept_logmass.append(logmass)
            member.versions.append(self.version)
            if token_id in stop_ids or (stop_strings and stop_strings.reached(member.token_ids)):
                member.finish_reason = "stop"
            elif len(member.token_ids) == self._sampling.max_new_tokens:
                member.finish_reason = "length"
            else:
                continue
            lanes.leave(lane)
            quantum.finished.append(member)

    def _chunk(self, run: Run) -> Chunk | None:
        """The tokens that `run` got since the last chunk."""
        member, start = run.sample, run.n_reported
        if start == len(member.token_ids):
            return None
        run.n_reported = len(member.token_ids)
        return Chunk(
            member.sample_id,
            start,
            self.version,
            member.token_ids[start:],
            member.logprobs[start:],
            member.kept_logmass[start:],
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
