"""Prompts: in which order they are asked, and the token ids they become.

Owns: group id -> prompt (data order), prompt -> token ids, completion ids -> text.
Does not own: where prompts come from (`tasks`), what is done with the ids (`generate`).
Importable without torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from twofold.step.stops import StopStrings, decode
from twofold.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSource:
    """Endless data order: a pure function of (prompts, shares, seed, group id), so whoever asks, in
    whatever order, before or after a crash, gets the same prompt.

    Each epoch of a source is a seeded permutation of its own, so every prompt is asked exactly once
    an epoch. With several sources, groups come in cycles: of the L groups of a cycle, source k asks
    exactly its quota q_k = L x weight / sum of weights, in a seeded order. So before group g it has
    been asked (g div L) x q_k times and what the order of the cycle adds, and all its n_k prompts
    have been asked after at most ceil(n_k / q_k) cycles.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shares: Sequence[tuple[int, float]] = ()
    ) -> None:
        """`shares`: number of prompts and weight of each source, whose prompts stand one source
        after the other; empty: one source. Raises ValueError when there are no prompts, or a weight
        is too small beside the others."""
        if not prompts:
            raise ValueError("task: no prompts to train on; lower task.held_out or add data")
        assert not shares or sum(n for n, _ in shares) == len(prompts), shares
        self._prompts = prompts
        if len(shares) <= 1:
            self._quotas = [1]
            self._sources = [_Shuffled(range(len(prompts)), f"data order {seed}")]
            self._cycles = _Shuffled([0], f"mixture {seed}")
            return
        self._quotas = quotas([weight for _, weight in shares])
        self._sources = []
        first = 0
        for k, (n, _) in enumerate(shares):
            order = f"data order {seed} source {k}"
            self._sources.append(_Shuffled(range(first, first + n), order))
            first += n
        cycle = [k for k, quota in enumerate(self._quotas) for _ in range(quota)]
        self._cycles = _Shuffled(cycle, f"mixture {seed}")

    def __len__(self) -> int:
        """Prompts of all sources."""
        return len(self._prompts)

    def prompt(self, group_id: int) -> Prompt:
        return self._prompts[self.item(group_id)]

    def item(self, group_id: int) -> int:
        """Which of the prompts the group asks."""
        assert group_id >= 0, group_id
        n_cycles, place = divmod(group_id, sum(self._quotas))
        cycle = self._cycles.epoch(n_cycles)
        source = cycle[place]
        n_before = n_cycles * self._quotas[source] + cycle[:place].count(source)
        return self._sources[source][n_before]


class _Shuffled:
    """Endless: all items in one order, then all in another, and so on."""

    def __init__(self, items: Sequence[int], name: str) -> None:
        self._items = items
        self._name = name
        self._orders: dict[int, list[int]] = {}  # the epochs asked for lately

    def __getitem__(self, n: int) -> int:
        epoch, place = divmod(n, len(self._items))
        return self.epoch(epoch)[place]

    def epoch(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # a string seed is hashed by sha512, so it is the same in every process
            order = list(self._items)
            random.Random(f"{self._name} epoch {epoch}").shuffle(order)
            # groups of two neighbouring epochs may live at once; older ones are cheap to remake
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = order
        return self._orders[epoch]


MAX_CYCLE = 1000
"""Groups in one cycle of a mixture at most; shares are exact or rounded to a part of this."""


def quotas(weights: Sequence[float]) -> list[int]:
    """How many of the groups of a cycle each source asks: the shortest cycle in which the shares
    are exact, else one of `MAX_CYCLE` with the largest remainders rounded up. Raises ValueError for
    a source that would never be asked."""
    shares = [weight / sum(weights) for weight in weights]
    for length in range(1, MAX_CYCLE):
        counts = [share * length for share in shares]
        whole = [round(count) for count in counts]
        if all(n and abs(count - n) < 1e-6 for count, n in zip(counts, whole, strict=True)):
            return whole
    counts = [share * MAX_CYCLE for share in shares]
    whole = [math.floor(count) for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda k: whole[k] - counts[k])
    for k in by_remainder[: MAX_CYCLE - sum(whole)]:
        whole[k] += 1
    if 0 in whole:
        raise ValueError(
            f"task.mixture: weight {weights[whole.index(0)]:g} is less than a thousandth of the "
            "sum; give more, or leave the source out"
        )
    return whole


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, system_prompt: str = ""
) -> list[int]:
    """Token ids of a prompt, ready for the first token of the reply.

    Chat messages go through the folder's chat template up to the start of the assistant's turn;
    `system_prompt` (when not empty) is put before messages that have no system message, and what
    the template itself adds when there is none stays the template's business. Plain text is encoded
    as the tokenizer does by default, special tokens included (a Llama tokenizer adds its
    beginning-of-text token, SmolLM2's adds nothing); `system_prompt` does not apply to it.

    Raises ValueError when chat messages meet a tokenizer without a chat template, and when nothing
    is left to condition on.
    """
    if isinstance(prompt.content, str):
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(
                "model.name: this tokenizer has no chat template, so chat prompts cannot be "
                "encoded; give prompts as plain text or take an instruct model"
            )
        messages = prompt.content
        if system_prompt and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # the template has written its special tokens as text already
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"task: prompt {prompt.content!r} has no tokens; give it some text")
    return list(ids)


def decode_completion(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    stop_ids: Collection[int],
    stop_strings: StopStrings | None = None,
) -> str:
    """What rewards and readers see of a completion: its text without the end token, and without a
    stop string and what follows it.

    Other special tokens are left out as well, as rewards written for TRL expect. Only for looking
    and judging: training uses the sampled ids.
    """
    ids = list(token_ids)
    if ids and ids[-1] in stop_ids:
        ids.pop()
    text = decode(tokenizer, ids)
    return text if stop_strings is None else stop_strings.cut(text)
