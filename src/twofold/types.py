"""The nouns of Twofold, as plain data.

Owns: prompts, samples, groups, and the small enumerations that everything shares.
Does not own: what travels between scheduler and executor (`events`), options (`config`), tensors.
Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Message = dict[str, str]
"""One chat message: {"role": "user", "content": "What is 2 + 3?"}."""


class Phase(StrEnum):
    """What a card does now."""

    IDLE = "idle"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    PUBLISH = "publish"
    SWITCH = "switch"
    EVAL = "eval"


class SampleId(NamedTuple):
    """A completion: the `index`-th of its group. Group id = ordinal in data order."""

    group_id: int
    index: int  # type: ignore[assignment]  # tuple.index is not used


@dataclass(frozen=True)
class Prompt:
    """What is asked, and what a reward needs to judge the answer.

    `content` is chat messages (the folder's chat template is applied) or plain text (as it is).
    `columns` holds every other column of the data row; rewards get them by name.

    Example: Prompt([{"role": "user", "content": "What is 2 + 3?"}], {"answer": "5"})
    """

    content: list[Message] | str
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)


@dataclass
class Sample:
    """One completion, growing while it is generated. Token ids that were sampled are the ids that
    are trained; nothing is ever decoded and encoded again.

    The four lists have one entry per sampled token (the end token included):
    `token_ids`; `logprobs`, the behaviour log-prob in nats (after temperature, before truncation);
    `kept_logmass`, log of the probability mass that truncation kept (0.0 when truncation is off);
    `versions`, the version of the weights that produced the token.

    Example, after two tokens under version 3:
    Sample(SampleId(7, 0), [22, 2], [-0.11, -0.02], [0.0, 0.0], [3, 3], finish_reason="stop")
    """

    sample_id: SampleId
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_logmass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = (
        None  # "stop" (end token), "length" (max_new_tokens); None: unfinished
    )
    text: str = ""  # decoded once finished, without the end token
    reward: float | None = None  # None: not rewarded yet, or failed
    failed: str | None = None  # why the reward failed; a failed sample has no advantage
    ref_logprobs: list[float] | None = None  # under the reference model, when a KL term needs them
    advantage: float | None = None  # set when the group is trained

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def valid(self) -> bool:
        """Counts in its group's statistics."""
        return self.reward is not None and self.failed is None


@dataclass
class Group:
    """A prompt with its G completions. `start_version`: the version the card held at admission."""

    group_id: int
    prompt: Prompt
    prompt_ids: list[int]
    start_version: int
    deadline: int  # the last version at which it may be trained: start_version + max_staleness
    samples: list[Sample] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)


class Chunk(NamedTuple):
    """Tokens that one quantum appended to one sample: the unit in which generation becomes durable.
    A quantum runs under one version, so a chunk has one."""

    sample_id: SampleId
    start: int  # position of the first token within the completion
    version: int
    token_ids: list[int]
    logprobs: list[float]
    kept_logmass: list[float]
