"""The payloads of live groups, by id, and the rows that become durable with the next event.

Owns: groups from admission until they are trained or dropped. Does not own: what is durable (the
record), or which group does what next (the scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twofold.types import Group


class Store:
    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._rows: list[Any] = []

    def add(self, group: Group) -> None:
        assert group.group_id not in self._groups, f"group {group.group_id} is in the store already"
        self._groups[group.group_id] = group

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def __len__(self) -> int:
        return len(self._groups)

    def remove(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            del self._groups[group_id]

    def write(self, *rows: Any) -> None:
        """Rows for the record (types in `obs.rows`): committed together with the next event."""
        self._rows.extend(rows)

    def take_rows(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows
