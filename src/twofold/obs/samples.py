"""What a run looks like as text: its completions for a terminal, its history as JSON lines.

Owns: `twofold samples RUN` and `twofold log RUN`. Does not own: the record itself (`obs.record`),
the live display (`obs.progress`). No torch.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from twofold.obs.record import Record

Sort = Literal["newest", "best", "worst", "longest", "shortest"]

_ORDER: dict[Sort, str] = {
    "newest": "group_id DESC, idx",
    "best": "reward DESC NULLS LAST, group_id DESC, idx",
    "worst": "reward ASC NULLS LAST, group_id DESC, idx",
    "longest": "n_tokens DESC, group_id DESC, idx",
    "shortest": "n_tokens ASC, group_id DESC, idx",
}


class _Row(NamedTuple):
    group_id: int
    idx: int
    n_tokens: int
    finish_reason: str
    text: str | None
    reward: float | None
    failed: str | None
    advantage: float | None
    start_version: int
    trained_version: int | None
    drop_reason: str | None
    prompt: str


def print_samples(
    record: Record,
    step: int | None = None,
    n: int = 8,
    sort: Sort = "newest",
    console: Console | None = None,
) -> None:
    """Print the first `n` finished samples in the order `sort`, those of training step `step`
    (1 is the first) if given. ValueError when there are none."""
    steps = _steps(record)
    version = None if step is None else steps[step - 1] if 0 < step <= len(steps) else -1
    rows = [
        _Row(*row)
        for row in record.query(
            f"SELECT {', '.join(_Row._fields)} FROM samples JOIN groups USING (group_id)"
            " WHERE finish_reason IS NOT NULL AND (?1 IS NULL OR trained_version = ?1)"
            f" ORDER BY {_ORDER[sort]} LIMIT ?2",
            version,
            n,
        )
    ]
    if not rows:
        raise ValueError(_nothing(record, step, len(steps)))
    console = console or Console()
    group_id = None
    for row in rows:
        if row.group_id != group_id:
            group_id = row.group_id
            console.print(Text(_group_line(row, steps), style="bold"), soft_wrap=True)
            console.print(Text(_indented(_prompt_text(row.prompt)), style="dim"), soft_wrap=True)
        console.print(Text(_sample_line(row), style="cyan"), soft_wrap=True)
        console.print(Text(_indented(row.text or "")), soft_wrap=True)


def _steps(record: Record) -> list[int]:
    """The version that each step trained; a step may be several updates, each a version."""
    found = record.query("SELECT DISTINCT trained_version FROM groups ORDER BY 1")
    return [version for (version,) in found if version is not None]


def _nothing(record: Record, step: int | None, last: int) -> str:
    if step is None or last == 0:
        return f"{record.folder}: no sample is finished yet"
    return f"{record.folder}: step {step} has no samples; steps 1 to {last} are trained"


def _group_line(row: _Row, steps: list[int]) -> str:
    if row.trained_version is not None:
        fate = f"trained in step {steps.index(row.trained_version) + 1}"
    elif row.drop_reason is not None:
        fate = f"dropped: {visible(row.drop_reason)}"
    else:
        fate = "not trained yet"
    return f"group {row.group_id} (started at version {row.start_version}, {fate})"


def _sample_line(row: _Row) -> str:
    if row.failed is not None:
        judged = f"failed: {visible(row.failed)}"
    else:
        judged = "not judged yet" if row.reward is None else f"reward {row.reward:g}"
    advantage = "" if row.advantage is None else f", advantage {row.advantage:+.2f}"
    ended = f"{row.n_tokens} tokens, {row.finish_reason}"
    return f"  sample {row.idx}: {judged}{advantage}, {ended}"


def _prompt_text(prompt: str) -> str:
    content = json.loads(prompt)["content"]
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message['content']}" for message in content)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))


def visible(text: str) -> str:
    r"""Model output made harmless for a terminal: control and invisible formatting characters
    (Unicode categories C*, Zl, Zp, all but the line feed) become \x.. or \u.... escapes."""
    return "".join(
        char
        if char == "\n" or not (unicodedata.category(char)[0] == "C" or char in "\u2028\u2029")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def log_lines(record: Record) -> Iterator[str]:
    """The run's history in order, one JSON object a line: each event (`n`, `time_s`, `kind`, its
    fields), then each command it caused (`caused_by`, `time_s` of issue, `kind`, its fields)."""
    rows = record.query(
        "SELECT n AS place, NULL AS seq, time_s, body FROM events"
        " UNION ALL SELECT caused_by, seq, time_s, commands.body"
        " FROM commands JOIN events ON n = caused_by ORDER BY place, seq"
    )
    for place, seq, time_s, body in rows:
        key = "n" if seq is None else "caused_by"
        yield json.dumps({key: place, "time_s": time_s, **json.loads(body)})
