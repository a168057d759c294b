"""The rule's arithmetic against its definition, by brute force on small instances."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import pytest

from twofold.sched.budget import Choice, Live, choose_batch, feasible, has_batch, may_start


def feasible_by_counts(deadlines: list[int], t: int, p: int) -> bool:
    """DESIGN's words: none < t, and for every k at most (k + 1) P of them <= t + k."""
    horizon = max(deadlines, default=t) - t
    counts = (sum(d <= t + k for d in deadlines) <= (k + 1) * p for k in range(horizon + 1))
    return all(d >= t for d in deadlines) and all(counts)


def some_order_is_in_time(deadlines: tuple[int, ...], t: int, p: int) -> bool:
    """Whether any way of training P at a time trains each by its deadline."""
    if not deadlines:
        return True
    if min(deadlines) < t:
        return False
    size = min(p, len(deadlines))
    batches = combinations(range(len(deadlines)), size)
    rest = ([d for i, d in enumerate(deadlines) if i not in batch] for batch in batches)
    return any(some_order_is_in_time(tuple(left), t + 1, p) for left in rest)


def random_live(random: Random) -> tuple[list[Live], list[Live], int, int]:
    """A feasible set: ready in random order of readiness, and waiting."""
    t, p = random.randint(0, 3), random.randint(1, 3)
    s = random.randint(0, 3)
    deadlines: list[int] = []
    for _ in range(random.randint(0, (s + 1) * p)):
        deadline = t + random.randint(0, s)
        if feasible([*deadlines, deadline], t, p):
            deadlines.append(deadline)
    live = [Live(gid, deadline) for gid, deadline in enumerate(deadlines)]
    random.shuffle(live)
    n_ready = random.randint(0, len(live))
    return live[:n_ready], live[n_ready:], t, p


def best_batch(ready: list[Live], waiting: list[Live], t: int, p: int) -> tuple[int, ...] | None:
    """The first of all allowed batches in order of readiness. combinations() yields them so."""
    for batch in combinations(ready, p):
        rest = [g.deadline for g in (*ready, *waiting) if g not in batch]
        if feasible(rest, t + 1, p):
            return tuple(g.group_id for g in batch)
    return None


def test_feasible_is_its_definition_and_means_that_all_can_be_in_time() -> None:
    random = Random(1)
    seen = set()
    for _ in range(2000):
        t, p = random.randint(0, 3), random.randint(1, 3)
        deadlines = [t + random.randint(-1, 3) for _ in range(random.randint(0, 7))]
        expected = feasible_by_counts(deadlines, t, p)
        assert feasible(deadlines, t, p) == expected, (deadlines, t, p)
        if len(deadlines) <= 6:
            assert some_order_is_in_time(tuple(deadlines), t, p) == expected, (deadlines, t, p)
        seen.add(expected)
    assert seen == {True, False}


def test_may_start_is_the_most_that_stays_feasible() -> None:
    random = Random(2)
    for _ in range(2000):
        ready, waiting, t, p = random_live(random)
        deadlines = [g.deadline for g in (*ready, *waiting)]
        deadline = t + random.randint(-1, 4)
        n = may_start(Counter(deadlines), deadline, t, p)
        assert n == 0 or feasible([*deadlines, *[deadline] * n], t, p), (deadlines, deadline)
        assert not feasible([*deadlines, *[deadline] * (n + 1)], t, p), (deadlines, deadline)


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_weights_that_lag_cost_their_lag(lag: int) -> None:
    """Capacity (S + 1 - L) P; a card with a + S < t admits nothing."""
    s, p, t = 2, 4, 10
    assert may_start({}, t - lag + s, t, p) == (s + 1 - lag) * p


def test_the_batch_is_the_first_ready_first_of_all_that_are_allowed() -> None:
    random = Random(3)
    seen = set()
    for _ in range(5000):
        ready, waiting, t, p = random_live(random)
        expected = best_batch(ready, waiting, t, p)
        choice = choose_batch(ready, waiting, t, p)
        assert choice.batch == expected, (ready, waiting, t, p)
        ready_due = Counter(g.deadline for g in ready)
        exists = has_batch(ready_due, ready_due + Counter(g.deadline for g in waiting), t, p)
        assert exists == (expected is not None), (ready, waiting, t, p)
        first_ready = tuple(g.group_id for g in ready[:p])
        seen.add("none" if expected is None else "first" if expected == first_ready else "passed")
    assert seen == {"none", "first", "passed"}


def test_awaited_groups_are_those_that_bring_a_batch_nearer() -> None:
    random = Random(4)
    for _ in range(3000):
        ready, waiting, t, p = random_live(random)
        choice = choose_batch(ready, waiting, t, p)
        awaited = [g for g in waiting if g.group_id in choice.awaited]
        others = [g for g in waiting if g.group_id not in choice.awaited]
        if choice.batch is not None:
            assert not awaited
            continue
        # the others, even if they were ready, give no batch; the awaited do, if anything does
        assert choose_batch([*ready, *others], awaited, t, p).batch is None
        all_ready = choose_batch([*ready, *waiting], [], t, p).batch
        awaited_ready = choose_batch([*ready, *awaited], others, t, p).batch
        assert (all_ready is None) == (awaited_ready is None)


def test_all_ready_and_enough_always_gives_a_batch() -> None:
    """No deadlock: the earliest deadlines are always allowed."""
    random = Random(5)
    for _ in range(2000):
        ready, waiting, t, p = random_live(random)
        live = [*ready, *waiting]
        assert (choose_batch(live, [], t, p).batch is not None) == (len(live) >= p)


def test_the_hard_case() -> None:
    """S = 1, P = 1. Groups 0 and 1 start at version 0; 0 is trained; 2 starts at 1 and is ready
    first: it must wait for 1, which would be too old afterwards."""
    assert may_start({}, 1, version=0, groups_per_step=1) == 2
    assert choose_batch([Live(0, 1)], [Live(1, 1)], 0, 1) == Choice((0,), ())
    assert may_start({1: 1}, 2, version=1, groups_per_step=1) == 1
    assert choose_batch([Live(2, 2)], [Live(1, 1)], 1, 1) == Choice(None, (1,))
    assert choose_batch([Live(2, 2), Live(1, 1)], [], 1, 1) == Choice((1,), ())
    assert choose_batch([Live(2, 2)], [], 2, 1) == Choice((2,), ())


def test_an_infeasible_set_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not feasible"):
        choose_batch([Live(0, 1), Live(1, 1)], [], 1, 1)
    with pytest.raises(AssertionError, match="too old"):
        choose_batch([Live(0, 0)], [Live(1, 2)], 1, 1)
