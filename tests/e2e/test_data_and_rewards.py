"""Stop strings, mixtures and several rewards in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.rewards import STOPS, no_stop, odd_if_level
from tests.e2e.small import folder, small_config
from tests.tiny import EOS

from twofold.obs.record import Record
from twofold.runtime import run
from twofold.tasks.load import load_task

__all__ = ["folder"]


def test_a_run_with_all_of_it(folder: Path, tmp_path: Path) -> None:
    for name, extra in {"a": {"level": 1}, "b": {}}.items():
        rows = [{"prompt": f"{name}{i}", **extra} for i in range(9)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    config = small_config(folder, tmp_path / "run", run__save_model=False, train__steps=3)
    config.rollout.stop = STOPS
    config.rollout.max_new_tokens = 24
    config.task.name, config.task.held_out = "jsonl", 1
    config.task.mixture = [
        {"path": str(tmp_path / n), "weight": w} for n, w in (("a", 2), ("b", 1))
    ]
    config.reward.weights = [0.5, 1.0]
    assert run.train(config, reward=[no_stop, odd_if_level]).outcome == "done"
    questions = {prompt.content for prompt in load_task(config.task).train}
    with Record.open(tmp_path / "run", read_only=True) as record:
        trained = [group for version in range(3) for group in record.trained_groups(version)]
        assert [group.prompt.content[0] for group in trained].count("a") in (3, 4, 5)
        assert {group.prompt.content for group in trained} <= questions
        reasons = set()
        for sample in (s for group in trained for s in group.samples):
            reasons.add(sample.finish_reason)
            assert not any(stop in sample.text for stop in STOPS)
            assert sample.finish_reason == "length" or len(sample.token_ids) <= 24
            if sample.finish_reason == "length":
                assert len(sample.token_ids) == 24
        assert reasons == {"stop", "length"} or reasons == {"stop"}
        for group in trained:
            is_a = group.prompt.content[0] == "a"
            for sample in group.samples:
                expected = 0.5 + (sum(sample.token_ids) % 2 if is_a else 0)
                assert sample.reward == expected
        ended = [s for group in trained for s in group.samples if s.finish_reason == "stop"]
        assert any(s.token_ids[-1] != EOS for s in ended), "a text ended one"


def test_stop_strings_survive_a_resume(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """The second process finds the first one's unfinished samples, and they end where they did."""

    class Crash(BaseException):
        pass

    def config(name: str):
        config = small_config(folder, tmp_path / name, run__save_model=False)
        config.rollout.stop, config.rollout.quantum_decode_steps = STOPS, 2
        config.rollout.max_new_tokens = 24
        return config

    def texts(name: str):
        with Record.open(tmp_path / name, read_only=True) as record:
            trained = [group for version in range(4) for group in record.trained_groups(version)]
            return [[(s.token_ids, s.text, s.finish_reason) for s in g.samples] for g in trained]

    run.train(config("whole"))
    commit, n = Record.commit, 0

    def dying_commit(self, *args):
        nonlocal n
        commit(self, *args)
        n += 1
        if n == 12:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Record, "commit", dying_commit)
        with pytest.raises(Crash):
            run.train(config("crashed"))
    with Record.open(tmp_path / "crashed", read_only=True) as record:
        live = record.live_groups()
        assert any(s.token_ids and not s.finished for group in live for s in group.samples)
    run.resume(tmp_path / "crashed")
    assert texts("crashed") == texts("whole")
