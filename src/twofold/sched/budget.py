"""StaleSync: which groups may start, and which are trained next.

Owns: the arithmetic of the rule over deadlines. A group that started under version a has the
deadline a + S: the last version at which it may be trained. docs/stalesync.md proves the claims.
Does not own: which groups exist and how far they are (`queue`), when anything happens
(`scheduler`).

Everywhere `version` is the version trained next and `groups_per_step` (P) the size of a batch. With
U updates per batch versions, deadlines and S are counted in batches: S becomes (S + 1) // U - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Live(NamedTuple):
    """An untrained group, as the rule sees it."""

    group_id: int
    deadline: int


class Choice(NamedTuple):
    """`batch` is P group ids, first ready first, or None; then `awaited` are the unready groups of
    which some must become ready (or leave, or be joined by new ones) before there is a batch."""

    batch: tuple[int, ...] | None
    awaited: tuple[int, ...]


def feasible(deadlines: Iterable[int], version: int, groups_per_step: int) -> bool:
    """Whether all groups can be trained in time: for every k >= 0 at most (k + 1) P of them have a
    deadline <= version + k, and none has one < version.

    Said the other way round: trained in order of deadline, P at a time, none is late.
    """
    return all(
        deadline >= version + place // groups_per_step
        for place, deadline in enumerate(sorted(deadlines))
    )


def may_start(due: Mapping[int, int], deadline: int, version: int, groups_per_step: int) -> int:
    """How many groups with this deadline may start: the most that leave the live set feasible.
    `due` counts the live groups by deadline. With fresh weights (deadline = version + S) it is
    (S + 1) P less the live; a deadline that has passed (weights too old) allows none.
    """
    if deadline < version:
        return 0
    room = groups_per_step * (deadline - version + 1)
    room -= sum(n for d, n in due.items() if d <= deadline)
    least = room
    for later in range(deadline + 1, max(due, default=deadline) + 1):
        room += groups_per_step - due.get(later, 0)
        least = min(least, room)
    return least


def has_batch(
    ready: Mapping[int, int], due: Mapping[int, int], version: int, groups_per_step: int
) -> bool:
    """Whether `choose_batch` finds one; both mappings count by deadline, `due` all live groups.

    There must be P ready groups, and for every k as many ready ones with deadline <= version + k as
    the batch must have of these. That is enough: the P ready groups with the earliest deadlines
    have as many of each as any batch can.
    """
    n_ready = n_due = 0
    for k in range(max(due, default=version) - version + 1):
        n_ready += ready.get(version + k, 0)
        n_due += due.get(version + k, 0)
        if n_ready < n_due - k * groups_per_step:
            return False
    return n_ready >= groups_per_step


def choose_batch(
    ready: Sequence[Live], waiting: Sequence[Live], version: int, groups_per_step: int
) -> Choice:
    """P of the `ready` groups, first ready first, so that what is left is feasible at version + 1.

    Of the groups with deadline <= version + k, of which there are N_k, at least N_k - k P must be
    taken; so at most P - (N_k - k P) of those with a later deadline. These sets of later deadlines
    are nested, so taking greedily whatever breaks no bound finds a batch whenever there is one (a
    laminar matroid), and the first in order of readiness among all of them.
    """
    live = [*ready, *waiting]
    last = max((group.deadline for group in live), default=version)
    room: list[int] = []  # room[k]: how many may be taken from those with deadline > version + k
    for k in range(last - version + 1):
        due = sum(group.deadline <= version + k for group in live)
        room.append((k + 1) * groups_per_step - due)
    assert min(room, default=0) >= 0, f"the live groups are not feasible at version {version}"
    batch: list[int] = []
    for group_id, deadline in ready:
        assert deadline >= version, f"group {group_id} is too old to train at version {version}"
        levels = range(deadline - version)
        if len(batch) < groups_per_step and all(room[k] > 0 for k in levels):
            batch.append(group_id)
            for k in levels:
                room[k] -= 1
    if len(batch) == groups_per_step:
        return Choice(tuple(batch), ())
    awaited = (g.group_id for g in waiting if all(room[k] > 0 for k in range(g.deadline - version)))
    return Choice(None, tuple(awaited))
