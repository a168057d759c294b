"""The record of a run: one SQLite file, RUN/record.sqlite, the only truth about it.

Owns: the tables below, the one transaction per event that writes them, and reading them back.
Does not own: when to commit (`runtime.loop`), what is made of it (`obs.samples`, `obs.meters`),
weights (`runtime.checkpoint`). Importable without torch; reads no clock.

Durability: WAL with synchronous = NORMAL. The death of the process (kill -9) loses no commit; a
power cut may lose the last ones, never part of one. A commit that issues a Checkpoint is forced to
the disk before it returns, so a record is never older than a checkpoint made after it.

One process writes a run folder at a time: it holds an flock on RUN/lock. Anyone may read meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from twofold.config import Config, from_dict
from twofold.events import Checkpoint, Command, Event, Terminal, from_json, to_json
from twofold.obs.rows import AdvantageRow as AdvantageRow
from twofold.obs.rows import DroppedRow as DroppedRow
from twofold.obs.rows import FinishedRow as FinishedRow
from twofold.obs.rows import GroupRow as GroupRow
from twofold.obs.rows import MetricRow as MetricRow
from twofold.obs.rows import RewardRow as RewardRow
from twofold.obs.rows import Row as Row
from twofold.obs.rows import TrainedRow as TrainedRow
from twofold.obs.rows import VersionRow as VersionRow
from twofold.obs.rows import unpack, write_row
from twofold.types import Group, Prompt, Sample, SampleId

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x32464C44  # "2FLD": tells our file from any other SQLite file

# Blobs are little-endian arrays, one entry a token: token_ids int32, the log-probs float32 (the
# samplers' floats come out of float32 tensors, so nothing is rounded). Columns written as AS (...)
# are computed from the row itself and so cannot disagree with it.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);       -- value: JSON
CREATE TABLE events (
    n INTEGER PRIMARY KEY,          -- 1, 2, ... in the order they were handled
    time_s REAL NOT NULL,
    body TEXT NOT NULL,             -- events.to_json
    kind TEXT AS (json_extract(body, '$.kind')));
CREATE TABLE commands (             -- a row is the lease on the groups it names, until it has ended
    seq INTEGER PRIMARY KEY,
    caused_by INTEGER NOT NULL REFERENCES events(n),
    body TEXT NOT NULL,             -- events.to_json, as issued last (epoch of the last issue)
    ended_by INTEGER REFERENCES events(n),                           -- its one terminal event
    outcome TEXT CHECK (outcome IN ('done', 'failed', 'cancelled')),
    seconds REAL,                   -- how long it ran
    kind TEXT AS (json_extract(body, '$.kind')),
    cards TEXT AS (json_extract(body, '$.cards')),
    epoch INTEGER AS (json_extract(body, '$.epoch')));
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL,           -- JSON: {"content": ..., "columns": {...}}
    prompt_ids BLOB NOT NULL,
    start_version INTEGER NOT NULL,
    deadline INTEGER NOT NULL,
    trained_version INTEGER CHECK (trained_version <= deadline),     -- Train.version
    drop_reason TEXT,
    status TEXT AS (CASE WHEN trained_version IS NOT NULL THEN 'trained'
                         WHEN drop_reason IS NOT NULL THEN 'dropped' ELSE 'live' END));
CREATE INDEX groups_by_version ON groups(trained_version);
CREATE TABLE samples (              -- its tokens are in chunks; NULL: not known yet
    group_id INTEGER NOT NULL REFERENCES groups(group_id),
    idx INTEGER NOT NULL,
    n_tokens INTEGER, finish_reason TEXT, text TEXT,                 -- once finished
    reward REAL, failed TEXT,                                        -- once judged, one of them
    advantage REAL,                                                  -- once trained
    PRIMARY KEY (group_id, idx)) WITHOUT ROWID;
CREATE TABLE chunks (               -- tokens one quantum appended; a simulated run has none
    group_id INTEGER NOT NULL, idx INTEGER NOT NULL,
    start INTEGER NOT NULL,         -- position of the first token within the completion
    version INTEGER NOT NULL,
    token_ids BLOB NOT NULL CHECK (length(token_ids) > 0),
    logprobs BLOB NOT NULL,
    kept_logmass BLOB,              -- NULL: all zero (no truncation)
    PRIMARY KEY (group_id, idx, start),
    FOREIGN KEY (group_id, idx) REFERENCES samples(group_id, idx)) WITHOUT ROWID;
CREATE TABLE versions (version INTEGER PRIMARY KEY, n INTEGER UNIQUE NOT NULL REFERENCES events(n),
    checksum TEXT NOT NULL);        -- of the weights; n: the event that brought it into being
CREATE TABLE metrics (version INTEGER, name TEXT, value REAL,        -- NULL: NaN
    PRIMARY KEY (version, name)) WITHOUT ROWID;
CREATE VIEW leases AS               -- groups in the hands of commands that have not ended
    SELECT seq, commands.kind AS kind, each.value AS group_id
        FROM commands, json_each(body, '$.group_ids') AS each WHERE ended_by IS NULL
    UNION ALL SELECT seq, kind, json_extract(body, '$.group_id') FROM commands
        WHERE ended_by IS NULL AND json_extract(body, '$.group_id') IS NOT NULL
    UNION ALL SELECT seq, commands.kind, json_extract(each.value, '$[0]')
        FROM commands, json_each(body, '$.admit') AS each WHERE ended_by IS NULL;
"""


class CommandRow(NamedTuple):
    """A command, the event (n) that caused it, and how it ended (None: not yet)."""

    command: Command
    caused_by: int
    ended_by: int | None
    outcome: str | None
    seconds: float | None


class Record:
    """`create` or `open` it; use it as a context manager or `close` it."""

    def __init__(self, db: sqlite3.Connection, folder: Path, lock_fd: int | None) -> None:
        self.folder = folder
        self._db = db
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, folder: Path, meta: dict[str, Any]) -> Record:
        """A new, empty record in `folder` (made if missing), open for writing. `meta` (JSON values
        by name: resolved config, fingerprint, ...) is stored once. ValueError if there is one,
        OSError, and no trace of it, when it cannot be written (disk full)."""
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(folder)
        try:
            path = folder / "record.sqlite"
            if path.exists():
                raise ValueError(f"{folder} already holds a run: resume it, or set run.dir")
            try:
                _write_empty(path, {"schema": SCHEMA_VERSION, **meta})
            except BaseException:  # the folder would look like a run
                (folder / "lock").unlink()
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
                raise
            return cls(_connect(path, read_only=False), folder, lock_fd)
        except BaseException:
            _unlock(lock_fd)
            raise

    @classmethod
    def open(cls, folder: Path, read_only: bool = False) -> Record:
        """The record of an existing run. ValueError when there is none, when it is not ours or of
        a newer schema, or when another process writes it (unless `read_only`)."""
        path = folder / "record.sqlite"
        if not path.exists():
            raise ValueError(f"{folder} holds no run (no record.sqlite): check the path")
        lock_fd = None if read_only else _lock(folder)
        try:
            return cls(_connect(path, read_only), folder, lock_fd)
        except BaseException:
            _unlock(lock_fd)
            raise

    def close(self) -> None:
        self._db.close()
        _unlock(self._lock_fd)
        self._lock_fd = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def commit(
        self,
        now_s: float,
        event: Event,
        commands: Sequence[Command] = (),
        rows: Iterable[Row] = (),
    ) -> None:
        """Write all of it or, on any exception, nothing: the event at time `now_s` (seconds, on the
        caller's clock), the end of the command that it names, the rows it brings, in order, and the
        commands it caused. One that was issued before is issued again: it must be open and the same
        but for its epoch. ValueError for what contradicts the record, OSError when it cannot be
        written (disk full)."""
        durable = any(isinstance(command, Checkpoint) for command in commands)
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                insert = "INSERT INTO events(time_s, body) VALUES (?, ?)"
                n = self._db.execute(insert, (now_s, to_json(event))).lastrowid
                assert n is not None
                if isinstance(event, Terminal):
                    self._end(n, event)
                for row in rows:
                    write_row(self._db, n, row)
                for command in commands:
                    self._issue(n, command)
        except sqlite3.IntegrityError as error:
            raise ValueError(f"{event.kind} contradicts the record: {error}") from error
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot write {self.folder / 'record.sqlite'}: {error}") from error

    def _end(self, n: int, event: Terminal) -> None:
        outcome = {"Failed": "failed", "Cancelled": "cancelled"}.get(event.kind, "done")
        ended = self._db.execute(
            "UPDATE commands SET ended_by = ?, outcome = ?, seconds = ?"
            " WHERE seq = ? AND ended_by IS NULL",
            (n, outcome, event.seconds, event.command),
        )
        if ended.rowcount != 1:
            raise ValueError(
                f"{event.kind} ends command {event.command}, which had ended or was never issued"
            )

    def _issue(self, n: int, command: Command) -> None:
        issued = self._db.execute(
            "INSERT INTO commands(seq, caused_by, body) VALUES (?, ?, ?)"
            " ON CONFLICT(seq) DO UPDATE SET body = excluded.body WHERE ended_by IS NULL"
            " AND json_remove(body, '$.epoch') = json_remove(excluded.body, '$.epoch')",
            (command.seq, n, to_json(command)),
        )
        if issued.rowcount != 1:
            raise ValueError(
                f"command {command.id} is issued again, but had ended or was another one"
            )

    # ------------------------------------------------------------ reading

    def query(self, sql: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        """Rows of a SELECT, for the views in `obs`."""
        return self._db.execute(sql, parameters)

    def meta(self) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in self.query("SELECT * FROM meta")}

    def events(self) -> Iterator[tuple[int, float, Event]]:
        """(n, time_s, event), in order."""
        for n, time_s, body in self.query("SELECT n, time_s, body FROM events ORDER BY n"):
            yield n, time_s, from_json(body)

    def commands(self) -> Iterator[CommandRow]:
        """In order of seq."""
        columns = "body, caused_by, ended_by, outcome, seconds"
        for body, *rest in self.query(f"SELECT {columns} FROM commands ORDER BY seq"):
            yield CommandRow(from_json(body), *rest)

    def epoch(self) -> int:
        """The highest epoch that was used; a new process takes the next."""
        ((epoch,),) = self.query(
            "SELECT max(epoch) FROM (SELECT 0 AS epoch UNION ALL SELECT epoch FROM commands"
            " UNION ALL SELECT json_extract(body, '$.epoch') FROM events WHERE kind = 'Resumed')"
        )
        return int(epoch)

    def group(self, group_id: int) -> Group:
        """The group with its samples, every recorded token in them (not the reference log-probs,
        which are not recorded). ValueError if unknown."""
        columns = "prompt, prompt_ids, start_version, deadline"
        found = list(self.query(f"SELECT {columns} FROM groups WHERE group_id = ?", group_id))
        if not found:
            raise ValueError(f"group {group_id} is not in the record")
        ((prompt, prompt_ids, start_version, deadline),) = found
        ids = unpack("i", prompt_ids)
        group = Group(group_id, Prompt(**json.loads(prompt)), ids, start_version, deadline)
        columns = "idx, finish_reason, text, reward, failed, advantage"
        order = "WHERE group_id = ? ORDER BY idx"
        for idx, finish, text, reward, failed, advantage in self.query(
            f"SELECT {columns} FROM samples {order}", group_id
        ):
            sample = Sample(SampleId(group_id, idx), finish_reason=finish, text=text or "")
            sample.reward, sample.failed, sample.advantage = reward, failed, advantage
            group.samples.append(sample)
        for idx, start, version, token_ids, logprobs, kept in self.query(
            "SELECT idx, start, version, token_ids, logprobs, kept_logmass"
            f" FROM chunks {order}, start",
            group_id,
        ):
            sample = group.samples[idx]
            assert start == len(sample.token_ids), f"hole in {sample.sample_id} at {start}"
            ids = unpack("i", token_ids)
            sample.token_ids += ids
            sample.logprobs += unpack("f", logprobs)
            sample.kept_logmass += [0.0] * len(ids) if kept is None else unpack("f", kept)
            sample.versions += [version] * len(ids)
        return group

    def live_groups(self) -> list[Group]:
        """Admitted, neither trained nor dropped; ascending."""
        live = "SELECT group_id FROM groups WHERE status = 'live' ORDER BY group_id"
        return [self.group(group_id) for (group_id,) in list(self.query(live))]

    def trained_groups(self, version: int) -> list[Group]:
        """The batch that trained `version` into version + 1; ascending."""
        batch = "SELECT group_id FROM groups WHERE trained_version = ? ORDER BY group_id"
        return [self.group(group_id) for (group_id,) in list(self.query(batch, version))]

    def checksum(self, version: int) -> str | None:
        """Of the weights of `version`; None: that version never came into being."""
        found = list(self.query("SELECT checksum FROM versions WHERE version = ?", version))
        return str(found[0][0]) if found else None

    def metrics(self, name: str | None = None) -> list[MetricRow]:
        """By version, then name; only those called `name`, if given."""
        rows = self.query(
            "SELECT version, name, value FROM metrics WHERE ?1 IS NULL OR name = ?1 ORDER BY 1, 2",
            name,
        )
        return [MetricRow(v, name, math.nan if x is None else x) for v, name, x in rows]


def run_config(folder: Path) -> Config:
    """The options a run was started with. ValueError if the folder holds no run."""
    with Record.open(folder, read_only=True) as record:
        return from_dict(record.meta()["config"])


# ---------------------------------------------------------------- the file and its lock


def _write_empty(path: Path, meta: dict[str, Any]) -> None:
    """Written aside and renamed: where there is a record.sqlite, it is whole."""
    aside = path.with_name(".record.sqlite.new")
    files = [aside, *(aside.with_name(aside.name + end) for end in ("-journal", "-wal", "-shm"))]
    for leftover in files:
        leftover.unlink(missing_ok=True)
    db = sqlite3.connect(aside, isolation_level=None)
    try:
        db.executescript(f"BEGIN; PRAGMA application_id = {_APPLICATION_ID}; {_SCHEMA} COMMIT")
        rows = [(key, json.dumps(value)) for key, value in meta.items()]
        with db:
            db.execute("BEGIN")
            db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        db.execute("PRAGMA journal_mode = WAL")  # a property of the file
        db.close()
        aside.rename(path)
    except BaseException as error:
        db.close()
        for half in files:
            half.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError):
            raise OSError(f"cannot write {path}: {error}") from error
        raise


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    if read_only and not os.access(path.parent, os.W_OK):
        uri += (
            "&immutable=1"  # a medium on which nobody, and so no writer, can make the WAL's index
        )
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None)
        ((application_id,),) = db.execute("PRAGMA application_id")
        if application_id != _APPLICATION_ID:
            raise ValueError(f"{path} is not a record of Twofold: check the path")
        found = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall()
        if not found or not str(found[0][0]).isdecimal():
            raise ValueError(f"{path} is damaged: it has no schema number")
        schema = found[0][0]
        if int(schema) != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema {schema}, this Twofold reads {SCHEMA_VERSION}: "
                "use the version of Twofold that wrote it, or a newer one"
            )
        db.execute("PRAGMA foreign_keys = ON")
        return db
    except BaseException as error:
        if db is not None:
            db.close()
        if isinstance(error, sqlite3.Error):
            words = " ".join(str(error).split())  # it quotes the schema, over several lines
            raise ValueError(f"cannot read {path}: {words}") from error
        raise


def _lock(folder: Path) -> int:
    """Take the folder's lock; the kernel frees it when this process dies, however it dies."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}; set run.dir") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        raise ValueError(
            f"{folder} is being written by process {pid}: wait for it or stop it, or set run.dir"
        ) from None
    os.ftruncate(fd, 0)
    with suppress(OSError):  # a full disk; the number is only for the message above
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _unlock(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
