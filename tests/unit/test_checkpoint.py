"""Checkpoints are whole or not there; broken ones are noticed; old ones go last."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from twofold.model import weights
from twofold.runtime import checkpoint

STATE = {"version": 3, "positions": [1, 2], "nested": {"lr": 1e-5}}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(7, 5, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "step": torch.tensor(3),
        "parameter": nn.Parameter(torch.full((2,), float("nan"))),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = checkpoint.save(folder, 10, tensors(), STATE)
    assert path == folder / "version-000010" and names(folder) == ["version-000010"]
    assert checkpoint.newest_verified(folder) == (10, path)
    loaded, state = checkpoint.load(path, "cpu")
    assert state == STATE
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        bits = [
            t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, loaded[name])
        ]
        assert torch.equal(*bits)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_verified(tmp_path / "none") is None
    assert checkpoint.prune(tmp_path / "none", 1) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "checksums.json"])
def test_a_damaged_checkpoint_is_skipped_for_the_older(
    tmp_path: Path, name: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, 2, tensors(2), STATE)
    older = checkpoint.save(tmp_path, 9, tensors(9), STATE)
    newer = checkpoint.save(tmp_path, 1_000_010, tensors(10), STATE)
    damage(newer / name)
    assert checkpoint.newest_verified(tmp_path) == (9, older)
    assert f"{newer} is broken" in caplog.text
    # nothing older is removed while the newest is broken
    assert checkpoint.prune(tmp_path, 1) == []
    assert len(names(tmp_path)) == 3
    # and it can be written again
    assert checkpoint.save(tmp_path, 1_000_010, tensors(10), STATE) == newer
    assert checkpoint.newest_verified(tmp_path) == (1_000_010, newer)


def test_a_verified_version_is_kept_when_saved_again(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, tensors(), STATE)
    before = (path / "tensors.safetensors").stat()
    assert checkpoint.save(tmp_path, 3, tensors(), STATE) == path
    assert (path / "tensors.safetensors").stat().st_ino == before.st_ino


@pytest.mark.parametrize("failing", ["save_file", "write_text", "fsync", "rename"])
def test_a_full_disk_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    older = checkpoint.save(tmp_path, 1, tensors(), STATE)

    def full(*args: Any, **kwargs: Any) -> None:
        if failing == "save_file":
            Path(args[1]).write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        owner = {"save_file": weights, "fsync": os}.get(failing, Path)
        patch.setattr(owner, failing, full)
        with pytest.raises(OSError, match="No space left on device"):
            checkpoint.save(tmp_path, 2, tensors(), STATE)
    assert names(tmp_path) == ["version-000001"]
    assert checkpoint.newest_verified(tmp_path) == (1, older)
    checkpoint.save(tmp_path, 2, tensors(), STATE)  # once there is room
    assert names(tmp_path) == ["version-000001", "version-000002"]


_SAVER = """
import sys, torch
from pathlib import Path
from twofold.model import weights
from twofold.runtime import checkpoint
tensors = {str(i): torch.full((1 << 18,), float(i)) for i in range(8)}
print("ready", flush=True)
for version in range(10**6):
    checkpoint.save(Path(sys.argv[1]), version, tensors, {"version": version})
    checkpoint.prune(Path(sys.argv[1]), 2)
    print(version, flush=True)
"""


def test_kill_9_while_saving_leaves_the_last_one(tmp_path: Path) -> None:
    saver = subprocess.Popen(
        [sys.executable, "-c", _SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert saver.stdout is not None
    assert saver.stdout.readline() == "ready\n"
    assert saver.stdout.readline() == "0\n"
    time.sleep(int.from_bytes(os.urandom(1), "little") / 1000)
    saver.send_signal(signal.SIGKILL)
    saved = [0, *(int(line) for line in saver.stdout.read().split("\n")[:-1])]
    saver.stdout.close()
    saver.wait()
    found = checkpoint.newest_verified(tmp_path)
    assert found is not None and saved[-1] <= found[0] <= saved[-1] + 1
    assert checkpoint.load(found[1])[1] == {"version": found[0]}
    checkpoint.save(tmp_path, found[0] + 1, tensors(), STATE)
    assert all(name.startswith("version-") for name in names(tmp_path))  # leftovers are gone


def test_prune_keeps_the_newest_and_removes_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [checkpoint.save(tmp_path, version, tensors(), STATE) for version in (2, 4, 6, 10, 12)]
    removed = []
    rmtree = checkpoint.shutil.rmtree
    monkeypatch.setattr(
        checkpoint.shutil, "rmtree", lambda path: (removed.append(path), rmtree(path))
    )
    assert checkpoint.prune(tmp_path, 5) == []
    assert checkpoint.prune(tmp_path, 2) == paths[:3] == removed
    assert names(tmp_path) == ["version-000010", "version-000012"]


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.a = nn.Embedding(4, 3, dtype=dtype)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(2.0))


def naive_checksum(model: nn.Module) -> str:
    """The definition, in Python's integers."""
    names, sums = [], []
    for name, parameter in sorted(model.named_parameters()):
        names.append(f"{name} {parameter.dtype} {tuple(parameter.shape)}")
        raw = bytes(parameter.detach().reshape(-1).view(torch.uint8).tolist())
        raw += bytes(-len(raw) % 8192)
        words = struct.unpack(f"<{len(raw) // 8}q", raw)
        rows = [words[i : i + 1024] for i in range(0, len(words), 1024)]
        columns = list(zip(*rows, strict=True))
        for totals in (columns, rows):
            weighted = sum((2 * i + 1) * sum(part) for i, part in enumerate(totals))
            sums.append(weighted % 2**64)
    digest = hashlib.sha256("\n".join(names).encode())
    digest.update(struct.pack(f"<{len(sums)}Q", *sums))
    return digest.hexdigest()


def test_weights_checksum_sees_every_change() -> None:
    assert checkpoint.weights_checksum(Tied()) == naive_checksum(Tied())
    big = nn.Linear(130, 70)  # more than one row of words
    assert checkpoint.weights_checksum(big) == naive_checksum(big)

    changed = [Tied(), Tied(torch.float32), Tied(), Tied(), Tied()]
    with torch.no_grad():
        changed[2].a.weight.view(torch.int16)[3, 2] ^= 1  # the last bit of the last weight
        changed[3].a.weight[[0, 3]] = changed[3].a.weight[[3, 0]]  # two rows exchanged
    changed[4].a.weight = nn.Parameter(changed[4].a.weight.detach().reshape(3, 4))  # other shape
    assert len({checkpoint.weights_checksum(model) for model in changed}) == 5
