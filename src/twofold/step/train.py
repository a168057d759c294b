"""The optimizer updates of one batch of groups.

Owns: mini-batches, what is computed before the first update, gradient accumulation over
micro-batches. Does not own: which groups make a batch (`sched`), the layout of a micro-batch
(`pack`), the formulas (`advantage`, `critic`, `loss`), master weights and the update (`optimizer`),
what is reported (`metrics`), publishing.

The model's parameters are changed in place: generation reads the same storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofold.config import TrainConfig
from twofold.model.transformer import Transformer
from twofold.step.advantage import TokenValues, advantages, record_advantages
from twofold.step.critic import ValueHead, critic_advantages, explained_variance, value_losses
from twofold.step.logprob import chunked_logprobs
from twofold.step.loss import DENOMINATORS, Columns, Totals, policy_losses
from twofold.step.metrics import TokenTable, batch_metrics, token_metrics
from twofold.step.optimizer import Optimizer, lr_at
from twofold.step.pack import Pack, build_pack, plan_packs
from twofold.types import Group, Sample


@dataclass(frozen=True)
class _Batch:
    """What is known of a batch before its first update, by sample. `proximal`: log-probs under the
    weights it began with, None where those are the current ones, or not needed. `values` and
    `returns`: the critic's, with loss "ppo"."""

    advantages: TokenValues
    proximal: TokenValues | None = None
    values: TokenValues | None = None
    returns: TokenValues | None = None


class Trainer:
    """Trains `model` in place. `temperature` is the one its samples were drawn at, `max_new_tokens`
    the most tokens they may have."""

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        temperature: float,
        max_staleness: int,
        total_steps: int,
        max_new_tokens: int,
    ):
        self._model = model
        self._config = config
        self._temperature = temperature
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self._max_new_tokens = max_new_tokens
        self._value_head = None
        parameters, rates = dict(model.named_parameters()), {}
        if config.loss == "ppo":
            self._value_head = ValueHead(model.spec.width, model.device)
            head = {f"value_head.{n}": p for n, p in self._value_head.named_parameters()}
            parameters |= head
            rates = dict.fromkeys(head, config.value_lr_factor)
        self.optimizer = Optimizer(parameters, config, rates)

    def train(self, groups: list[Group], version: int) -> dict[str, float]:
        """Trains `version` into version + `updates_per_batch` and returns the step's metrics; sets
        the advantages.

        Failed samples are left out. Samples whose advantage is 0 (all of a group whose rewards are
        equal) and truncated ones that `mask_truncated` leaves out are not computed, unless the KL
        term needs the former; the denominators say where they count. An update with nothing to
        compute is none (no decay, no momentum), but its version and learning rate pass.

        Raises FloatingPointError, with weights and optimizer as before the update, when a loss or a
        gradient is not finite.
        """
        config = self._config
        self._check_batch(groups, version)
        updates = list(mini_batches(groups, config.updates_per_batch, config.epochs))
        batch = self._prepare(groups)
        record_advantages(groups, batch.advantages)
        done = [
            self._train_mini_batch(update, batch, version + i) for i, update in enumerate(updates)
        ]
        metrics = batch_metrics(updates, version)
        metrics["learning_rate"] = lr_at(version + len(updates) - 1, config, self._total_steps)
        if batch.values and batch.returns:
            metrics["value/explained_variance"] = explained_variance(batch.values, batch.returns)
        made = [update for update in done if update is not None]
        if not made:
            nothing = ("loss", "grad_norm", "tokens/trained", "rows/trained")
            return metrics | dict.fromkeys(nothing, 0.0)
        table = np.concatenate([update.table for update in made], axis=1)
        metrics["grad_norm"] = sum(update.grad_norm for update in made) / len(made)
        metrics["tokens/trained"] = float(table.shape[1])
        metrics["rows/trained"] = float(sum(update.n_rows for update in made))
        return metrics | token_metrics(table, len(updates), with_kl=config.kl_coef > 0)

    def _prepare(self, groups: list[Group]) -> _Batch:
        """Advantages, and what only the weights before the step can say: the critic's values and,
        when several updates need them, the proximal log-probs."""
        config, longest = self._config, self._max_new_tokens
        corrected = config.correction != "none" and config.updates_per_batch > 1
        if self._value_head is not None:
            logprobs, values = self._evaluate(self._model, groups, lambda sample: sample.valid)
            from_critic, returns = critic_advantages(groups, values, config, longest)
            return _Batch(from_critic, logprobs if corrected else None, values, returns)
        batch = _Batch(advantages(groups, config, longest))
        if corrected:
            logprobs, _ = self._evaluate(self._model, groups, self._is_trained(batch))
            batch = replace(batch, proximal=logprobs)
        return batch

    def _train_mini_batch(self, groups: list[Group], batch: _Batch, version: int) -> _Update | None:
        """One update; None when there was nothing to compute."""
        keep = self._is_trained(batch)
        packs = plan_packs(groups, self._config.micro_batch_tokens, keep)
        if not packs:
            return None
        totals = self._totals(groups)
        self.optimizer.zero_gradients()
        tables = [
            self._accumulate(build_pack(parts, self._model.device), batch, totals, version)
            for parts in packs
        ]
        learning_rate = lr_at(version, self._config, self._total_steps)
        grad_norm = self.optimizer.update(learning_rate, version)
        n_rows = sum(part.n_rows for parts in packs for part in parts)
        return _Update(np.concatenate(tables, axis=1), grad_norm, n_rows)

    def score(self, reference: Transformer, groups: list[Group]) -> None:
        """Sets `ref_logprobs` of every finished sample that has not failed: log-probs under
        `reference` at the sampling temperature."""
        logprobs, _ = self._evaluate(reference, groups, lambda s: s.finished and s.failed is None)
        for sample in (sample for group in groups for sample in group.samples):
            if sample.sample_id in logprobs:
                sample.ref_logprobs = logprobs[sample.sample_id].tolist()

    @torch.no_grad()
    def _evaluate(
        self, model: Transformer, groups: list[Group], keep: Callable[[Sample], bool]
    ) -> tuple[TokenValues, TokenValues]:
        """(log-probs, values) of the kept samples' tokens under `model`; no values without a
        critic, or for another model than the one that is trained."""
        logprobs: TokenValues = {}
        values: TokenValues = {}
        for parts in plan_packs(groups, self._config.micro_batch_tokens, keep):
            pack = build_pack(parts, model.device)
            hidden = _target_rows(model, pack)
            _split(pack, self._logprobs(model, pack, hidden)[0], logprobs)
            if self._value_head is not None and model is self._model:
                _split(pack, self._value_head(hidden), values)
        return logprobs, values

    def _logprobs(self, model: Transformer, pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of the pack's targets, float32 [m] each."""
        return chunked_logprobs(hidden, model.head_weight, pack.targets, self._temperature)

    def release(self) -> None:
        """Gives the gradients' memory back; the next `train` takes it again."""
        self.optimizer.release()

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the version: see `Optimizer.state_tensors`."""
        return self.optimizer.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_tensors` gave, in place, and the weights with it. Raises
        ValueError when names or shapes are those of another model."""
        self.optimizer.load_state_tensors(state)

    def _is_masked(self, sample: Sample) -> bool:
        return self._config.mask_truncated and sample.finish_reason == "length"

    def _is_trained(self, batch: _Batch) -> Callable[[Sample], bool]:
        """Which samples have a gradient."""
        kl_term = self._config.kl_coef > 0 and not self._config.kl_in_reward
        always = kl_term or self._value_head is not None

        def keep(sample: Sample) -> bool:
            if not sample.valid or self._is_masked(sample):
                return False
            return always or bool(batch.advantages[sample.sample_id].any())

        return keep

    def _totals(self, groups: list[Group]) -> Totals:
        valid = [sample for group in groups for sample in group.samples if sample.valid]
        n_tokens = sum(len(sample.token_ids) for sample in valid if not self._is_masked(sample))
        return Totals(len(valid), n_tokens, self._max_new_tokens)

    def _check_batch(self, groups: list[Group], version: int) -> None:
        """The promises of the scheduler, checked where they are consumed."""
        oldest = version + self._config.updates_per_batch - 1 - self._max_staleness
        for sample in (sample for group in groups for sample in group.samples):
            where = f"sample {sample.sample_id} in the training of version {version}"
            assert sample.finished and sample.token_ids, f"{where} is not finished"
            assert sample.valid or sample.failed is not None, f"{where} has no reward"
            assert oldest <= min(sample.versions) <= max(sample.versions) <= version, (
                f"{where} has tokens of versions {min(sample.versions)} to {max(sample.versions)}, "
                f"allowed are {oldest} to {version}"
            )
            if sample.valid and self._config.kl_coef > 0:
                assert sample.ref_logprobs is not None, f"{where} has no reference log-probs"

    def _accumulate(self, pack: Pack, batch: _Batch, totals: Totals, version: int) -> TokenTable:
        """Forward and backward of one micro-batch; adds to the gradients."""
        columns = self._columns(pack, batch, totals)
        versions = np.concatenate([sample.versions for sample in pack.samples])
        fresh = torch.from_numpy((versions == version).astype(np.float32)).to(pack.targets.device)
        hidden = _target_rows(self._model, pack)
        logprobs, entropy = self._logprobs(self._model, pack, hidden)
        losses, stats = policy_losses(logprobs, columns, self._config)
        if self._value_head is not None:
            assert batch.values is not None and batch.returns is not None
            before, returns = _of_pack(batch.values, pack), _of_pack(batch.returns, pack)
            errors = value_losses(
                self._value_head(hidden), before, returns, self._config.value_clip
            )
            losses = losses + self._config.value_coef * columns.weights * errors
        gap = (logprobs.detach() - columns.behaviour).abs()
        values = [losses.detach(), entropy, stats.kl, stats.bound, stats.ratio, gap, fresh]
        table = torch.stack(values).cpu().numpy()  # the only read of the device
        if not np.isfinite(table[0]).all():
            first = pack.sample_of_target[np.isfinite(table[0]).argmin()]
            raise FloatingPointError(
                f"version {version}: the loss is not finite, first in sample "
                f"{tuple(pack.samples[first].sample_id)}; weights are unchanged"
            )
        losses.sum().backward()
        return table

    def _columns(self, pack: Pack, batch: _Batch, totals: Totals) -> Columns:
        samples = pack.samples
        lengths = [len(sample.token_ids) for sample in samples]
        weight = DENOMINATORS[self._config.loss]
        with_kl = self._config.kl_coef > 0
        return Columns(
            lengths=torch.tensor(lengths, device=pack.targets.device),
            behaviour=_column(pack, [sample.logprobs for sample in samples]),
            advantages=_of_pack(batch.advantages, pack),
            weights=_column(pack, [np.full(n, weight(totals, n)) for n in lengths]),
            proximal=None if batch.proximal is None else _of_pack(batch.proximal, pack),
            ref_logprobs=_column(pack, [s.ref_logprobs for s in samples]) if with_kl else None,
        )


@dataclass(frozen=True)
class _Update:
    """One update that was made; `grad_norm` is before clipping."""

    table: TokenTable
    grad_norm: float
    n_rows: int


def mini_batches(groups: list[Group], n_updates: int, epochs: int) -> Iterator[list[Group]]:
    """The groups of each update: every epoch goes through the batch once, groups ascending, in
    n_updates / epochs equal parts (config.check has seen to it that they are)."""
    groups = sorted(groups, key=lambda group: group.group_id)
    size = max(1, len(groups) * epochs // n_updates)
    for _ in range(epochs):
        for start in range(0, len(groups), size):
            yield groups[start : start + size]


def _target_rows(model: Transformer, pack: Pack) -> Tensor:
    """Hidden states of the rows that predict the pack's targets: [m, width], the model's dtype."""
    return model(pack.token_ids, pack.rows).index_select(0, pack.hidden_index)


def _column(pack: Pack, by_sample: Sequence[Any]) -> Tensor:
    """Numbers of each token, sample by sample -> float32 [m] on the pack's device."""
    return torch.from_numpy(np.concatenate(by_sample).astype(np.float32)).to(pack.targets.device)


def _of_pack(values: TokenValues, pack: Pack) -> Tensor:
    return _column(pack, [values[sample.sample_id] for sample in pack.samples])


def _split(pack: Pack, column: Tensor, into: TokenValues) -> None:
    """The opposite of `_of_pack`."""
    parts = column.cpu().split([len(sample.token_ids) for sample in pack.samples])
    for sample, own in zip(pack.samples, parts, strict=True):
        into[sample.sample_id] = own.double().numpy()
