"""Building the CPU kernels: what happens without a compiler, and when the cache is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twofold.model import cpu_kernels


@pytest.fixture
def _not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_kernels, "_loaded", [])
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("_not_loaded")
def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert cpu_kernels.load() is None
    assert "no C++ compiler found" in cpu_kernels.unavailable_reason()


@pytest.mark.usefixtures("_not_loaded")
def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'case "$*" in *-shared*) echo "fatal error: no header" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    assert cpu_kernels.load() is None
    assert "fatal error: no header" in cpu_kernels.unavailable_reason()
    assert list((tmp_path / "cache").rglob("*.so")) == []


@pytest.mark.usefixtures("_not_loaded")
def test_the_cache_is_keyed_by_what_the_compiler_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    builds = tmp_path / "builds"
    build = f'for last; do :; done; echo x | tee -a {builds} > "$last"'
    script = f'case "$*" in *-shared*) {build};; *) echo "$TARGET";; esac'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script) + " -some-flag")
    monkeypatch.setenv("TARGET", "one")
    first = cpu_kernels._built()
    assert cpu_kernels._built() == first and builds.read_text() == "x\n"
    monkeypatch.setenv("TARGET", "two")
    assert cpu_kernels._built() != first and builds.read_text() == "x\nx\n"


def test_kernels_are_used_for_what_they_can_and_never_when_eager_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpu_kernels.load() is None:
        pytest.skip(cpu_kernels.unavailable_reason())
    monkeypatch.setattr(cpu_kernels, "forced_eager", False)
    used = {dtype: cpu_kernels.used_for(torch.zeros(1, dtype=dtype)) for dtype in DTYPES}
    assert used == {torch.float32: True, torch.bfloat16: True, torch.float64: False}
    assert not cpu_kernels.used_for(torch.zeros(1, device="meta"))
    monkeypatch.setattr(cpu_kernels, "forced_eager", True)
    assert not cpu_kernels.used_for(torch.zeros(1))
    assert cpu_kernels.why_not_used() == "TWOFOLD_KERNELS=eager"


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
