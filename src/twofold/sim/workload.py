"""What a simulated run is given to do.

Owns: how long completions are, how long rewards take, which samples get none. Everything about a
group is a function of (seed, group id), whatever happens around it.
Does not own: what decoding or training costs (`executor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class GroupWork:
    prompt_tokens: int
    lengths: tuple[int, ...]  # tokens of each completion
    n_valid: int  # samples whose reward does not fail
    reward_s: float
    varies: bool  # its rewards are not all equal
    pass_rate: float = 0.5  # share of the valid samples that pass


@dataclass(frozen=True)
class Workload:
    """Completions have 1 to `max_tokens` tokens, most few of them, a share `long_tail` the most.

    `reward_s` is the mean of an exponential; a sample's reward fails with `invalid`, and with
    `bad_group` all rewards of a group do; with `solved` they are all equal.
    """

    seed: int
    group_size: int
    max_tokens: int = 16
    long_tail: float = 0.1
    prompt_tokens: int = 8
    reward_s: float = 0.05
    invalid: float = 0.0
    bad_group: float = 0.0
    solved: float = 0.0
    n_groups: int | None = None  # the data ends there; None: never

    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        samples = range(self.group_size)
        lengths = tuple(
            self.max_tokens
            if random.random() < self.long_tail
            else 1 + int((self.max_tokens - 1) * random.random() ** 3)
            for _ in samples
        )
        bad = random.random() < self.bad_group
        n_valid = sum(random.random() >= self.invalid for _ in samples)
        reward_s = random.expovariate(1 / self.reward_s)
        varies = random.random() >= self.solved
        return GroupWork(self.prompt_tokens, lengths, 0 if bad else n_valid, reward_s, varies)
