"""AdamW on float32 masters of the parameters.

Owns: the masters, the gradients that add up in them, the optimizer's state and its form in a
checkpoint, the learning rate, clipping the norm, the update. Does not own: where gradients come
from (`train`).

Parameters are changed in place: generation reads the same storage. A float32 parameter is its own
master.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from twofold.config import TrainConfig


def lr_at(version: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of the update that trains `version` (0 is the first). Rises linearly over
    `warmup_steps` updates, the last of which has the peak; then constant, or along a line or half a
    cosine that would reach 0 at the update after the last of `total_steps` steps."""
    if version < config.warmup_steps:
        return config.learning_rate * (version + 1) / config.warmup_steps
    n_updates = total_steps * config.updates_per_batch
    progress = (version - config.warmup_steps) / max(1, n_updates - config.warmup_steps)
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate


class Optimizer:
    """AdamW over named parameters. Vectors (norm gains, biases) are not decayed. Those named in
    `rates` have a learning rate of their own, as a multiple of the others'."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: TrainConfig,
        rates: dict[str, float] | None = None,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self.masters = {name: _master(p) for name, p in parameters.items()}
        self._adamw = _adamw(self.masters, config, rates or {})

    def zero_gradients(self) -> None:
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    def release(self) -> None:
        """Gives the gradients' memory back; the next `zero_gradients` takes it again."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def update(self, learning_rate: float, version: int) -> float:
        """Clips, steps, and copies the masters into the parameters; returns the norm before
        clipping. Raises FloatingPointError, with everything as it was, when that is not finite."""
        masters = list(self.masters.values())
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"version {version}: the gradient is not finite, first in {self._first_bad()}; "
                "weights are unchanged"
            )
        if self._config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(masters, self._config.max_grad_norm, norm)
        for param_group in self._adamw.param_groups:
            param_group["lr"] = learning_rate * param_group["rate"]
        self._adamw.step()
        self._copy_masters_to_parameters()
        return grad_norm

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the version, without copies: per parameter NAME
        "master.NAME", "exp_avg.NAME", "exp_avg_sq.NAME" (float32), and "step" (AdamW steps)."""
        state = {}
        for name, master in self.masters.items():
            moments = self._adamw.state[master]
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
        for name, master in self.masters.items():
            moments = self._adamw.state[master]
            master.copy_(state[f"master.{name}"])
            moments["exp_avg"].copy_(state[f"exp_avg.{name}"])
            moments["exp_avg_sq"].copy_(state[f"exp_avg_sq.{name}"])
            moments["step"].copy_(state["step"])
        self._copy_masters_to_parameters()

    def _first_bad(self) -> str:
        for name, master in self.masters.items():
            if master.grad is not None and not master.grad.isfinite().all():
                return name
        return "the norm over all parameters"

    def _copy_masters_to_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not self.masters[name]:
                    parameter.copy_(self.masters[name])


@torch.no_grad()
def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fills `model` from what `Optimizer.state_tensors` gave, without an optimizer. ValueError when
    they are another model's."""
    for name, parameter in model.named_parameters():
        master = state.get(f"master.{name}")
        if master is None or master.shape != parameter.shape:
            raise ValueError(f"the checkpoint is of another model: {name} is not in it as such")
        parameter.copy_(master)


def _master(parameter: nn.Parameter) -> Tensor:
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


def _adamw(
    masters: dict[str, Tensor], config: TrainConfig, rates: dict[str, float]
) -> torch.optim.AdamW:
    """With its state allocated, so that a checkpoint before the first step has one too."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, master in masters.items():
        decay = config.weight_decay if master.ndim > 1 else 0.0
        groups.setdefault((decay, rates.get(name, 1.0)), []).append(master)
    optimizer = torch.optim.AdamW(
        [
            {"params": params, "weight_decay": decay, "rate": rate}
            for (decay, rate), params in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for master in masters.values():
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }
    return optimizer
