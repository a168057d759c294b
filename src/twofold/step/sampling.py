"""From logits to token ids, with the log-probs that training needs.

Owns: the sampling options, truncation, the draw. Does not own: the noise (`noise`), the definition
of logits and log-probs (`logprob`), when to stop (`generate`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.model import cpu_kernels, logits_cpu
from twofold.step.logprob import token_logprobs
from twofold.step.stops import StopStrings

_RANKED_FIRST = 1024  # top_p looks at this many likeliest tokens before it sorts the vocabulary
_BLOCK = 256  # the draw finds its block of the vocabulary first, then the token in it


@dataclass(frozen=True)
class Sampling:
    """How a completion is sampled and where it ends. Truncation is off by default."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    max_new_tokens: int = 64  # the end token included
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    greedy: bool = False  # always the likeliest token; log-probs are still those at `temperature`

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, it must be above 0; for the likeliest token "
                "always, ask for greedy decoding"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 0 (0: off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1 (1: off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, it must be between 0 (off) and 1")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, it must be at least 1")

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def sample(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row.

    logits [n, vocabulary] of any dtype, not divided by the temperature (`Transformer.logits`), n
    above 1; uniforms float64 [n] in (0, 1) -> token ids int64 [n]; log-probs float32 [n] in nats,
    before truncation; kept log-mass float32 [n], the log of the probability that truncation left.
    A row's result depends on that row and its uniform alone. A token of probability 0, or one that
    truncation removed, is never drawn.
    """
    temperature = sampling.temperature
    nothing_lost = torch.zeros(len(logits), device=logits.device)
    if sampling.greedy:
        token_ids = logits.argmax(-1)
        return token_ids, token_logprobs(logits, token_ids, temperature), nothing_lost
    if not sampling.truncates and cpu_kernels.used_for(logits):
        return *logits_cpu.draw(logits, uniforms, temperature), nothing_lost
    probs = logits.float().div(temperature).softmax(-1)
    if sampling.truncates:
        probs = probs * (probs >= _threshold(probs, sampling)[:, None])
    token_ids, mass = _draw(probs, uniforms)
    # without truncation the mass is 1 but for rounding
    kept_logmass = mass.clamp(max=1).log().float() if sampling.truncates else nothing_lost
    return token_ids, token_logprobs(logits, token_ids, temperature), kept_logmass


def _threshold(probs: Tensor, sampling: Sampling) -> Tensor:
    """The smallest probability that truncation keeps, [n]: top_k, then top_p of what top_k kept,
    then min_p. Tokens exactly as likely as the last one kept are kept too: order never decides."""
    vocab = probs.shape[-1]
    if not sampling.top_k and sampling.top_p == 1:
        return probs.amax(-1) * sampling.min_p
    n_ranked = min(sampling.top_k or _RANKED_FIRST, vocab)
    ranked = probs.topk(n_ranked).values
    reached = ranked.cumsum(-1, dtype=torch.float64)
    threshold = ranked[:, -1] if sampling.top_k else torch.zeros_like(ranked[:, 0])
    if sampling.top_p < 1:
        mass = reached[:, -1] if sampling.top_k else probs.sum(-1, dtype=torch.float64)
        wanted = (mass * sampling.top_p)[:, None]
        if not sampling.top_k and (reached[:, -1:] < wanted).any():
            ranked = probs.sort(-1, descending=True).values  # rare, at ten times the cost
            reached = ranked.cumsum(-1, dtype=torch.float64)
        n_below = (reached[:, :-1] < wanted).sum(-1, keepdim=True)
        threshold = threshold.maximum(ranked.gather(-1, n_below).squeeze(-1))
    return threshold.maximum(ranked[:, 0] * sampling.min_p)


def _draw(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of the cumulative distribution in vocabulary order.

    probs float32 [n, vocabulary], not necessarily summing to 1; uniforms float64 [n] -> token ids
    int64 [n], total mass float64 [n]. Sums are float64. Summing blocks and then looking into one of
    them costs a quarter of a cumulative sum over the vocabulary.
    """
    n, vocab = probs.shape
    if vocab % _BLOCK:
        probs = F.pad(probs, (0, -vocab % _BLOCK))
    blocks = probs.view(n, -1, _BLOCK)
    block_masses = blocks.sum(-1, dtype=torch.float64)
    mass = block_masses.sum(-1)
    target = mass * uniforms
    block, before = _pick(block_masses, target)
    inside = blocks[torch.arange(n, device=probs.device), block].double()
    token, _ = _pick(inside, target - before)
    # only logits that are not numbers lead outside the vocabulary; the generator refuses those
    return (block * _BLOCK + token).clamp(max=vocab - 1), mass


def _pick(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """masses float64 [n, m], target float64 [n] -> the first index whose cumulative mass exceeds
    the target, int64 [n], and the mass before it, float64 [n]. An entry without mass is never
    picked: where rounding leaves the target unreached, the last entry with mass is."""
    reached = masses.cumsum(-1)
    positive = masses > 0
    hit = positive & (reached > target[:, None])
    last = masses.shape[-1] - 1 - positive.flip(-1).int().argmax(-1)
    index = torch.where(hit.any(-1), hit.int().argmax(-1), last)[:, None]
    before = reached.gather(-1, index) - masses.gather(-1, index)
    return index.squeeze(-1), before.squeeze(-1)
