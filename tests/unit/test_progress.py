"""What a run shows, as plain lines and live; and the TensorBoard files."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from twofold.obs.progress import Progress, duration, step_row, time_shares
from twofold.obs.tensorboard import TensorBoard

METRICS = {
    "reward/mean": 0.4242,
    "pass_rate": 0.4,
    "length/mean": 12.34,
    "tokens_per_s": 812.3,
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "kl": 0.0123,
    "entropy": 0.5432,
    "clip_fraction": 0.012,
    "logprob_gap/max": 0.0012,
    "time/generate": 6.0,
    "time/train": 3.0,
    "time/wait": 1.0,
    "time/step_s": 10.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_plain_lines() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress.message("model    here [not markup] :smile:")
        progress.phase("generate")
        progress.quantum(64, 800.0)
        progress.step(3, 30, METRICS)
        progress.evaluation(
            30,
            {
                "eval/pass_rate": 0.9,
                "eval/pass_rate_stderr": 0.021,
                "eval/greedy_pass_rate": 1.0,
                "eval/length": 3.25,
            },
        )
    assert out.getvalue().splitlines() == [
        "model    here [not markup] :smile:",
        "step 3/30  reward 0.424  pass 40%  length 12.3  tok/s 812  stale 0.50  old 1  kl 0.0123  "
        "entropy 0.543  clip 1.2%  gap 1.2e-03  s 10.0  ETA 4m30s  | generate 60% train 30% "
        "wait 10%",
        "held-out at version 30: pass rate 0.900 ± 0.021 at temperature 1, greedy 1.000, "
        "length 3.2",
    ]


def test_missing_metrics_are_dashes() -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.step(1, 2, {})
    progress.evaluation(0, {"eval/greedy_pass_rate": 0.5})
    progress.close()
    step, evaluation = out.getvalue().splitlines()
    assert step == (
        "step 1/2  reward -  pass -  length -  tok/s -  stale -  old -  kl -  entropy -  clip -  "
        "gap -  s -  ETA -  | -"
    )
    assert evaluation == (
        "held-out at version 0: pass rate - at temperature 1, greedy 0.500, length -"
    )


def test_eta_follows_the_latest_steps() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for version in range(1, 21):
        seconds = 100.0 if version <= 10 else 2.0  # the first ten are slow and forgotten
        progress.step(version, 30, {"time/step_s": seconds})
    assert "ETA 20s" in out.getvalue().splitlines()[-1]


def test_live_display(terminal: Terminal) -> None:
    progress = Progress(terminal)
    progress.message("[b]chosen[/b]")
    progress.phase("generate")
    progress.phase("train")  # at once: phases are never skipped
    progress.step(1, 30, METRICS)
    progress.step(2, 30, METRICS)
    progress.close()
    progress.close()
    progress.message("afterwards")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", terminal.getvalue())
    assert "[b]chosen[/b]" in shown
    assert "now: generate" in shown and "now: train" in shown
    assert shown.count("entropy") == 1  # the titles, once for both rows
    assert step_row(2, 30, METRICS) in shown
    assert "step 2 of 30, ETA 4m40s, last step: generate 60% train 30% wait 10%" in shown
    assert shown.endswith("afterwards\n")
    hidden, visible = terminal.getvalue().rfind("\x1b[?25l"), terminal.getvalue().rfind("\x1b[?25h")
    assert hidden < visible  # the cursor is back


def test_rows_fit_a_terminal_of_80_columns() -> None:
    large = {**METRICS, "tokens_per_s": 99999.0, "time/step_s": 999.9, "kl": 9.9999}
    assert len(step_row(999, 999, large)) <= 80


def test_shares_do_not_depend_on_the_unit_and_leave_out_what_is_next_to_nothing() -> None:
    assert time_shares({"time/generate": 0.6, "time/train": 0.4, "time/switch": 0.001}) == (
        "generate 60% train 40%"
    )
    assert time_shares({}) == ""


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 42, 190, 7500)] == ["0s", "42s", "3m10s", "2h05m"]


def test_tensorboard_points_are_on_disk_at_once_and_a_resumed_run_adds_to_them(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    first = TensorBoard(tmp_path)
    first.scalars(1, {"reward/mean": 0.5})
    second = TensorBoard(tmp_path)
    second.scalars(2, {"reward/mean": 0.75})
    points = []
    for path in (tmp_path / "tensorboard").iterdir():
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                points.append((event.step, value.tag, value.tensor.float_val[0]))
    assert sorted(points) == [(1, "reward/mean", 0.5), (2, "reward/mean", 0.75)]
    first.close()
    second.close()
