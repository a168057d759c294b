"""The record: all of an event or nothing, nothing lost by kill -9, exact round trips."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twofold.events import (
    Admission,
    Cancelled,
    Checkpoint,
    Discard,
    Event,
    Failed,
    Finished,
    Generate,
    Generated,
    Publish,
    Published,
    Resumed,
    Reward,
    Rewarded,
    RunStarted,
    Train,
    Trained,
)
from twofold.obs.bias import length_shares
from twofold.obs.meters import step_meters
from twofold.obs.record import (
    AdvantageRow,
    DroppedRow,
    FinishedRow,
    GroupRow,
    MetricRow,
    Record,
    RewardRow,
    Row,
    TrainedRow,
    VersionRow,
)
from twofold.types import Chunk, Group, Prompt, Sample, SampleId

PROMPT = Prompt(
    [{"role": "user", "content": "What is 2 + 3?"}], {"answer": "5", "level": [1, None]}
)
STARTED = RunStarted()


def group_row(group_id: int = 0, n_samples: int = 2, start_version: int = 0) -> GroupRow:
    return GroupRow(group_id, PROMPT, [1, 22, 3], start_version, start_version + 1, n_samples)


def chunk(group_id: int, index: int, start: int, n: int, version: int = 0) -> Chunk:
    ids = list(range(start, start + n))
    return Chunk(SampleId(group_id, index), start, version, ids, [-0.5] * n, [0.0] * n)


def float32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result


def snapshot(record: Record) -> list[Any]:
    """Everything that the file holds."""
    tables = ("meta", "events", "commands", "groups", "samples", "chunks", "versions", "metrics")
    return [list(record.query(f"SELECT * FROM {table}")) for table in tables]


@pytest.fixture
def record(tmp_path: Path) -> Any:
    with Record.create(
        tmp_path / "run", {"config": {"run": {"seed": 3}}, "created": "x"}
    ) as record:
        yield record


# ---------------------------------------------------------------- round trips


def test_events_commands_and_meta_round_trip(record: Record) -> None:
    generate = Generate(
        seq=0, cards=(0, 1), version=0, max_decode_steps=4, admit=(Admission(0, 0, 1),)
    )
    done = Generated(
        command=0, seconds=0.25, finished=(Finished(0, 1, 3),), n_tokens=5, decode_steps=4
    )
    train = Train(seq=1, cards=(0,), version=0, group_ids=(0,))
    record.commit(0.5, STARTED, [generate])
    record.commit(1.75, done, [train], [group_row()])

    assert list(record.events()) == [(1, 0.5, STARTED), (2, 1.75, done)]
    first, second = record.commands()
    assert first == (generate, 1, 2, "done", 0.25)
    assert second == (train, 2, None, None, None)
    assert record.meta() == {"schema": 1, "config": {"run": {"seed": 3}}, "created": "x"}


def test_group_is_rebuilt_exactly_from_its_chunks(record: Record) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows: list[Row] = [group_row(7, n_samples=4)]
    expected = [Sample(SampleId(7, i)) for i in range(4)]
    for version in range(5):
        for sample in expected[:3]:  # the fourth never starts
            n = rng.randrange(4)
            if n == 0:
                continue
            truncated = rng.random() < 0.5
            new = Chunk(
                sample.sample_id,
                len(sample.token_ids),
                version,
                [rng.choice([0, 49_151, 2**31 - 1]) for _ in range(n)],
                [float32(-rng.expovariate(1.0) * 10 ** rng.uniform(-9, 2)) for _ in range(n)],
                [float32(-rng.random()) if truncated else 0.0 for _ in range(n)],
            )
            rows.append(new)
            sample.token_ids += new.token_ids
            sample.logprobs += new.logprobs
            sample.kept_logmass += new.kept_logmass
            sample.versions += [version] * n
    text = "5\x00\x1b[31m \N{SNOWMAN}"
    rows += [FinishedRow(SampleId(7, 0), len(expected[0].token_ids), "stop", text)]
    rows += [FinishedRow(SampleId(7, 1), len(expected[1].token_ids), "length", "")]
    rows += [RewardRow(SampleId(7, 0), 1 / 3), RewardRow(SampleId(7, 1), None, "cause \udcff")]
    rows += [AdvantageRow(SampleId(7, 0), -0.1)]
    record.commit(0.0, STARTED, (), rows)

    expected[0].finish_reason, expected[0].text = "stop", text
    expected[0].reward, expected[0].advantage = 1 / 3, -0.1
    expected[1].finish_reason, expected[1].failed = "length", "cause \\udcff"
    assert record.group(7) == Group(7, PROMPT, [1, 22, 3], 0, 1, expected)
    # truncation off costs no bytes
    ((n_null, n_all),) = record.query("SELECT sum(kept_logmass IS NULL), count(*) FROM chunks")
    assert 0 < n_null < n_all


def test_groups_are_live_until_trained_or_dropped(record: Record) -> None:
    rows = [group_row(i) for i in range(5)]
    record.commit(0.0, STARTED, (), [*rows, TrainedRow(3, 1), TrainedRow(0, 1), TrainedRow(4, 0)])
    record.commit(0.0, STARTED, (), [DroppedRow(2, "reward failed")])

    assert [g.group_id for g in record.live_groups()] == [1]
    assert [g.group_id for g in record.trained_groups(1)] == [0, 3]
    assert record.trained_groups(2) == []
    with pytest.raises(ValueError, match="group 9 is not in the record"):
        record.group(9)
    for row in (TrainedRow(2, 1), TrainedRow(0, 1), DroppedRow(3, "late"), TrainedRow(9, 1)):
        with pytest.raises(ValueError, match="does not fit the record"):
            record.commit(0.0, STARTED, (), [row])


def test_a_group_cannot_be_trained_after_its_deadline(record: Record) -> None:
    with pytest.raises(ValueError, match="CHECK constraint"):
        record.commit(0.0, STARTED, (), [group_row(0), TrainedRow(0, 2)])
    assert record.live_groups() == []


def test_metrics_keep_nan_and_infinity_and_the_latest_value(record: Record) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -0.1}
    record.commit(0.0, STARTED, (), [MetricRow(1, name, value) for name, value in values.items()])
    record.commit(0.0, STARTED, (), [MetricRow(0, "c", 5.0), MetricRow(1, "c", 7.0)])

    a, b, c = (row for row in record.metrics() if row.version == 1)
    assert a.name == "a" and math.isnan(a.value)
    assert b == (1, "b", math.inf)
    assert record.metrics("c") == [(0, "c", 5.0), (1, "c", 7.0)] and c.value == 7.0


def test_a_nan_reward_or_advantage_is_refused(record: Record) -> None:
    for row in (RewardRow(SampleId(0, 0), math.nan), AdvantageRow(SampleId(0, 0), math.nan)):
        with pytest.raises(AssertionError, match="NaN"):
            record.commit(0.0, STARTED, (), [group_row(), row])


def test_checksums_of_versions(record: Record) -> None:
    record.commit(0.0, STARTED, (), [VersionRow(0, "aa")])
    assert record.checksum(0) == "aa" and record.checksum(1) is None
    with pytest.raises(ValueError, match="contradicts the record"):
        record.commit(0.0, STARTED, (), [VersionRow(0, "bb")])


def test_prompt_columns_must_be_json(record: Record) -> None:
    row = group_row()._replace(prompt=Prompt("hi", {"answer": {1, 2}}))
    with pytest.raises(ValueError, match=r"prompt of group 0: .*set.*use JSON values"):
        record.commit(0.0, STARTED, (), [row])


# ---------------------------------------------------------------- one transaction


def test_an_exception_anywhere_leaves_nothing(record: Record) -> None:
    command = Reward(seq=0, group_id=0)
    record.commit(0.0, STARTED, [command], [group_row(0)])
    before = snapshot(record)

    def rows_that_break_off() -> Any:
        yield group_row(1)
        yield chunk(0, 0, 0, 3)
        raise KeyboardInterrupt

    end = Rewarded(command=0, group_id=0, n_valid=2, varies=True)
    good: list[Row] = [group_row(1), chunk(0, 0, 0, 3), MetricRow(0, "x", 1.0)]
    attempts: list[tuple[type[BaseException], Event, Any, Any]] = [
        (KeyboardInterrupt, end, [], rows_that_break_off()),
        (ValueError, end, [], [*good, group_row(0)]),  # known already
        (
            ValueError,
            end,
            [],
            [*good, FinishedRow(SampleId(0, 2), 1, "stop", "")],
        ),  # unknown sample
        (ValueError, end, [], [*good, chunk(9, 0, 0, 1)]),  # unknown group
        (ValueError, end, [replace(command, group_id=1)], good),  # seq 0 is another command
        (ValueError, replace(end, command=5), [Reward(seq=1, group_id=0)], good),  # never issued
    ]
    for error, event, commands, rows in attempts:
        with pytest.raises(error):
            record.commit(1.0, event, commands, rows)
        assert snapshot(record) == before
    record.commit(1.0, end, [], good)  # and the record still works
    assert len(list(record.events())) == 2


def test_tokens_have_no_hole_and_no_overlap(record: Record) -> None:
    record.commit(0.0, STARTED, (), [group_row(), chunk(0, 0, 0, 3)])
    for start in (0, 2, 4):
        with pytest.raises(ValueError):
            record.commit(0.0, STARTED, (), [chunk(0, 0, start, 2)])
    record.commit(0.0, STARTED, (), [chunk(0, 0, 3, 2, version=1)])
    assert record.group(0).samples[0].versions == [0, 0, 0, 1, 1]


def test_a_command_ends_once(record: Record) -> None:
    record.commit(0.0, STARTED, [Reward(seq=i, group_id=i) for i in range(3)])
    ends: list[Event] = [
        Rewarded(command=0, group_id=0, n_valid=2, varies=True),
        Failed(command=1, cause="worker died"),
        Cancelled(command=2),
    ]
    for end in ends:
        record.commit(1.0, end)
    assert [row.outcome for row in record.commands()] == ["done", "failed", "cancelled"]
    for end in ends:
        with pytest.raises(ValueError, match="had ended or was never issued"):
            record.commit(2.0, end)
    with pytest.raises(ValueError, match="reward-0 is issued again"):
        record.commit(2.0, STARTED, [Reward(seq=0, group_id=0, epoch=1)])


def test_reissue_changes_the_epoch_only(record: Record) -> None:
    command = Train(seq=0, cards=(0,), version=0, group_ids=(0, 1))
    assert record.epoch() == 0
    record.commit(0.0, STARTED, [command])
    record.commit(1.0, Resumed(epoch=4), [replace(command, epoch=4)])

    (row,) = record.commands()
    assert row.command == replace(command, epoch=4) and row.caused_by == 1
    assert record.epoch() == 4
    record.commit(2.0, Resumed(epoch=5))  # without a command: the event counts
    assert record.epoch() == 5
    assert list(record.query("SELECT kind, cards, epoch FROM commands")) == [("Train", "[0]", 4)]


def test_leases_are_the_groups_of_open_commands(record: Record) -> None:
    record.commit(
        0.0,
        STARTED,
        [
            Generate(
                seq=0, version=0, max_decode_steps=1, admit=(Admission(4, 0, 1), Admission(5, 0, 1))
            ),
            Train(seq=1, version=0, group_ids=(1, 2)),
            Reward(seq=2, group_id=3),
            Discard(seq=3, group_id=0, reason="no"),
            Checkpoint(seq=4, version=0),
        ],
    )
    leases = "SELECT seq, kind, group_id FROM leases ORDER BY seq, group_id"
    assert list(record.query(leases)) == [
        (0, "Generate", 4),
        (0, "Generate", 5),
        (1, "Train", 1),
        (1, "Train", 2),
        (2, "Reward", 3),
        (3, "Discard", 0),
    ]
    record.commit(1.0, Trained(command=1, version=1))
    assert [seq for seq, *_ in record.query(leases)] == [0, 0, 2, 3]


# ---------------------------------------------------------------- death and other processes

_WRITER = """
import sys
from pathlib import Path
from twofold.events import Generate, Generated, Admission, RunStarted
from twofold.obs.record import GroupRow, Record
from twofold.types import Chunk, Prompt, SampleId

def admitting(seq):
    return Generate(seq=seq, version=0, max_decode_steps=1, admit=(Admission(seq, 0, 1),))

with Record.create(Path(sys.argv[1]), {"config": {}}) as record:
    record.commit(0.0, RunStarted(), [admitting(0)])
    for i in range(10**6):
        rows = [GroupRow(i, Prompt("p" * 500), [1, 2], 0, 1, 4)]
        rows += [Chunk(SampleId(i, j), 0, 0, [1] * 40, [-1.0] * 40, [0.0] * 40) for j in range(4)]
        done = Generated(command=i, finished=(), n_tokens=160, decode_steps=40)
        record.commit(float(i + 1), done, [admitting(i + 1)], rows)
        print(i, flush=True)
"""


def test_kill_9_loses_no_commit_and_shows_no_half(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0\n"
        time.sleep(rng.uniform(0.0, 0.3))
        writer.send_signal(signal.SIGKILL)
        confirmed = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        writer.stdout.close()
        writer.wait()
        n_confirmed = confirmed[-1] + 1 if confirmed else 1

        with Record.open(folder) as record:  # the dead one's lock is free
            assert list(record.query("PRAGMA integrity_check")) == [("ok",)]
            assert list(record.query("PRAGMA foreign_key_check")) == []
            n_events = len(list(record.events()))
            n_groups = n_events - 1  # the first event brought none
            # all that were confirmed, and at most the one that was under way
            assert n_confirmed <= n_groups <= n_confirmed + 1
            commands = list(record.commands())
            assert [c.ended_by for c in commands] == [*range(2, n_events + 1), None]
            groups = record.live_groups()
            assert len(groups) == n_groups
            assert all(len(s.token_ids) == 40 for g in groups for s in g.samples)
            resumed = Resumed(epoch=record.epoch() + 1)
            record.commit(1e6, resumed, [replace(commands[-1].command, epoch=resumed.epoch)])


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Record.create(folder, {}) as record:
        record.commit(0.0, STARTED)
        code = (
            "import sys; from pathlib import Path; from twofold.obs.record import Record\n"
            "folder = Path(sys.argv[1])\n"
            "with Record.open(folder, read_only=True) as record:\n"
            "    print(len(list(record.events())))\n"
            "Record.open(folder)\n"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True
        )
        assert other.stdout == "1\n"  # reading is allowed
        (last,) = other.stderr.splitlines()[-1:]
        assert last.startswith("ValueError") and f"process {os.getpid()}:" in last
        with pytest.raises(ValueError, match=f"process {os.getpid()}:"):
            Record.create(folder, {})
    with Record.open(folder) as record:
        assert len(list(record.events())) == 1


def test_read_only_cannot_write(tmp_path: Path) -> None:
    Record.create(tmp_path, {}).close()
    with Record.open(tmp_path, read_only=True) as record, pytest.raises(OSError, match="readonly"):
        record.commit(0.0, STARTED)


def test_files_that_are_no_record_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "record.sqlite"
    with pytest.raises(ValueError, match="holds no run"):
        Record.open(tmp_path)

    path.write_bytes(b"this is not a database, but long enough to have a header" * 20)
    with pytest.raises(ValueError, match="not a database"):
        Record.open(tmp_path)

    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    with pytest.raises(ValueError, match="not a record of Twofold"):
        Record.open(tmp_path)

    path.unlink()
    Record.create(tmp_path, {}).close()
    with contextlib.closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("UPDATE meta SET value = 2 WHERE key = 'schema'")
    with pytest.raises(ValueError, match="schema 2, this Twofold reads 1") as refusal:
        Record.open(tmp_path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="already holds a run"):
        Record.create(tmp_path, {})
    # each refusal gave the lock back
    path.unlink()
    Record.create(tmp_path, {}).close()


# ---------------------------------------------------------------- meters


def test_meters_of_two_steps(record: Record) -> None:
    def generate(seq: int) -> Generate:
        return Generate(seq=seq, cards=(0,), version=0, max_decode_steps=1)

    def train(seq: int) -> Train:
        return Train(seq=seq, cards=(0,), version=0, group_ids=())

    def publish(seq: int) -> Publish:
        return Publish(seq=seq, cards=(0,), version=0)

    def generated(seq: int, seconds: float) -> Generated:
        return Generated(command=seq, seconds=seconds, finished=(), n_tokens=1, decode_steps=1)

    start = [VersionRow(0, ""), group_row(0), group_row(1), chunk(0, 0, 0, 3), chunk(1, 0, 0, 4)]
    start += [
        FinishedRow(SampleId(0, 0), 3, "stop", ""),
        FinishedRow(SampleId(1, 0), 40, "stop", ""),
    ]
    record.commit(100.0, STARTED, [generate(0)], start)
    record.commit(106.0, generated(0, 6.0), [Reward(seq=1, group_id=0), train(2)])
    reward = Rewarded(command=1, seconds=9.0, group_id=0, n_valid=0, varies=False)
    record.commit(107.0, reward)
    record.commit(
        108.0, Trained(command=2, seconds=2.0, version=1), [publish(3)], [TrainedRow(0, 0)]
    )
    record.commit(
        110.0, Published(command=3, seconds=0.5, version=1), [train(4)], [VersionRow(1, "")]
    )
    record.commit(111.0, STARTED)
    record.commit(5000.0, Resumed(epoch=1))  # nobody had the run meanwhile
    record.commit(5001.0, Trained(command=4, seconds=1.0, version=2), [publish(5)])
    rows: list[Row] = [chunk(1, 0, 4, 2, version=1), TrainedRow(1, 1), VersionRow(2, "")]
    record.commit(5003.0, Published(command=5, version=2), [generate(6)], rows)
    record.commit(5004.0, generated(6, 1.0))  # of a step that is not finished

    first, second = step_meters(record)
    assert first == (0, 10.0, {"generate": 0.6, "train": 0.2, "publish": 0.05}, {0: 3}, {0: 1})
    assert second == (1, 4.0, {"train": 0.25, "publish": 0.0}, {1: 4, 0: 2}, {1: 1})

    assert length_shares(record, 0, 0) == [(4, 0.5, 1.0), (64, 0.5, 0.0)]
    assert length_shares(record, 0, 1) == [(4, 0.5, 0.5), (64, 0.5, 0.5)]
