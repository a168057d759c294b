"""Who does what: the cards of a run, by the jobs they have.

Owns: the numbers of cards with each job, and which cards act together. Does not own: what they do
when (`scheduler`), how weights are laid out on them (the worker).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Unit(NamedTuple):
    """Cards that always do the same thing at the same time: a replica that generates, or all the
    cards that only train, or all that only score."""

    cards: tuple[int, ...]
    generates: bool
    trains: bool
    scores: bool = False  # and nothing else


@dataclass(frozen=True)
class Placement:
    """Of `cards` cards some only generate, only train, or only score (hold the reference model
    alone); the others generate and train. `cards_per_replica` cards generate together.

    Card ids are in this order: both jobs, only train, only generate, only score. Raises ValueError
    for what cannot work.
    """

    cards: int = 1
    generate_only: int = 0
    train_only: int = 0
    score_only: int = 0
    cards_per_replica: int = 1

    def __post_init__(self) -> None:
        for name, low in {"cards": 1, "generate_only": 0, "train_only": 0, "score_only": 0,
                          "cards_per_replica": 1}.items():  # fmt: skip
            if (value := vars(self)[name]) < low:
                raise ValueError(f"{name} is {value}: it must be at least {low}")
        if self.both < 0:
            raise ValueError(
                f"cards is {self.cards}: too few for {self.generate_only} that only generate, "
                f"{self.train_only} that only train and {self.score_only} that only score"
            )
        if not self.both + self.train_only:
            raise ValueError(f"generate_only is {self.generate_only}: no card is left to train")
        if not self.both + self.generate_only:
            raise ValueError(f"train_only is {self.train_only}: no card is left to generate")
        for name in ("both", "generate_only"):
            if (value := getattr(self, name)) % self.cards_per_replica:
                what = "cards with both jobs" if name == "both" else "cards that only generate"
                raise ValueError(
                    f"cards_per_replica is {self.cards_per_replica}: it must divide the {value} "
                    f"{what}"
                )

    @property
    def both(self) -> int:
        """Cards that generate and train."""
        return self.cards - self.generate_only - self.train_only - self.score_only

    @property
    def name(self) -> str:
        """The usual word for it."""
        if self.generate_only and not self.both:
            return "separated"
        if self.generate_only or self.train_only:
            return "mixed"
        return "shared" if self.score_only else "fully_shared"

    def units(self) -> tuple[Unit, ...]:
        """By ascending card id."""
        n = self.cards_per_replica
        ends = self.both + self.train_only + self.generate_only
        units = [
            Unit(tuple(range(first, first + n)), generates=True, trains=True)
            for first in range(0, self.both, n)
        ]
        if self.train_only:
            only = tuple(range(self.both, self.both + self.train_only))
            units.append(Unit(only, generates=False, trains=True))
        units += [
            Unit(tuple(range(first, first + n)), generates=True, trains=False)
            for first in range(ends - self.generate_only, ends, n)
        ]
        if self.score_only:
            cards = tuple(range(ends, self.cards))
            units.append(Unit(cards, generates=False, trains=False, scores=True))
        return tuple(units)
