"""Who may import whom, as docs/architecture.md promises.

What a module really loads is seen in a fresh process; what it may name, in its source. Modules are
found by scanning src/twofold, so a new file is under these rules from its first line.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "twofold"

LIGHT = ("types", "events", "config", "sched", "model.spec", "memory.activations", "memory.ledger",
         "memory.fit", "runtime.loop", "sim", "obs.record", "obs.trackers")  # fmt: skip
"""These (packages: all that is in them) import without torch and ray."""

HEAVY = {"torch", "ray", "transformers", "numpy", "vllm"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything in the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def within(name: str, *places: str) -> bool:
    """Whether the module is one of these modules or packages of Twofold, or inside one."""
    return any(f"{name}.".startswith(f"twofold.{place}.") for place in places)


@cache
def named_by(module: str) -> frozenset[str]:
    """Modules that the source imports anywhere, in functions too; for `from a import b` both a and
    a.b."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(names)


def reaches(module: str) -> set[str]:
    """Modules of Twofold that the source leads to, over any number of imports."""
    seen: set[str] = set()
    left = [module]
    while left:
        current = left.pop()
        if current not in seen:
            seen.add(current)
            left += [name for name in named_by(current) if name in modules()]
    return seen - {module}


def loaded_by(*names: str, isolated: bool = False) -> set[str]:
    """All of sys.modules after importing these in a fresh process. `isolated`: one that finds
    nothing but the standard library and Twofold."""
    lines = [f"import sys; sys.path.insert(0, {str(SRC)!r})", *(f"import {name}" for name in names)]
    lines += ["import json; print(json.dumps(sorted(sys.modules)))"]
    flags = ["-I", "-S"] if isolated else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", "\n".join(lines)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def light_modules() -> list[str]:
    return [name for name in modules() if within(name, *LIGHT)]


def sched_modules() -> list[str]:
    return [name for name in modules() if within(name, "sched")]


def test_the_scan_finds_the_package() -> None:
    assert {"twofold", "twofold.types", "twofold.sched.scheduler"} <= modules().keys()
    for place in LIGHT:
        assert any(within(name, place) for name in modules()), place


@pytest.mark.parametrize("name", ["twofold", *light_modules()])
def test_light_modules_load_nothing_heavy(name: str) -> None:
    top_level = {module.partition(".")[0] for module in loaded_by(name)}
    assert not top_level & HEAVY


def test_the_scheduler_needs_the_standard_library_only() -> None:
    loaded = loaded_by(*sched_modules(), isolated=True)
    assert not loaded & {"random", "asyncio", "threading", "logging", "socket", "subprocess"}


@pytest.mark.parametrize("name", sched_modules())
def test_the_scheduler_names_no_clock_no_chance_no_thread(name: str) -> None:
    top_level = {module.partition(".")[0] for module in named_by(name)}
    assert not top_level & {"time", "datetime", "random", "asyncio", "threading", "logging", "os"}
    ours = {module for module in named_by(name) if module.startswith("twofold.")}
    assert all(within(module, "types", "events", "sched") for module in ours), ours


def test_steps_know_nothing_of_who_calls_them() -> None:
    for name in modules():
        if within(name, "step"):
            above = [m for m in reaches(name) if within(m, "sched", "runtime", "sim", "obs")]
            assert not above, f"{name} leads to {above}"


def test_steps_load_nothing_of_who_calls_them() -> None:
    steps = [name for name in modules() if within(name, "step")]
    loaded = loaded_by(*steps)
    assert set(steps) <= loaded
    assert not [m for m in loaded if within(m, "sched", "runtime", "sim", "obs")]


def test_ray_appears_in_one_file_at_most() -> None:
    users = [n for n in modules() if any(m.partition(".")[0] == "ray" for m in named_by(n))]
    assert len(users) <= 1, users


def test_inner_package_files_are_empty() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py" and name != "twofold":
            assert path.read_text() == "", path
