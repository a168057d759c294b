"""Whether a run fits into memory, and if not, what would.

Owns: the comparison of forecast and room, the line that is printed, the refusal with its remedies.
Does not own: the forecast (`ledger`), what a machine has (`meter`). Importable without torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twofold.config import Config
from twofold.memory.ledger import GB, Ledger
from twofold.types import Phase

_STEP_TOKENS = 64  # micro-batches are proposed in multiples of it

Forecast = Callable[[Config], Ledger]


@dataclass(frozen=True)
class _Change:
    """An option and a value for it that needs less memory."""

    section: str
    option: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.section}.{self.option} = {self.value}"

    def applied(self, config: Config) -> Config:
        changed = copy.deepcopy(config)
        setattr(getattr(changed, self.section), self.option, self.value)
        return changed


def require_fit(
    forecast: Forecast, config: Config, longest_prompt_tokens: int, room_bytes: float
) -> str:
    """One line with what each phase will hold. ValueError, in one line, when that is more than
    `room_bytes`: with the options that would make it fit, each computed and enough alone; or with
    some together; or with what the smallest such run needs."""
    ledger = forecast(config)
    phases = ", ".join(f"{p} {ledger.total(p) / GB:.1f} GB" for p in ledger.phases)
    line = f"{phases} (of {room_bytes / GB:.1f} GB)"
    if ledger.peak <= room_bytes:
        return f"memory   {line}"
    remedy = _remedy(forecast, config, longest_prompt_tokens, room_bytes)
    raise ValueError(f"memory cannot hold this run: {line}; {remedy}")


def _remedy(
    forecast: Forecast, config: Config, longest_prompt_tokens: int, room_bytes: float
) -> str:
    def fits(config: Config, *phases: Phase) -> bool:
        ledger = forecast(config)
        return all(ledger.total(p) <= room_bytes for p in phases or ledger.phases)

    packs = _smaller_packs(config, longest_prompt_tokens)
    lanes = _fewer_lanes(config)
    caches = _smaller_caches(config, longest_prompt_tokens)
    dtypes = _bfloat16(config)
    alone = [_first_that_fits(offer, config, fits) for offer in (packs, lanes, caches, dtypes)]
    if any(alone):
        return f"it fits with {', or with '.join(str(change) for change in alone if change)}"
    for changes in ([], dtypes):
        changed = changes[0].applied(config) if changes else config
        together = list(changes)
        governed = ((packs, (Phase.TRAIN,)), (lanes, (Phase.GENERATE, Phase.EVAL)))
        for offer, phases in governed:
            if offer and not fits(changed, *phases):
                least = _first_that_fits(offer, changed, fits, *phases) or offer[-1]
                changed = least.applied(changed)
                together.append(least)
        if fits(changed):
            return f"it fits with {', '.join(map(str, together))} together"
    least_gb = forecast(changed).peak / GB
    return f"even small batches need {least_gb:.1f} GB: take a smaller model, or more memory"


def _first_that_fits(
    offer: Sequence[_Change], config: Config, fits: Callable[..., bool], *phases: Phase
) -> _Change | None:
    """By bisection: an offer goes from what needs most to what needs least."""
    low, high = 0, len(offer)
    while low < high:
        middle = (low + high) // 2
        if fits(offer[middle].applied(config), *phases):
            high = middle
        else:
            low = middle + 1
    return offer[low] if low < len(offer) else None


def _smaller_packs(config: Config, longest_prompt_tokens: int) -> list[_Change]:
    """Not below the longest sample, which is never cut."""
    least = longest_prompt_tokens + config.rollout.max_new_tokens - 1
    least = -(-least // _STEP_TOKENS) * _STEP_TOKENS
    most = (config.train.micro_batch_tokens - 1) // _STEP_TOKENS * _STEP_TOKENS
    sizes = range(most, least - 1, -_STEP_TOKENS)
    return [_Change("train", "micro_batch_tokens", size) for size in sizes]


def _fewer_lanes(config: Config) -> list[_Change]:
    counts = range(config.rollout.max_running_samples - 1, 0, -1)
    return [_Change("rollout", "max_running_samples", count) for count in counts]


def _smaller_caches(config: Config, longest_prompt_tokens: int) -> list[_Change]:
    """Not below what one sample needs."""
    rollout = config.rollout
    size = rollout.kv_block_tokens
    least = -(-longest_prompt_tokens // size) - (-rollout.max_new_tokens // size)
    most = rollout.kv_cache_tokens // size or rollout.max_running_samples * least
    blocks = range(most - 1, least - 1, -1)
    return [_Change("rollout", "kv_cache_tokens", n * size) for n in blocks]


def _bfloat16(config: Config) -> list[_Change]:
    return [_Change("model", "dtype", "bfloat16")] if config.model.dtype == "float32" else []
