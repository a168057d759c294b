"""Does this run fit this machine? Asked before anything large is loaded.

Owns: bringing together the decoder's shape, the longest prompt and the machine's room. Does not
own: the arithmetic (`memory.ledger`), the answer (`memory.fit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from twofold.config import Config
from twofold.memory.fit import Forecast, require_fit
from twofold.memory.ledger import GB, forecast
from twofold.memory.meter import room_bytes
from twofold.model import cpu_kernels, weights
from twofold.step.prompts import encode_prompt
from twofold.tasks.load import Task
from twofold.types import Prompt

_ENCODED = 64  # candidates for the longest prompt


def check_memory(config: Config, folder: Path, task: Task, device: torch.device) -> str:
    """The line that says what each phase will hold; see `require_fit`."""
    predict, longest = forecaster(config, folder, task, device)
    room = config.run.memory_limit_gb * GB or room_bytes(device)
    return require_fit(predict, config, longest, room)


def forecaster(
    config: Config, folder: Path, task: Task, device: torch.device
) -> tuple[Forecast, int]:
    """The ledger of these options, or of changed ones, for this model, data and device; and the
    tokens of the longest prompt."""
    spec = weights.read_spec(folder)
    longest = _longest_prompt_tokens(config, folder, [*task.train, *task.held_out])
    kernels = device.type == "cpu" and not cpu_kernels.why_not_used()
    return lambda changed: forecast(spec, changed, longest, device.type, kernels), longest


def _longest_prompt_tokens(config: Config, folder: Path, prompts: Iterable[Prompt]) -> int:
    """Tokens of the longest prompt: of those with the most bytes, as all are encoded later."""
    tokenizer = weights.load_tokenizer(folder)
    candidates = sorted(prompts, key=_n_bytes)[-_ENCODED:]
    system = config.task.system_prompt
    return max((len(encode_prompt(p, tokenizer, system)) for p in candidates), default=0)


def _n_bytes(prompt: Prompt) -> int:
    if isinstance(prompt.content, str):
        return len(prompt.content.encode())
    return sum(len(str(message["content"]).encode()) for message in prompt.content)
