"""One optimizer update from one batch of groups.

Owns: float32 master weights and optimizer state, gradient accumulation over micro-batches, the
update, and the step's metrics. Does not own: which groups make a batch (`sched`), the layout of a
micro-batch (`pack`), the formula (`loss`), publishing.

The model's parameters are changed in place: generation reads the same storage. A float32 model is
its own master.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twofold.config import TrainConfig
from twofold.model.transformer import Transformer
from twofold.step.advantage import rewards_vary, set_advantages, valid_rewards
from twofold.step.logprob import chunked_logprobs
from twofold.step.loss import grpo_token_losses
from twofold.step.pack import Pack, build_pack, plan_packs
from twofold.types import Group, Sample

TokenTable = np.ndarray
"""float32 [7, m tokens]: loss, entropy, kl, bound, ratio, gap, fresh (see `_token_metrics`)."""


def lr_at(step: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of update `step` (0 is the first). Rises linearly over `warmup_steps` updates,
    the last of which has the peak; then constant, or along a line or half a cosine that would reach
    0 at update `total_steps`, the one after the last."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate


@torch.no_grad()
def load_weights(model: Transformer, state: dict[str, Tensor]) -> None:
    """Fills `model` from what `Trainer.state_tensors` gave, without an optimizer. ValueError when
    they are another model's."""
    for name, parameter in model.named_parameters():
        master = state.get(f"master.{name}")
        if master is None or master.shape != parameter.shape:
            raise ValueError(f"the checkpoint is of another model: {name} is not in it as such")
        parameter.copy_(master)


class Trainer:
    """Trains `model` in place. `temperature` is the one its samples were drawn at."""

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        temperature: float,
        max_staleness: int,
        total_steps: int,
    ):
        self._model = model
        self._config = config
        self._temperature = temperature
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self._parameters = dict(model.named_parameters())
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._optimizer = _adamw(list(self._masters.values()), config)

    def train(self, groups: list[Group], version: int) -> dict[str, float]:
        """Trains `version` into version + 1 and returns the step's metrics; sets the advantages.

        Failed samples are left out. Samples whose advantage is 0 (all of a group whose rewards are
        equal) count in the denominator but are not computed, unless the KL term needs them. With
        nothing to compute AdamW makes no step (no decay, no momentum); the learning rate follows
        the version, so its schedule goes on.

        Raises FloatingPointError, with weights and optimizer unchanged, when a loss or a gradient
        is not finite.
        """
        self._check_batch(groups, version)
        for group in groups:
            set_advantages(group)
        learning_rate = lr_at(version, self._config, self._total_steps)
        metrics = {"learning_rate": learning_rate, **_batch_metrics(groups, version)}
        packs = plan_packs(groups, self._config.micro_batch_tokens, self._is_trained)
        if not packs:
            nothing = ("loss", "grad_norm", "tokens/trained", "rows/trained")
            return metrics | dict.fromkeys(nothing, 0.0)
        n_valid = sum(sample.valid for group in groups for sample in group.samples)
        self._zero_gradients()
        tables = [
            self._accumulate(build_pack(parts, self._model.device), n_valid, version)
            for parts in packs
        ]
        table = np.concatenate(tables, axis=1)
        metrics["grad_norm"] = self._update(learning_rate, version)
        metrics["tokens/trained"] = float(table.shape[1])
        metrics["rows/trained"] = float(sum(part.n_rows for parts in packs for part in parts))
        return metrics | _token_metrics(table, with_kl=self._config.kl_coef > 0)

    @torch.no_grad()
    def score(self, reference: Transformer, groups: list[Group]) -> None:
        """Sets `ref_logprobs` of every finished sample that has not failed: log-probs under
        `reference` at the sampling temperature."""
        packs = plan_packs(
            groups, self._config.micro_batch_tokens, lambda s: s.finished and s.failed is None
        )
        for parts in packs:
            pack = build_pack(parts, reference.device)
            logprobs, _ = _pack_logprobs(reference, pack, self._temperature)
            lengths = [len(sample.token_ids) for sample in pack.samples]
            for sample, values in zip(pack.samples, logprobs.split(lengths), strict=True):
                sample.ref_logprobs = values.tolist()

    def release(self) -> None:
        """Gives the gradients' memory back; the next `train` takes it again."""
        for master in self._masters.values():
            master.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the version, without copies: per parameter NAME
        "master.NAME", "exp_avg.NAME", "exp_avg_sq.NAME" (float32), and "step" (AdamW steps)."""
        state = {}
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            state[f"master.{name}"] = master.detach()
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
            state["step"] = moments["step"]  # one count for all parameters
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_tensors` gave, in place, and the weights with it. Raises
        ValueError when names or shapes are those of another model."""
        mine = self.state_tensors()
        odd = set(mine) ^ set(state) or {k for k in mine if mine[k].shape != state[k].shape}
        if odd:
            raise ValueError(
                f"optimizer state does not fit the model: {min(odd)} (and {len(odd) - 1} more) "
                "differ; resume with the model the run was started with"
            )
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            master.copy_(state[f"master.{name}"])
            moments["exp_avg"].copy_(state[f"exp_avg.{name}"])
            moments["exp_avg_sq"].copy_(state[f"exp_avg_sq.{name}"])
            moments["step"].copy_(state["step"])
        self._copy_masters_to_model()

    def _is_trained(self, sample: Sample) -> bool:
        return sample.valid and (self._config.kl_coef > 0 or sample.advantage != 0)

    def _check_batch(self, groups: list[Group], version: int) -> None:
        """The promises of the scheduler, checked where they are consumed."""
        oldest = version - self._max_staleness
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

    def _zero_gradients(self) -> None:
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    def _accumulate(self, pack: Pack, n_valid: int, version: int) -> TokenTable:
        """Forward and backward of one micro-batch; adds to the gradients."""
        columns = _columns(pack, n_valid, version, self._config.kl_coef > 0)
        logprobs, entropy = _pack_logprobs(self._model, pack, self._temperature)
        losses, stats = grpo_token_losses(
            logprobs,
            columns.behaviour,
            columns.advantages,
            columns.weights,
            columns.ref_logprobs,
            self._config,
        )
        gap = (logprobs.detach() - columns.behaviour).abs()
        values = [losses.detach(), entropy, stats.kl, stats.bound, stats.ratio, gap, columns.fresh]
        table = torch.stack(values).cpu().numpy()  # the only read of the device
        if not np.isfinite(table[0]).all():
            first = pack.sample_of_target[np.isfinite(table[0]).argmin()]
            raise FloatingPointError(
                f"version {version}: the loss is not finite, first in sample "
                f"{tuple(pack.samples[first].sample_id)}; weights are unchanged"
            )
        losses.sum().backward()
        return table

    @torch.no_grad()
    def _update(self, learning_rate: float, version: int) -> float:
        """Clips, steps, and copies the masters into the model; returns the norm before clipping."""
        masters = list(self._masters.values())
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"version {version}: the gradient is not finite, first in {self._first_bad()}; "
                "weights are unchanged"
            )
        if self._config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(masters, self._config.max_grad_norm, norm)
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = learning_rate
        self._optimizer.step()
        self._copy_masters_to_model()
        return grad_norm

    def _first_bad(self) -> str:
        for name, master in self._masters.items():
            if master.grad is not None and not master.grad.isfinite().all():
                return name
        return "the norm over all parameters"

    def _copy_masters_to_model(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not self._masters[name]:
                    parameter.copy_(self._masters[name])


@dataclass(frozen=True)
class _Columns:
    """Per-target tensors of a pack, float32 [m] on its device."""

    behaviour: Tensor
    fresh: Tensor  # 1 where the token is of the version being trained, else 0
    advantages: Tensor
    weights: Tensor  # 1 / (valid samples of the step x tokens of the sample)
    ref_logprobs: Tensor | None


def _master(parameter: Tensor) -> Tensor:
    """The float32 tensor that the optimizer updates, and whose `grad` the gradients add up in."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float()

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None and master.grad is not None
        master.grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
    return master


def _adamw(masters: list[Tensor], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with its state allocated, so that a checkpoint before the first step has one too.
    Vectors (norm gains, biases) are not decayed."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [m for m in masters if m.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for master in masters:
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }
    return optimizer


def _pack_logprobs(model: Transformer, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the pack's targets, float32 [m] each."""
    hidden = model(pack.token_ids, pack.rows).index_select(0, pack.hidden_index)
    return chunked_logprobs(hidden, model.head_weight, pack.targets, temperature)


def _columns(pack: Pack, n_valid: int, version: int, with_reference: bool) -> _Columns:
    device = pack.targets.device
    lengths = [len(sample.token_ids) for sample in pack.samples]

    def per_sample(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)

    def per_token(lists: list[list[float]] | list[list[int]]) -> Tensor:
        return torch.from_numpy(np.concatenate(lists).astype(np.float32)).to(device)

    samples = pack.samples
    return _Columns(
        behaviour=per_token([sample.logprobs for sample in samples]),
        fresh=(per_token([sample.versions for sample in samples]) == version).float(),
        advantages=per_sample([sample.advantage or 0.0 for sample in samples]),
        weights=per_sample([1 / (n_valid * length) for length in lengths]),
        ref_logprobs=per_token([sample.ref_logprobs or [] for sample in samples])
        if with_reference
        else None,
    )


def _token_metrics(table: TokenTable, with_kl: bool) -> dict[str, float]:
    """Means over the tokens that were computed. clip_fraction: share of them whose clip (or, with
    truncated correction, importance cap) bound; ratio: current over behaviour probability, of
    stale tokens too; logprob_gap: |log-prob in training - behaviour| of the tokens of the version
    being trained."""
    loss, entropy, kl, bound, ratio, gap, fresh = table.astype(np.float64)
    metrics = {
        "loss": loss.sum(),
        "entropy": entropy.mean(),
        "clip_fraction": bound.mean(),
        "ratio/mean": ratio.mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
    }
    if with_kl:
        metrics["kl"] = kl.mean()
    if fresh.any():
        metrics["logprob_gap/mean"] = gap[fresh > 0].mean()
        metrics["logprob_gap/max"] = gap[fresh > 0].max()
    return {name: float(value) for name, value in metrics.items()}


def _batch_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """What the batch says before it is trained. Rewards, lengths and staleness are over valid
    samples and left out when there is none."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in valid_rewards(group)]
    no_variance = [not rewards_vary(valid_rewards(group)) for group in groups]
    metrics = {
        "groups/no_variance": float(sum(no_variance)),
        "samples/failed": float(len(samples) - len(rewards)),
    }
    if not rewards:
        return metrics
    valid = [sample for sample in samples if sample.valid]
    lengths = [len(sample.token_ids) for sample in valid]
    staleness = version - np.concatenate([sample.versions for sample in valid])
    return metrics | {
        "reward/mean": statistics.mean(rewards),  # exact: a sum of floats may overflow
        "reward/std": statistics.pstdev(rewards),
        "pass_rate": sum(reward >= 1 for reward in rewards) / len(rewards),
        "length/mean": statistics.fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": sum(s.finish_reason == "length" for s in valid) / len(valid),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
