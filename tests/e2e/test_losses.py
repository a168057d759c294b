"""Whole runs with each loss, several updates a batch, groups that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tests.e2e.rewards import always_right, even_sum, often_right
from tests.e2e.small import folder, small_config, versions
from tests.e2e.test_resume import Crash, crash_at, outcome

from twofold.config import TrainConfig
from twofold.obs.record import Record
from twofold.runtime import checkpoint, run

__all__ = ["folder"]

LOSSES = get_args(get_type_hints(TrainConfig)["loss"])


def metrics(run_dir: Path) -> dict[str, list[float]]:
    """By name, in order of versions."""
    found: dict[str, list[float]] = {}
    with Record.open(run_dir, read_only=True) as record:
        for row in record.metrics():
            found.setdefault(row.name, []).append(row.value)
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_with_each_loss(folder: Path, tmp_path: Path, loss: str) -> None:
    options: dict[str, Any] = {"train__steps": 2, "task__held_out": 0, "train__loss": loss}
    if loss in ("rloo", "reinforce_pp", "ppo"):
        options |= {"train__kl_coef": 0.1, "train__kl_estimator": "k1", "train__kl_in_reward": True}
    if loss == "dapo":
        options |= {"train__clip_high": 0.28}
        options |= {"train__overlong_buffer_tokens": 4, "sched__dynamic_sampling": True}
    result = run.train(small_config(folder, tmp_path / "run", **options), reward=even_sum)
    assert result.outcome == "done"
    found = metrics(tmp_path / "run")
    assert all(norm > 0 for norm in found["grad_norm"])
    assert ("kl" in found) == ("train__kl_coef" in options)
    assert ("value/explained_variance" in found) == (loss == "ppo")
    with Record.open(tmp_path / "run", read_only=True) as record:
        assert len(set(versions(record).values())) == 3, "each step changed the weights"


@pytest.mark.parametrize(("staleness", "batches_ahead"), [(1, 0), (3, 1)])
def test_two_updates_a_batch(
    folder: Path, tmp_path: Path, staleness: int, batches_ahead: int
) -> None:
    """Versions count updates and are published once a batch; the last update of a batch is within
    the threshold."""
    config = small_config(
        folder,
        tmp_path / "run",
        train__steps=5,
        train__updates_per_batch=2,
        train__correction="token_truncated",
        sched__max_staleness=staleness,
        run__checkpoint_every=2,
        run__eval_every=3,
    )
    result = run.train(config, reward=even_sum)
    assert (result.outcome, result.version) == ("done", 10)
    stale = set()
    with Record.open(tmp_path / "run", read_only=True) as record:
        assert list(versions(record)) == [0, 2, 4, 6, 8, 10]
        evaluated = [row.version for row in record.metrics("eval/pass_rate")]
        for version in range(0, 10, 2):
            groups = record.trained_groups(version)
            assert len(groups) == 2
            for group in groups:
                assert group.deadline - group.start_version == 2 * batches_ahead
                stale |= {version + 1 - v for s in group.samples for v in s.versions}
    assert max(stale) == staleness, "as stale as allowed, in the last update"
    assert evaluated == [0, 6, 10]
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"version-000008", "version-000010"}
    assert max(metrics(tmp_path / "run")["staleness/max"]) == staleness


def test_more_updates_than_the_staleness_allows_are_refused(folder: Path, tmp_path: Path) -> None:
    config = small_config(folder, tmp_path / "run", train__updates_per_batch=3)
    config.sched.groups_per_step = 3
    with pytest.raises(ValueError, match=r"^train\.updates_per_batch = 3 is refused: "):
        run.train(config, reward=even_sum)
    assert not (tmp_path / "run").exists()


def test_a_critic_and_two_updates_survive_a_crash(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is done again from the last checkpoint, with the value head and both updates."""

    def config(name: str) -> Any:
        return small_config(
            folder,
            tmp_path / name,
            train__loss="ppo",
            train__updates_per_batch=2,
            train__correction="decoupled",
            train__kl_coef=0.1,
            train__kl_estimator="k1",
            train__kl_in_reward=True,
            sched__max_staleness=3,
            run__checkpoint_every=2,
            run__save_model=False,
            task__held_out=0,
        )

    run.train(config("whole"), reward=even_sum)
    with Record.open(tmp_path / "whole", read_only=True) as record:
        kinds = [event.kind for _, _, event in record.events()]
    last_train = max(n for n, kind in enumerate(kinds, 1) if kind == "Trained")
    third = [n for n, kind in enumerate(kinds, 1) if kind == "Trained"][2]
    for n, before in ((third, False), (last_train, True)):
        name = f"crash-{n}"
        with monkeypatch.context() as patch:
            crash_at(patch, n, before)
            with pytest.raises(Crash):
                run.train(config(name), reward=even_sum)
        assert run.resume(tmp_path / name, reward=even_sum).outcome == "done"
        assert outcome(tmp_path / name) == outcome(tmp_path / "whole")
    last = [checkpoint.find(tmp_path / d / "checkpoints", 8)[1] for d in ("whole", name)]
    assert last[0].keys() == last[1].keys() and "master.value_head.weight" in last[0]
    assert all(last[0][key].equal(last[1][key]) for key in last[0])


def test_a_solved_task_stops_saying_why(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sched__dynamic_sampling": True, "sched__max_drops_per_step": 3}
    config = small_config(folder, tmp_path / "run", **options)
    result = run.train(config, reward=always_right)
    assert result.outcome == (
        "stopped: 4 groups dropped in step 1, the last (group 3) because its rewards are all equal"
    )
    assert result.version == 0


def test_groups_without_variance_are_replaced(folder: Path, tmp_path: Path) -> None:
    for dynamic in (False, True):
        name = f"dynamic-{dynamic}"
        config = small_config(folder, tmp_path / name, sched__dynamic_sampling=dynamic)
        assert run.train(config, reward=often_right).outcome == "done"
        found = metrics(tmp_path / name)
        replaced = sum(found["groups/dropped"])
        assert (sum(found["groups/no_variance"]) > 0) == (not dynamic)
        assert (replaced > 0) == dynamic
        with Record.open(tmp_path / name, read_only=True) as record:
            reasons = {
                reason
                for (reason,) in record.query(
                    "SELECT drop_reason FROM groups WHERE status = 'dropped'"
                )
            }
        assert reasons == ({"its rewards are all equal"} if dynamic else set())
