"""Which of several simulated ways to run a job is the best, and the words for it.

Owns: the choice, and what is said of staleness and of waiting, for every search. Does not own: what
is compared (`plan` on a cluster, `here` on this machine).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from twofold.sim.window import Outcome

WORTHWHILE = 0.02  # a gain below this is no reason to train on staler tokens

Progress = Callable[[int, int], None]
"""Is told how many candidates (of a simulated run: steps) are done, of how many."""


class Ranked(Protocol):
    @property
    def max_staleness(self) -> int: ...

    @property
    def outcome(self) -> Outcome: ...


R = TypeVar("R", bound=Ranked)


def ranked(rows: Sequence[R]) -> list[R]:
    """Fastest first; of equals, in the order given."""
    return sorted(rows, key=lambda row: -row.outcome.tokens_per_s)


def choose(rows: Sequence[R]) -> R:
    """Of ranked rows the fastest; but of those within `WORTHWHILE` of it, the one with the smallest
    bound on staleness."""
    near = [row for row in rows if gain(rows[0], row) < WORTHWHILE]
    return min(near, key=lambda row: row.max_staleness)  # the fastest of equals


def left_out(rows: Sequence[R], best: R) -> str:
    """Why the best of ranked rows is not the fastest, in words; empty when it is."""
    if rows[0] is best:
        return ""
    return (
        f"The fastest, with S = {rows[0].max_staleness}, gains {gain(rows[0], best):+.1%}: too "
        "little to train on staler tokens."
    )


def gain(row: Ranked, over: Ranked) -> float:
    """In tokens/s; 0.1 is 10 % more."""
    return row.outcome.tokens_per_s / over.outcome.tokens_per_s - 1


def asynchrony(rows: Sequence[Ranked]) -> str:
    """What S > 0 buys among ranked rows, in words; empty when only one kind was tried."""
    synchronous = next((row for row in rows if row.max_staleness == 0), None)
    stale = next((row for row in rows if row.max_staleness > 0), None)
    if synchronous is None or stale is None:
        return ""
    gained = gain(stale, synchronous)
    if gained < WORTHWHILE:
        return (
            f"Asynchrony does not help here: the best with S > 0 gains {gained:+.1%} over the best "
            f"with S = 0, {spent(synchronous.outcome)}. Run with S = 0."
        )
    words = (
        f"Asynchrony gains {gained:.0%}: S = {stale.max_staleness} against S = 0, "
        f"{spent(synchronous.outcome)}; its trained tokens are "
        f"{stale.outcome.mean_staleness:.2f} versions old on average."
    )
    waits = sum(synchronous.outcome.idle.values())
    if gained > waits / (1 - waits) + WORTHWHILE:
        words += (
            " That is more than the end of waiting gives: samples of the next batches fill decode "
            "slots that a long tail leaves empty."
        )
    return words


def waiting(outcome: Outcome) -> str:
    """The share of the time that cards wait, with the main cause: "12% of the time (most: ...)"."""
    cause = next(iter(outcome.idle), "")
    most = f" (most: {cause})" if outcome.idle.get(cause, 0.0) >= 0.01 else ""
    return f"{sum(outcome.idle.values()):.0%} of the time{most}"


def spent(outcome: Outcome) -> str:
    """Where the time goes: what a larger S could fill, and what it could not."""
    work = ", ".join(f"{share:.0%} {kind}" for kind, share in _large(outcome.busy, 0.05))
    return f"whose cards wait {waiting(outcome)} and spend {work or 'nothing'}"


def ages(staleness: Mapping[int, float]) -> str:
    """The distribution of the trained tokens: "0: 45%, 1: 55%"."""
    return ", ".join(f"{age}: {share:.0%}" for age, share in staleness.items())


def causes(idle: Mapping[str, float]) -> str:
    return ", ".join(f"{cause} {share:.0%}" for cause, share in _large(idle, 0.005)) or "none"


def _large(shares: Mapping[str, float], least: float) -> list[tuple[str, float]]:
    return [(name, share) for name, share in shares.items() if share >= least]
