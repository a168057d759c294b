"""A disk that fills up stops a run with one line, and the run goes on once there is space."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config, versions

from twofold.config import to_toml
from twofold.obs.record import Record
from twofold.runtime import run

__all__ = ["folder"]


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Longer files cannot be written in this process: the nearest to a full disk without a mount.
    Only the soft limit is moved, so that it can be lifted again."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def config_for(folder: Path, run_dir: Path) -> Any:
    return small_config(folder, run_dir, train__steps=3, run__checkpoint_every=1)


def test_wherever_a_write_fails_the_run_goes_on_unchanged(folder: Path, tmp_path: Path) -> None:
    """Too little for the empty record, for the record, and for the largest file, a checkpoint's."""
    assert run.train(config_for(folder, tmp_path / "whole"), reward=even_sum).outcome == "done"
    with Record.open(tmp_path / "whole", read_only=True) as record:
        whole = versions(record)
    largest = max(f.stat().st_size for f in (tmp_path / "whole").rglob("*") if f.is_file())
    where = set()
    for n_bytes in (2_000, 100_000, largest - 1000):
        name = f"at-most-{n_bytes}"
        with files_of_at_most(n_bytes), pytest.raises(OSError, match="cannot write") as stopped:
            run.train(config_for(folder, tmp_path / name), reward=even_sum)
        message = str(stopped.value)
        print(message)
        assert "\n" not in message
        where.add(Path(message.split(": ")[0]).name)
        if "twofold resume" in message:
            assert run.resume(tmp_path / name, reward=even_sum).outcome == "done", message
        else:  # not even the empty record: as if it had never been asked for
            assert not (tmp_path / name).exists(), message
            assert run.train(config_for(folder, tmp_path / name), reward=even_sum).outcome == "done"
        with Record.open(tmp_path / name, read_only=True) as record:
            assert versions(record) == whole, message
    assert {"record.sqlite", "tensors.safetensors"} <= where


def test_a_full_disk_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    """The real thing: a file system of 1 MiB, mounted where the test may do that."""
    run_dir, config = tmp_path / "disk" / "run", tmp_path / "config.toml"
    run_dir.parent.mkdir()
    options = config_for(folder, run_dir)
    options.run.keep_checkpoints = 50
    options.reward.function = "tests.e2e.rewards:even_sum"
    config.write_text(to_toml(options))
    mount = f"mount -t tmpfs -o size=1m none {run_dir.parent}"
    namespace = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else []), "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*namespace, mount]).returncode:
        pytest.skip("no file system may be mounted here")
    twofold = f"{sys.executable} -m twofold"
    script = f"""
        {mount}; {twofold} train {config}; echo "rc $?" >&2
        mount -o remount,size=20m {run_dir.parent}; {twofold} resume {run_dir}; echo "rc $?" >&2
    """
    done = subprocess.run([*namespace, script], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("rc", "twofold:"))]
    assert "Traceback" not in done.stderr
    assert [line for line in lines if line.startswith("rc")] == ["rc 1", "rc 0"], done
    (error,) = (line for line in lines if line.startswith("twofold: error: "))
    assert "cannot write" in error and f"twofold resume {run_dir}" in error
