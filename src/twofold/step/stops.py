"""Stop strings: a completion ends as soon as its decoded text contains one.

Owns: seeing that one has come, without decoding a whole completion at each token, and where the
text ends then. Does not own: stop ids (`generate`), what else the text leaves out (`prompts`).
Importable without torch.

Nothing is kept between tokens, so a completion that is resumed or moved is seen like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN_TOKENS = 4
"""A text that is decoded from the middle may begin wrongly: with up to three bytes of a character
whose first is missing, or without the space before its first word."""


class StopStrings:
    """The texts that end a completion, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        assert texts and all(texts), texts
        self.texts = tuple(texts)
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._without_text = {i for i, token in added.items() if token.special}
        self._n_ids = len(tokenizer)
        # every other token is at least a byte of the text: so many hold the longest stop string
        self._window_tokens = max(len(text.encode()) for text in texts) + _MARGIN_TOKENS

    def reached(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of `token_ids` contains a stop string, given that without the last of
        them it did not. Costs as much for a long completion as for a short one."""
        if not self._has_text(token_ids[-1]):
            return False
        text = self._decode(self._last(token_ids))
        # decoders that join single bytes make one broken character spoil all bytes around it
        doubtful = text.startswith("\ufffd" * _MARGIN_TOKENS)
        if not doubtful and not any(stop in text for stop in self.texts):
            return False
        text = self._decode(token_ids)
        return self.cut(text) != text

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        ends = [end for stop in self.texts if (end := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._without_text and token_id < self._n_ids

    def _last(self, token_ids: Sequence[int]) -> list[int]:
        window: list[int] = []
        for token_id in reversed(token_ids):
            if self._has_text(token_id):
                window.append(token_id)
                if len(window) == self._window_tokens:
                    break
        return window[::-1]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text without special tokens, nothing tidied."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text
