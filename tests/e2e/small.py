"""A whole run in a second: a tiny random model and the addition task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tiny import tiny_folder

from twofold.config import Config
from twofold.obs.record import Record


def versions(record: Record) -> dict[int, str]:
    """The checksum of each version that exists, in order."""
    return dict(record.query("SELECT version, checksum FROM versions ORDER BY n"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def small_config(folder: Path, run_dir: Path, **changes: Any) -> Config:
    """`changes` are options with __ for the dot: train__steps=3."""
    config = Config()
    config.model.name, config.model.dtype = str(folder), "float32"
    config.run.dir, config.run.deterministic, config.run.tensorboard = str(run_dir), True, False
    config.run.eval_samples = 1
    config.rollout.group_size, config.rollout.max_new_tokens = 4, 10
    config.rollout.max_running_samples, config.rollout.quantum_decode_steps = 8, 3
    config.sched.groups_per_step = 2
    config.train.steps, config.train.learning_rate = 4, 1e-3
    config.task.held_out = 2
    for name, value in changes.items():
        section, _, option = name.partition("__")
        setattr(getattr(config, section), option, value)
    return config
