"""Prompts: in which order they are asked, and the token ids they become.

Owns: group id -> prompt (data order), prompt -> token ids, completion ids -> text.
Does not own: where prompts come from (`tasks`), what is done with the ids (`generate`).
Importable without torch.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from twofold.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSource:
    """Endless data order: group id g asks item `permutation(epoch)[g mod n]`, epoch = g div n.

    Each epoch is a seeded permutation of its own, so every prompt is asked exactly once an epoch.
    The answer is a pure function of (prompts, seed, group id): whoever asks, in whatever order,
    before or after a crash, gets the same prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Raises ValueError when there are no prompts."""
        if not prompts:
            raise ValueError("task: no prompts to train on; lower task.held_out or add data")
        self._prompts = prompts
        self._seed = seed
        self._orders: dict[int, list[int]] = {}  # the epochs asked for lately

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def prompt(self, group_id: int) -> Prompt:
        return self._prompts[self.item(group_id)]

    def item(self, group_id: int) -> int:
        """Which of the prompts the group asks."""
        assert group_id >= 0, group_id
        epoch, place = divmod(group_id, len(self._prompts))
        return self._order(epoch)[place]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # a string seed is hashed by sha512, so it is the same in every process
            order = list(range(len(self._prompts)))
            random.Random(f"data order {self._seed} epoch {epoch}").shuffle(order)
            # groups of two neighbouring epochs may live at once; older ones are cheap to remake
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = order
        return self._orders[epoch]


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
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_ids: Collection[int]
) -> str:
    """What rewards and readers see of a completion: its text without the end token.

    Other special tokens are left out as well, as rewards written for TRL expect. Only for looking
    and judging: training uses the sampled ids.
    """
    ids = list(token_ids)
    if ids and ids[-1] in stop_ids:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
