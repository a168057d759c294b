"""The rows that executors hand over to be recorded, and how one is written.

Owns: the row types, the SQL that writes each, the form of token arrays in the database. Does not
own: the tables and the transaction (`obs.record`, which also exports the types). No torch.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from twofold.types import Chunk, Prompt, SampleId


class GroupRow(NamedTuple):
    """A group was admitted; makes its `n_samples` empty samples. The prompt is plain JSON data."""

    group_id: int
    prompt: Prompt
    prompt_ids: list[int]
    start_version: int
    deadline: int
    n_samples: int


class FinishedRow(NamedTuple):
    sample_id: SampleId
    n_tokens: int
    finish_reason: str
    text: str


class RewardRow(NamedTuple):
    """Exactly one of the two is not None; a reward is not NaN."""

    sample_id: SampleId
    reward: float | None
    failed: str | None = None


class AdvantageRow(NamedTuple):
    sample_id: SampleId
    advantage: float


class TrainedRow(NamedTuple):
    """`version` is the one that the update found, as in the command Train."""

    group_id: int
    version: int


class DroppedRow(NamedTuple):
    group_id: int
    reason: str


class VersionRow(NamedTuple):
    version: int
    checksum: str


class MetricRow(NamedTuple):
    """Of a (version, name) that is recorded twice the later value counts (an evaluation redone)."""

    version: int
    name: str
    value: float


Row = (
    GroupRow | Chunk | FinishedRow | RewardRow | AdvantageRow | TrainedRow | DroppedRow | VersionRow
    | MetricRow
)  # fmt: skip


# ---------------------------------------------------------------- one row

_UPDATE_SAMPLE = "UPDATE samples SET {} WHERE group_id = ? AND idx = ?"
_UPDATE_GROUP = "UPDATE groups SET {} WHERE group_id = ? AND status = 'live'"
_ADD_CHUNK = """
INSERT INTO chunks SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7 WHERE ?3 = coalesce(
    (SELECT start + length(token_ids) / 4 FROM chunks WHERE group_id = ?1 AND idx = ?2
     ORDER BY start DESC LIMIT 1), 0)
"""


def write_row(db: sqlite3.Connection, n: int, row: Row) -> None:
    """One row that event n brought. ValueError when what it is about is not there."""
    values: tuple[Any, ...]
    match row:
        case GroupRow():
            _add_group(db, row)
            return
        case Chunk():
            ids, logprobs = pack("i", row.token_ids), pack("f", row.logprobs)
            assert len(ids) == len(logprobs) == 4 * len(row.kept_logmass)
            kept = pack("f", row.kept_logmass) if any(row.kept_logmass) else None
            sql, values = _ADD_CHUNK, (*row.sample_id, row.start, row.version, ids, logprobs, kept)
        case FinishedRow():
            sql = _UPDATE_SAMPLE.format("n_tokens = ?, finish_reason = ?, text = ?")
            sql += " AND finish_reason IS NULL"
            values = (row.n_tokens, row.finish_reason, row.text, *row.sample_id)
        case RewardRow():
            assert (row.reward is None) != (row.failed is None), row
            assert row.reward == row.reward, f"NaN, which SQLite would store as NULL: {row}"
            sql = _UPDATE_SAMPLE.format("reward = ?, failed = ?")
            values = (row.reward, row.failed and _storable(row.failed), *row.sample_id)
        case AdvantageRow():
            assert row.advantage == row.advantage, f"NaN: {row}"
            sql = _UPDATE_SAMPLE.format("advantage = ?")
            values = (row.advantage, *row.sample_id)
        case TrainedRow():
            sql, values = _UPDATE_GROUP.format("trained_version = ?"), (row.version, row.group_id)
        case DroppedRow():
            sql = _UPDATE_GROUP.format("drop_reason = ?")
            values = (_storable(row.reason), row.group_id)
        case VersionRow():
            sql, values = "INSERT INTO versions VALUES (?, ?, ?)", (row.version, n, row.checksum)
        case MetricRow():
            sql, values = "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", tuple(row)
    if db.execute(sql, values).rowcount != 1:
        raise ValueError(f"does not fit the record: {str(row)[:120]}")


def _add_group(db: sqlite3.Connection, row: GroupRow) -> None:
    try:
        prompt = json.dumps({"content": row.prompt.content, "columns": row.prompt.columns})
    except TypeError as error:
        raise ValueError(f"prompt of group {row.group_id}: {error}; use JSON values") from None
    db.execute(
        "INSERT INTO groups(group_id, prompt, prompt_ids, start_version, deadline)"
        " VALUES (?, ?, ?, ?, ?)",
        (row.group_id, prompt, pack("i", row.prompt_ids), row.start_version, row.deadline),
    )
    db.executemany(
        "INSERT INTO samples(group_id, idx) VALUES (?, ?)",
        [(row.group_id, idx) for idx in range(row.n_samples)],
    )


def pack(code: str, values: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def unpack(code: str, blob: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(blob) // 4}{code}", blob))


def _storable(text: str) -> str:
    """Reasons quote other people's exceptions, which may hold surrogates; SQLite takes UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
