"""The text views: completions for a terminal, with nothing in them that acts on it; the log."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twofold.events import Reward, Rewarded, RunStarted, Train
from twofold.obs.record import (
    AdvantageRow,
    DroppedRow,
    FinishedRow,
    GroupRow,
    Record,
    RewardRow,
    Row,
    TrainedRow,
)
from twofold.obs.samples import Sort, log_lines, print_samples, visible
from twofold.types import Prompt, SampleId

EVIL = "\x1b]0;owned\x07\x1b[2J[bold]not markup[/bold] \u202eabc\x9b1m\r\x08end\nline two\x00"


@pytest.fixture
def record(tmp_path: Path) -> Any:
    rows: list[Row] = []
    for group_id in range(3):
        prompt = Prompt([{"role": "user", "content": f"question {group_id} \x1b[31m"}])
        rows.append(GroupRow(group_id, prompt, [1], 0, 3, 3))
        for index in range(2):  # the third is not finished
            sample_id = SampleId(group_id, index)
            text = EVIL if group_id == 0 else f"answer {group_id}.{index}"
            rows.append(FinishedRow(sample_id, 10 * group_id + index + 1, "stop", text))
            rows.append(RewardRow(sample_id, group_id - index / 2))
    rows += [
        RewardRow(SampleId(2, 1), None, "timed out \x1b[5m"),
        AdvantageRow(SampleId(1, 0), 0.5),
    ]
    rows += [TrainedRow(0, 0), TrainedRow(1, 1), DroppedRow(2, "cause")]
    with Record.create(tmp_path / "run", {}) as record:
        record.commit(0.0, RunStarted(), (), rows)
        yield record


def printed(record: Record, **options: Any) -> str:
    out = io.StringIO()
    print_samples(record, console=Console(file=out, width=40, force_terminal=False), **options)
    return out.getvalue()


def test_output_of_the_model_cannot_act_on_the_terminal(record: Record) -> None:
    text = printed(record)
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert (
        "\\x1b]0;owned\\x07\\x1b[2J[bold]not markup[/bold] \\u202eabc\\x9b1m\\r\\x08end\n" in text
    )
    assert "\n    line two\\x00\n" in text
    assert "failed: timed out \\x1b[5m" in text and "question 2 \\x1b[31m" in text
    assert visible("a\u2028b\u200bc\ud800") == "a\\u2028b\\u200bc\\ud800"
    assert visible("5 = 2 + 3\n\tünï \N{SNOWMAN} 数") == "5 = 2 + 3\n\\tünï \N{SNOWMAN} 数"


@pytest.mark.parametrize(
    "sort, first",
    [
        ("newest", "answer 2.0"),
        ("best", "answer 2.0"),
        ("worst", "line two"),  # sample (0, 1)
        ("longest", "answer 2.1"),
        ("shortest", "line two"),
    ],
)
def test_order_and_number(record: Record, sort: Sort, first: str) -> None:
    text = printed(record, sort=sort, n=1)
    assert first in text and text.count("  sample ") == 1
    assert printed(record, sort=sort, n=100).count("  sample ") == 6  # only finished ones


def test_one_step(record: Record) -> None:
    text = printed(record, step=2)
    assert "group 1 (started at version 0, trained in step 2)" in text
    assert "sample 0: reward 1, advantage +0.50, 11 tokens, stop" in text
    assert "group 0" not in text and "group 2" not in text
    assert "group 2 (started at version 0, dropped: cause)" in printed(record)
    with pytest.raises(ValueError, match="step 3 has no samples; steps 1 to 2 are trained"):
        printed(record, step=3)


def test_a_run_without_samples_says_so(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}) as record:
        for step in (None, 1):
            with pytest.raises(ValueError, match="no sample is finished yet"):
                printed(record, step=step)


def test_log_lines_are_the_history_in_order(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}) as record:
        record.commit(0.0, RunStarted(), [Reward(seq=0, group_id=4), Reward(seq=1, group_id=5)])
        end = Rewarded(command=1, group_id=5, n_valid=1, varies=False, cause="\x1b[2J")
        record.commit(2.5, end, [Train(seq=2, cards=(0,), version=0, group_ids=(5,))])
        lines = list(log_lines(record))

    assert all(line.isprintable() for line in lines)
    entries = [json.loads(line) for line in lines]
    assert [entry["kind"] for entry in entries] == [
        "RunStarted",
        "Reward",
        "Reward",
        "Rewarded",
        "Train",
    ]
    assert [entry["time_s"] for entry in entries] == [0.0, 0.0, 0.0, 2.5, 2.5]
    assert entries[2] == {
        "caused_by": 1, "time_s": 0.0, "kind": "Reward", "seq": 1, "cards": [], "epoch": 0,
        "group_id": 5,
    }  # fmt: skip
    assert entries[3]["n"] == 2 and entries[3]["command"] == 1
