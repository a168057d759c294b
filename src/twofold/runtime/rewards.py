"""Reward calls by ticket, waits for them, and the stop request that ends such a wait.

Owns: which results are there and not yet taken. Does not own: the processes (`step/reward`), when a
result becomes an event (`runtime/local`).
"""

from __future__ import annotations

import itertools

from twofold.step.reward import RewardJob, RewardPool, RewardResult

STOP_LOOK_S = 0.5  # a signal does not wake who waits for a reward: so often it looks for one


class Rewards:
    """`stop` may be called from a signal handler."""

    def __init__(self, pool: RewardPool) -> None:
        self.stop_reason: str | None = None
        self._pool = pool
        self._results: dict[int, RewardResult] = {}
        self._eval_tickets = itertools.count(-1, -1)

    def stop(self, reason: str) -> None:
        self.stop_reason = reason

    def stopped(self) -> bool:
        return self.stop_reason is not None

    def ask(self, ticket: int, job: RewardJob) -> None:
        self._pool.submit(ticket, job)

    def collect(self, timeout_s: float) -> None:
        """Takes in what is there; waits for the first at most `timeout_s`."""
        for result in self._pool.poll(timeout_s):
            self._results[result.ticket] = result

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._results

    def take(self, ticket: int) -> RewardResult:
        return self._results.pop(ticket)

    def judge(self, jobs: list[RewardJob]) -> list[RewardResult] | None:
        """Results for an evaluation, waited for; None when a stop was asked for meanwhile. Its
        tickets are negative and never used twice: those of training arrive in between."""
        tickets = [next(self._eval_tickets) for _ in jobs]
        for ticket, job in zip(tickets, jobs, strict=True):
            self.ask(ticket, job)
        while any(ticket not in self for ticket in tickets):
            if self.stopped():
                return None
            self.collect(STOP_LOOK_S)
        return [self.take(ticket) for ticket in tickets]
