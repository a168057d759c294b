"""bench/published.py: its parts hold, on few simulated samples (figures: docs/published.md)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twofold.sim.cluster import Cluster

BENCH = Path(__file__).parents[2] / "bench"
THIN = 16
KEYS = {
    "separated",
    "fusion",
    "stalesync",
    "fusion_over_separated",
    "stalesync_over_separated",
    "linearity_4",
}


@pytest.fixture(scope="module")
def modules() -> Any:
    """(published, published_model), as the script imports them."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("published"), importlib.import_module("published_model")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def model(modules: tuple[ModuleType, ModuleType]) -> Any:
    return modules[1]


@pytest.fixture(scope="module")
def given(model: Any) -> dict[str, Any]:
    return dict(model.assumptions())


@pytest.fixture(scope="module")
def cluster(model: Any, given: dict[str, Any]) -> Cluster:
    found = model.calibrate(given)
    assert isinstance(found, Cluster)
    return found


def test_the_step_that_is_calibrated_on_comes_out(
    model: Any, given: dict[str, Any], cluster: Cluster
) -> None:
    found = model.predict_step(given, cluster, "step")
    for name in ("rollout", "reference", "update", "reshard", "offload", "total"):
        assert found[name] == pytest.approx(given["step"][f"{name}_s"], rel=0.01), name


def test_runs_are_measured_over_whole_cycles(model: Any) -> None:
    """S + 1 batches are trained in a row, so an odd window of S = 1 counts one kind too often."""
    for staleness in range(5):
        for planned in (1, 3, 5, 8):
            setting = model.Setting(staleness=staleness, planned_steps=planned)
            assert setting.measured_steps >= 1
            assert setting.measured_steps % (staleness + 1) == 0


def test_thinned_runs_agree_with_each_other(
    model: Any, given: dict[str, Any], cluster: Cluster
) -> None:
    for staleness in (0, 1):
        coarse, fine = (
            model.must(
                given, cluster, 1.45, model.Setting(staleness=staleness, thin=thin, planned_steps=3)
            ).tokens_per_s
            for thin in (16, 8)
        )
        assert coarse == pytest.approx(fine, rel=0.02), staleness


def test_a_folded_run_is_the_run_of_a_part(
    model: Any, given: dict[str, Any], cluster: Cluster
) -> None:
    """Four supernodes simulated as one: the same but for what grows with the supernodes."""
    setting = model.Setting(
        staleness=1, supernodes=4, batch=4, thin=THIN, host=False, planned_steps=3
    )
    whole, part = (
        model.must(given, cluster, 1.45, setting._replace(fold=fold)).tokens_per_s
        for fold in (1, 4)
    )
    assert part == pytest.approx(whole, rel=0.02)


def test_each_placement_gains_over_the_best_split_of_the_baseline(
    modules: tuple[Any, Any], given: dict[str, Any], cluster: Cluster
) -> None:
    published, model = modules
    setting = model.Setting(thin=THIN, planned_steps=3)
    three = model.three_runs(given, cluster, 1.45, setting, exact=False)
    assert set(three.splits) == set(given["runs"]["splits"])
    best = max(found.tokens_per_s for found in three.splits.values())
    assert best == three.separated.tokens_per_s
    assert best == pytest.approx(given["targets"]["separated"], rel=0.03)
    assert best < three.fusion.tokens_per_s < three.stalesync.tokens_per_s
    shares = {**three.fusion.outcome.busy, **three.fusion.outcome.idle}
    assert sum(shares.values()) == pytest.approx(1)
    found = published.summary(three, 1.45, 895.2, {"linearity_4": 1.0})
    assert found.keys() >= KEYS


def test_climbing_finds_the_best_split(model: Any, given: dict[str, Any], cluster: Cluster) -> None:
    setting = model.Setting(thin=THIN, planned_steps=3)
    everywhere = model.try_splits(given, cluster, 1.45, setting)
    climbed = model.try_splits(given, cluster, 1.45, setting, near=320)
    assert model.best_of(climbed) == model.best_of(everywhere)


def test_quick_ends_with_one_json_object(
    modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", "--quick"])
    modules[0].main()
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert found.keys() >= KEYS
    assert found["label"] == "simulated"
    assert 1 < found["fusion_over_separated"] < found["stalesync_over_separated"]
    assert "calibrated" in captured.err and "calibrated" not in captured.out
