"""Weights & Biases and trackio get every metric once, and a resumed run finds its own again. The
packages are fakes; nothing is sent anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config

from twofold.config import Config
from twofold.obs.record import Record
from twofold.obs.trackers import Trackers
from twofold.runtime import run

__all__ = ["folder"]


class FakePackage(ModuleType):
    """What both packages have in common: `init` gives a run with `log` and `finish`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> FakePackage:
        self.begun.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakePackage]:
    fakes = {name: FakePackage(name) for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


def test_a_run_sends_what_it_records(
    folder: Path, tmp_path: Path, packages: dict[str, FakePackage]
) -> None:
    config = small_config(
        folder, tmp_path / "sums-1", run__wandb=True, run__trackio=True, run__name="sums"
    )
    config.train.steps = 2
    run.train(config, reward=even_sum)
    with Record.open(tmp_path / "sums-1", read_only=True) as record:
        recorded = {(row.version, row.name, row.value) for row in record.metrics()}
    for fake in packages.values():
        sent = [(v, name, x) for v, metrics in fake.logged for name, x in metrics.items()]
        assert set(sent) == recorded and len(sent) == len(recorded)
        steps = [version for version, _ in fake.logged]
        assert steps == sorted(steps), "Weights & Biases drops what goes back"
        assert fake.finished == 1
        [begun] = fake.begun
        assert begun["project"] == "sums" and begun["name"].startswith("sums-1")
        assert begun["config"]["train"]["steps"] == 2
        assert begun["resume"] == "never"


def test_a_resumed_run_goes_on_in_its_own(tmp_path: Path, packages: dict[str, FakePackage]) -> None:
    config = Config()
    config.run.wandb = config.run.trackio = True
    for run_dir in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        run_dir.mkdir(exist_ok=True)
        Trackers(config, run_dir).close()
    first, again, other = packages["wandb"].begun
    assert first["id"] == again["id"] != other["id"]
    assert [x["resume"] for x in (first, again, other)] == ["never", "allow", "never"]
    assert first["dir"] == str(tmp_path / "a"), "nothing is written beside the run"
    first, again, other = packages["trackio"].begun
    assert first["name"] == again["name"] != other["name"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_refused_before_the_run(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    config = small_config(folder, tmp_path / "run", **{f"run__{name}": True})
    with pytest.raises(ValueError, match=f"pip install {name}") as refused:
        run.train(config, reward=even_sum)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_a_package_says_when_it_cannot_begin_is_one_line(
    tmp_path: Path, packages: dict[str, FakePackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_logged_in(**options: Any) -> None:
        raise RuntimeError("api_key not configured\nsecond line")

    monkeypatch.setattr(packages["wandb"], "init", not_logged_in)
    config = Config()
    config.run.wandb = True
    with pytest.raises(ValueError, match=r"run\.wandb = true: wandb says: api_key not conf\w+$"):
        Trackers(config, tmp_path)


def test_nothing_is_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    trackers = Trackers(Config(), tmp_path)
    trackers.scalars(1, {"loss": 1.0})
    trackers.close()
    assert not list(tmp_path.iterdir())
