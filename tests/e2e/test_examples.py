"""Every example is read, finds its data and its reward, and trains a step (of a random model)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import tiny_folder

from twofold.config import load_config
from twofold.obs.record import Record
from twofold.runtime import run
from twofold.tasks.load import load_task

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_a_step(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where its comments say to start it
    config = load_config(path)
    n_held_out = len(load_task(config.task).held_out)
    assert n_held_out > 0 and "One GPU" in path.read_text()
    # small: as it is but for the model, the number of steps and of completions
    config.model.name, config.model.dtype = str(folder), "float32"
    config.run.dir, config.run.tensorboard, config.run.save_model = (
        str(tmp_path / "r"),
        False,
        False,
    )
    config.run.eval_samples = 0
    config.train.steps, config.sched.groups_per_step = 1, 2
    config.rollout.max_new_tokens = min(config.rollout.max_new_tokens, 12)
    config.train.overlong_buffer_tokens = min(config.train.overlong_buffer_tokens, 4)
    # a random model is right about nothing: equal rewards must not count as used up
    config.sched.dynamic_sampling = False
    assert run.train(config).outcome == "done"
    with Record.open(tmp_path / "r", read_only=True) as record:
        rows = list(record.query("SELECT reward, failed FROM samples JOIN groups USING (group_id)"
                                 " WHERE trained_version IS NOT NULL"))  # fmt: skip
    assert rows and all(failed is None for _, failed in rows), rows
