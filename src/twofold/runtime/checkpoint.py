"""Checkpoints of one run: RUN/checkpoints/version-000010/, whole and verified, or not there.

Owns: the folder's form (tensors.safetensors, state.json, checksums.json with the sha256 of both),
writing it so that no crash leaves half of one, finding the newest that verifies, removing old ones,
and the checksum of a model's weights. Does not own: what is saved (weights, optimizer, positions:
`runtime.worker`) or when (`sched`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twofold.model.weights import write_tensors

_TENSORS, _STATE, _CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"
_TMP, _VERSION = ".tmp-", "version-"

_log = logging.getLogger("twofold")


def save(folder: Path, version: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write the checkpoint of `version` into `folder` (RUN/checkpoints) and return its path.

    Written aside, forced to the disk, then renamed: after a crash or an OSError (disk full) it is
    whole or not there. Tensors may be on any device and share no memory; `state` is plain JSON. If
    the version is there and verifies (written before a crash, now asked for again) it is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_TMP}{_VERSION}*"):  # of a process that died
        shutil.rmtree(leftover)
    path = folder / f"{_VERSION}{version:06d}"
    if path.exists():
        if broken(path) is None:
            return path
        shutil.rmtree(path)
    tmp = folder / f"{_TMP}{path.name}"
    tmp.mkdir()
    try:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        write_tensors(contiguous, tmp / _TENSORS)
        (tmp / _STATE).write_text(json.dumps(state))
        checksums = {name: _sha256(tmp / name) for name in (_TENSORS, _STATE)}
        (tmp / _CHECKSUMS).write_text(json.dumps(checksums))
        for name in (_TENSORS, _STATE, _CHECKSUMS, "."):
            _fsync(tmp / name)
        tmp.rename(path)
    except BaseException:
        shutil.rmtree(tmp)
        raise
    _fsync(folder)
    return path


def newest_verified(folder: Path, newest: int | None = None) -> tuple[int, Path] | None:
    """(version, path) of the newest checkpoint whose checksums hold, of version `newest` at most;
    broken ones are skipped with a warning in the log. None: there is none."""
    for version, path in reversed(_versions(folder)):
        if newest is not None and version > newest:
            continue
        reason = broken(path)
        if reason is None:
            return version, path
        _log.warning("checkpoint %s is broken (%s), using an older one", path, reason)
    return None


def broken(path: Path) -> str | None:
    """Why the checkpoint is not what was written; None: it is."""
    try:
        checksums = json.loads((path / _CHECKSUMS).read_bytes())
        for name in (_TENSORS, _STATE):
            if _sha256(path / name) != checksums[name]:
                return f"{name} differs from its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors on `device`, state) of a checkpoint; does not verify it again."""
    tensors = load_file(path / _TENSORS, device=str(device))
    return tensors, json.loads((path / _STATE).read_bytes())


def find(folder: Path, version: int | None) -> tuple[int, dict[str, Tensor]]:
    """(version, tensors) of that checkpoint, verified; None: of the newest verified. ValueError
    when there is none such, naming those that are there."""
    there = dict(_versions(folder))
    if version is not None:
        path = there.get(version)
        reason = "there is none" if path is None else broken(path)
        if path is not None and reason is None:
            return version, load(path)[0]
        have = ", ".join(map(str, there)) or "none"
        raise ValueError(f"{folder}: no checkpoint of version {version} ({reason}); have: {have}")
    newest = newest_verified(folder)
    if newest is None:
        raise ValueError(f"{folder}: no checkpoint yet")
    return newest[0], load(newest[1])[0]


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` (>= 1) checkpoints, oldest first, and return what went. The
    newest must verify, otherwise nothing is removed."""
    assert keep >= 1, keep
    paths = [path for _, path in _versions(folder)]
    if len(paths) <= keep:
        return []
    reason = broken(paths[-1])
    if reason is not None:
        _log.warning("checkpoint %s is broken (%s), older ones are kept", paths[-1], reason)
        return []
    for path in paths[:-keep]:
        shutil.rmtree(path)
    return paths[:-keep]


@torch.no_grad()
def weights_checksum(model: nn.Module) -> str:
    """sha256 (hex) over name, dtype, shape and two integer sums of each parameter's bytes, in the
    order of names. A tied parameter counts once.

    The sums are exact whatever the order of addition, so the result is the same on every device,
    and only they leave it. Weighted by position along rows and along columns of the bytes, they
    change with any single change and with any exchange of two values; they are no proof against
    somebody who wants to forge them.
    """
    names, sums = [], []
    for name, parameter in sorted(model.named_parameters()):
        names.append(f"{name} {parameter.dtype} {tuple(parameter.shape)}")
        sums += _weighted_sums(parameter)
    digest = hashlib.sha256("\n".join(names).encode())
    digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weighted_sums(tensor: Tensor, n_columns: int = 1024) -> list[Tensor]:
    """int64 sums, modulo 2^64, of the tensor's bytes taken as rows of `n_columns` int64 numbers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    raw = nn.functional.pad(raw, (0, -raw.numel() % (8 * n_columns))) if raw.numel() else raw
    table = raw.view(torch.int64).view(-1, n_columns)
    sums = []
    for along in (0, 1):
        totals = table.sum(along)
        weights = torch.arange(1, 2 * totals.numel(), 2, device=totals.device)  # odd: invertible
        sums.append((totals * weights).sum())
    return sums


def _versions(folder: Path) -> list[tuple[int, Path]]:
    """Ascending; empty when the folder is missing."""
    names = ((path, path.name.removeprefix(_VERSION)) for path in folder.glob(f"{_VERSION}*"))
    return sorted((int(digits), path) for path, digits in names if digits.isdecimal())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
