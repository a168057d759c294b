"""A run that dies at any moment goes on where its record ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config, versions
from tests.tiny import tiny_folder

from twofold.config import to_toml
from twofold.obs.record import Record
from twofold.runtime import checkpoint, run

__all__ = ["folder"]


class Crash(BaseException):
    """Not an Exception, so that nothing on the way handles it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, n: int, before_commit: bool) -> None:
    """The process dies at the n-th event: before it is committed, or right after."""
    commit, calls = Record.commit, Counter[str]()

    def dying_commit(self: Record, *args: Any) -> None:
        calls["commit"] += 1
        if before_commit and calls["commit"] == n:
            raise Crash
        commit(self, *args)
        if calls["commit"] == n:
            raise Crash

    monkeypatch.setattr(Record, "commit", dying_commit)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What must not depend on crashes."""
    with Record.open(run_dir, read_only=True) as record:
        trained = {v: record.trained_groups(v) for v in range(20)}
        return {
            "checksums": versions(record),
            "tokens": {
                v: [[s.token_ids for s in g.samples] for g in t] for v, t in trained.items()
            },
            "batches": {v: [g.group_id for g in groups] for v, groups in trained.items()},
            "live": record.live_groups(),
        }


def crash_points(kinds: list[str], stride: int) -> list[tuple[int, bool]]:
    """(n-th event, before its commit?): every `stride`-th event but the first and the last, before
    and after the commit in turn; with stride 1 both moments of every kind of event."""
    points = [(n, n // stride % 2 == 0) for n in range(2, len(kinds), stride)]
    seen = {(kinds[n - 1], before) for n, before in points}
    for n in range(2, len(kinds)):
        for before in (True, False):
            if stride == 1 and (kinds[n - 1], before) not in seen:
                seen.add((kinds[n - 1], before))
                points.append((n, before))
    return points


@pytest.mark.parametrize(("staleness", "stride"), [(0, 3), (2, 1)])
def test_a_crash_at_any_event_changes_nothing(
    folder: Path, tmp_path: Path, staleness: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> Any:
        return small_config(
            folder,
            tmp_path / name,
            sched__max_staleness=staleness,
            rollout__quantum_decode_steps=4,
            train__steps=3,
            run__checkpoint_every=2,
            run__save_model=False,
        )

    run.train(config("whole"), reward=even_sum)
    whole = outcome(tmp_path / "whole")
    with Record.open(tmp_path / "whole", read_only=True) as record:
        kinds = [event.kind for _, _, event in record.events()]
    points = crash_points(kinds, stride)
    assert len(points) > len(kinds) // stride - 3
    for n, before in points:
        name = f"crash-{n}-{before}"
        with monkeypatch.context() as patch:
            crash_at(patch, n, before)
            with pytest.raises(Crash):
                run.train(config(name), reward=even_sum)
        result = run.resume(tmp_path / name, reward=even_sum)
        where = f"crash {'before' if before else 'after'} event {n} of {len(kinds)}, {kinds[n - 1]}"
        assert result.outcome == "done", where
        assert outcome(tmp_path / name) == whole, where
        shutil.rmtree(tmp_path / name)


def test_two_crashes_and_a_broken_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is damaged: an older one is taken, and more is trained again."""
    config = small_config(folder, tmp_path / "run", run__checkpoint_every=1, train__steps=5)
    whole_config = small_config(folder, tmp_path / "whole", run__checkpoint_every=1, train__steps=5)
    run.train(whole_config, reward=even_sum)
    with monkeypatch.context() as patch:
        crash_at(patch, 30, before_commit=False)
        with pytest.raises(Crash):
            run.train(config, reward=even_sum)
    newest = checkpoint.newest_verified(tmp_path / "run" / "checkpoints")
    assert newest is not None
    tensors = newest[1] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    with monkeypatch.context() as patch:
        crash_at(patch, 12, before_commit=False)
        with pytest.raises(Crash):
            run.resume(tmp_path / "run", reward=even_sum)
    assert run.resume(tmp_path / "run", reward=even_sum).outcome == "done"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_kill_9_and_resume(folder: Path, tmp_path: Path) -> None:
    """The real thing, from the command line: SIGKILL between two checkpoints, then resume; the
    weights are those of a run that nothing interrupted. The reward takes its time, so that the
    kill comes where it should."""

    def config(name: str) -> Any:
        return small_config(
            folder,
            tmp_path / name,
            train__steps=12,
            run__checkpoint_every=5,
            run__save_model=False,
            reward__function="tests.e2e.rewards:unhurried",
        )

    (tmp_path / "run.toml").write_text(to_toml(config("run")))
    command = [sys.executable, "-m", "twofold", "train", str(tmp_path / "run.toml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    trained = 0
    while trained < 6:
        time.sleep(0.01)
        assert process.poll() is None, "the run ended before it could be killed"
        if (tmp_path / "run" / "record.sqlite").exists():
            with Record.open(tmp_path / "run", read_only=True) as record:
                trained = len(versions(record)) - 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    resume = [sys.executable, "-m", "twofold", "resume", str(tmp_path / "run")]
    done = subprocess.run(resume, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"resume +from the checkpoint of version (5|10)\b", done.stdout), done.stdout
    run.train(config("whole"))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    with Record.open(tmp_path / "run", read_only=True) as record:
        assert list(versions(record)) == list(range(13))
        batches = [g.group_id for v in range(12) for g in record.trained_groups(v)]
        assert not record.live_groups()
    assert sorted(batches) == list(range(24)), "a prompt was lost or repeated"


def test_a_stop_request_ends_cleanly_and_goes_on(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C: the running command ends, a checkpoint is written, resume finishes the run."""
    config = small_config(folder, tmp_path / "run", train__steps=8, run__checkpoint_every=0)
    seen: list[int] = []

    class Stopping(run.Progress):
        def step(self, version: int, steps: int, metrics: dict[str, float]) -> None:
            seen.append(version)
            if version == 3:
                os.kill(os.getpid(), signal.SIGINT)

    result = run.train(config, reward=even_sum, progress=Stopping())
    assert result.outcome == "stopped: Ctrl-C" and result.version == 3
    assert [v for v, _ in checkpoint._versions(tmp_path / "run" / "checkpoints")] == [3]
    assert run.resume(tmp_path / "run", reward=even_sum).outcome == "done"
    with pytest.raises(ValueError, match="finished"):
        run.resume(tmp_path / "run", reward=even_sum)


@pytest.mark.parametrize("version", [0, 4])
def test_a_stop_cancels_an_evaluation_and_resume_makes_it_again(
    folder: Path, tmp_path: Path, version: int
) -> None:
    """Before the first step and after the last; nothing of it counts, the second one is whole."""
    config = small_config(folder, tmp_path / "run")

    class Stopping(run.Progress):
        at, stopped = 0, False

        def step(self, version: int, steps: int, metrics: dict[str, float]) -> None:
            self.at = version

        def phase(self, name: str) -> None:
            if name == "eval" and self.at == version and not self.stopped:
                self.stopped = True  # a second one would interrupt at once
                os.kill(os.getpid(), signal.SIGINT)

    def evaluations() -> list[tuple[int, str | None]]:
        with Record.open(tmp_path / "run", read_only=True) as record:
            rows = [row for row in record.commands() if row.command.kind == "Evaluate"]
            assert all(row.command.version in (0, 4) for row in rows)
            return [(row.command.version, row.outcome) for row in rows]

    def rates() -> set[int]:
        with Record.open(tmp_path / "run", read_only=True) as record:
            return {row.version for row in record.metrics("eval/pass_rate")}

    assert run.train(config, reward=even_sum, progress=Stopping()).outcome == "stopped: Ctrl-C"
    assert (version, "cancelled") in evaluations() and (version, "done") not in evaluations()
    assert version not in rates()
    assert run.resume(tmp_path / "run", reward=even_sum).outcome == "done"
    assert (version, "done") in evaluations()
    assert rates() == {0, 4}


@pytest.mark.parametrize("what", ["model", "training prompts", "checkpoint"])
def test_resume_with_something_else_is_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tiny_folder(tmp_path / "model")
    rows = [json.dumps({"prompt": f"old {n}", "answer": "1"}) for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    task = {"task__name": "jsonl", "task__path": str(tmp_path / "data.jsonl")}
    for name, seed in (("run", 0), ("other", 1)):
        config = small_config(own, tmp_path / name, run__checkpoint_every=1, run__seed=seed, **task)
        with monkeypatch.context() as patch:
            crash_at(patch, 30, before_commit=False)
            with pytest.raises(Crash):
                run.train(config, reward=even_sum)
    if what == "model":
        tiny_folder(own, seed=5)
    elif what == "training prompts":
        (tmp_path / "data.jsonl").write_text("\n".join(rows[1:]))
    else:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "other" / "checkpoints").rename(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match=what):
        run.resume(tmp_path / "run", reward=even_sum)


def test_a_crash_before_the_first_event_or_while_the_model_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(folder, tmp_path / "first")
    with monkeypatch.context() as patch:
        crash_at(patch, 1, before_commit=True)
        with pytest.raises(Crash):
            run.train(config, reward=even_sum)
    assert run.resume(tmp_path / "first", reward=even_sum).outcome == "done"
    with Record.open(tmp_path / "first", read_only=True) as record:
        assert list(versions(record)) == [0, 1, 2, 3, 4]

    def dying(*args: Any) -> None:
        raise Crash

    config.run.dir = str(tmp_path / "last")
    with monkeypatch.context() as patch:
        patch.setattr(run.weights, "save_model", dying)
        with pytest.raises(Crash):
            run.train(config, reward=even_sum)
    assert run.resume(tmp_path / "last", reward=even_sum).outcome == "done"
    assert (tmp_path / "last" / "model" / "model.safetensors").is_file()


def test_a_stop_does_not_wait_for_rewards(folder: Path, tmp_path: Path) -> None:
    """Rewards that hang are outstanding when the run stops, and asked for again on resume."""
    config = small_config(folder, tmp_path / "run", reward__timeout_s=60.0, task__held_out=0)
    config.reward.function = "tests.e2e.rewards:slow"
    (tmp_path / "run.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "twofold", "train", str(tmp_path / "run.toml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    asked = 0
    while asked < 2:
        time.sleep(0.05)
        assert process.poll() is None
        if (tmp_path / "run" / "record.sqlite").exists():
            with Record.open(tmp_path / "run", read_only=True) as record:
                asked = sum(row.command.kind == "Reward" for row in record.commands())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 143
