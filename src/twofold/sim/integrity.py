"""Does a record agree with itself? Asked before anything is concluded from it.

Owns: what the tables of one run's record must have in common, which two runs' rows, or rows that
went missing, do not. Does not own: reading records (`obs.record`), what they say (`observe`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from twofold import events as ev
from twofold.config import Config, from_dict
from twofold.events import Command, Event
from twofold.obs.record import CommandRow, Record

_FACTS: dict[type[Command], type[Event]] = {
    ev.Generate: ev.Generated, ev.Reward: ev.Rewarded, ev.Score: ev.Scored, ev.Train: ev.Trained,
    ev.Publish: ev.Published, ev.Fetch: ev.Fetched, ev.Receive: ev.Received,
    ev.Switch: ev.Switched, ev.Evaluate: ev.Evaluated, ev.Checkpoint: ev.Checkpointed,
    ev.Discard: ev.Discarded,
}  # fmt: skip


def check_record(
    record: Record, history: list[tuple[float, Event]], rows: dict[int, CommandRow]
) -> None:
    """ValueError, one line, for the first disagreement: between events and the commands they end,
    or between what events say and the groups, samples, chunks and versions that there are."""
    _check_ends(history, rows)
    _check_samples(record, history)
    _check_rewards(record, history)
    _check_groups(record, rows.values())
    _check_versions(record, history)


def check_folder(folder: Path, config: Config) -> None:
    """ValueError when the options that lie beside the record are those of another run."""
    path = folder / "config.toml"
    if not path.is_file():
        return
    try:
        beside = from_dict(tomllib.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for section, options in vars(config).items():
        for name, value in vars(options).items():
            other = getattr(getattr(beside, section), name)
            if other != value:
                raise ValueError(
                    f"{path} is of another run than the record: {section}.{name} is {other!r} "
                    f"there and {value!r} in the record; give a folder as a run left it"
                )


def _mixed(what: str) -> ValueError:
    return ValueError(
        f"the record is damaged, or records of two runs are mixed: {what}; give the record as the "
        "run left it"
    )


def _check_ends(history: list[tuple[float, Event]], rows: dict[int, CommandRow]) -> None:
    """Each terminal event ends the command it names, and each ended command has its event."""
    before_s = 0.0
    ended = {row.ended_by: row for row in rows.values() if row.ended_by is not None}
    for n, (now_s, event) in enumerate(history, 1):
        if now_s < before_s:
            raise _mixed(f"event {n} comes {before_s - now_s:.3g} s before the one before it")
        before_s = now_s
        row = ended.pop(n, None)
        if not isinstance(event, ev.Terminal):
            if row is not None:
                raise _mixed(f"event {n} is {event.kind}, which ends no command")
            continue
        if row is None or row.command.seq != event.command:
            raise _mixed(f"event {n} ends command {event.command}, which says otherwise")
        fact = _FACTS[type(row.command)]
        if not isinstance(event, (fact, ev.Failed, ev.Cancelled)) or row.seconds != event.seconds:
            raise _mixed(f"event {n} is not the end of command {row.command.id}")
        if not 1 <= row.caused_by < n:
            raise _mixed(f"command {row.command.id} ended before it was issued")
    for row in ended.values():
        raise _mixed(f"the end of command {row.command.id} is missing")


def _check_samples(record: Record, history: Iterable[tuple[float, Event]]) -> None:
    """A sample that finished has as many tokens as its event, its row and its chunks say, and
    chunks lie one after another."""
    told = {
        (done.group_id, done.index): done.n_tokens
        for _, event in history
        if isinstance(event, ev.Generated)
        for done in event.finished
    }
    starts = "SELECT group_id, idx, max(start + length(token_ids) / 4), sum(length(token_ids) / 4)"
    chunks = {
        (group_id, idx): (end, n_tokens)
        for group_id, idx, end, n_tokens in record.query(f"{starts} FROM chunks GROUP BY 1, 2")
    }
    for group_id, idx, n_tokens in record.query("SELECT group_id, idx, n_tokens FROM samples"):
        end, n_chunked = chunks.pop((group_id, idx), (0, 0))
        finished = told.pop((group_id, idx), None)
        if end != n_chunked or (finished is not None and {n_tokens, n_chunked} != {finished}):
            raise _mixed(f"the tokens of sample {idx} of group {group_id} are not all there")
    for group_id, idx in [*told, *chunks]:
        raise _mixed(f"sample {idx} of group {group_id} is missing")


def _check_rewards(record: Record, history: Iterable[tuple[float, Event]]) -> None:
    counts = dict(record.query("SELECT group_id, count(reward) FROM samples GROUP BY group_id"))
    for _, event in history:
        if isinstance(event, ev.Rewarded) and counts.get(event.group_id) != event.n_valid:
            raise _mixed(
                f"group {event.group_id} has {counts.get(event.group_id, 0)} rewards, its event "
                f"says {event.n_valid}"
            )


def _check_groups(record: Record, rows: Iterable[CommandRow]) -> None:
    """Groups are those that commands that were done admitted and trained."""
    known = {
        group_id: (start_version, deadline, trained_version)
        for group_id, start_version, deadline, trained_version in record.query(
            "SELECT group_id, start_version, deadline, trained_version FROM groups"
        )
    }
    trained: dict[int, int] = {}
    for row in rows:
        command = row.command
        if row.outcome != "done":
            continue
        if isinstance(command, ev.Generate):
            for group_id, start_version, deadline in command.admit:
                # beyond the end of the data there is none
                if group_id in known and known[group_id][:2] != (start_version, deadline):
                    raise _mixed(f"group {group_id} started otherwise than {command.id} says")
        elif isinstance(command, ev.Train):
            trained |= dict.fromkeys(command.group_ids, command.version)
    for group_id, (_, _, version) in known.items():
        if trained.pop(group_id, None) != version:
            raise _mixed(f"group {group_id} was not trained when the commands say")
    for group_id in trained:
        raise _mixed(f"group {group_id} was trained, but is missing")


def _check_versions(record: Record, history: list[tuple[float, Event]]) -> None:
    told = {0} | {event.version for _, event in history if isinstance(event, ev.Published)}
    known = dict(record.query("SELECT version, n FROM versions"))
    for version in sorted(told ^ set(known)):
        what = "is missing" if version in told else "was never published"
        raise _mixed(f"version {version} {what}")
    for version, n in known.items():
        event = history[n - 1][1] if 1 <= n <= len(history) else None
        if version and not (isinstance(event, ev.Published) and event.version == version):
            raise _mixed(f"version {version} is not of event {n}")
