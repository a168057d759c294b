"""Ten deliberate one-line faults in the scheduler: the tests of this folder notice each.

Each is put into a copy of the package, and the quick tests run against the copy in a process of
their own until one fails. A fault that is no longer in the code as written here fails, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import twofold

PACKAGE = Path(twofold.__file__).parent
HERE = Path(__file__).parent

FAULTS = {
    "a deadline one batch too late": (
        "sched/scheduler.py",
        "deadline = unit.version + self.spec.batches_ahead * self.spec.updates_per_batch",
        "deadline = unit.version + (self.spec.batches_ahead + 1) * self.spec.updates_per_batch",
    ),
    "one group more than is feasible": (
        "sched/budget.py",
        "room = groups_per_step * (deadline - version + 1)",
        "room = groups_per_step * (deadline - version + 1) + 1",
    ),
    "later deadlines take no room": (
        "sched/budget.py",
        "least = min(least, room)",
        "least = least",
    ),
    "the batch may leave out what is due": (
        "sched/budget.py",
        "if len(batch) < groups_per_step and all(room[k] > 0 for k in levels):",
        "if len(batch) < groups_per_step:",
    ),
    "a batch is seen one too early": (
        "sched/budget.py",
        "if n_ready < n_due - k * groups_per_step:",
        "if n_ready < n_due - (k + 1) * groups_per_step:",
    ),
    "a slot freed when the batch is chosen": (
        "sched/queue.py",
        "_count(self.due, step, 1)",
        "_count(self.due, step, 0)",
    ),
    "more is started than the steps left can train": (
        "sched/scheduler.py",
        "return max(0, min(by_rule, needed, self.stream.unstarted()))",
        "return max(0, min(by_rule, self.stream.unstarted()))",
    ),
    "a replica generates under weights it does not hold": (
        "sched/scheduler.py",
        "units[0].version, units[0].lost = event.version, False",
        "units[0].version, units[0].lost = self.version, False",
    ),
    "a failed Generate forgets what it had admitted": (
        "sched/scheduler.py",
        "units[0].readmit = command.admit",
        "units[0].readmit = ()",
    ),
    "a group is ready before its last sample": (
        "sched/queue.py",
        "if not entry.unfinished:",
        "if len(entry.unfinished) <= 1:",
    ),
}


def suite_passes(package_root: Path) -> bool:
    """Whether the quick tests pass with the package found there."""
    tests = ("test_budget", "test_scheduler", "test_updates_per_batch", "quick_schedules")
    files = [str(HERE / f"{test}.py") for test in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--override-ini=addopts="]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, "PYTHONPATH": str(package_root), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr  # 1: a test failed; else: no test ran
    return run.returncode == 0


def copy_of_the_package(root: Path) -> Path:
    for part in ("sched", "sim", "runtime", "obs"):
        (root / "twofold" / part).mkdir(parents=True)
        for file in (PACKAGE / part).glob("*.py"):
            shutil.copy(file, root / "twofold" / part)
    for file in PACKAGE.glob("*.py"):
        shutil.copy(file, root / "twofold")
    return root / "twofold"


@pytest.mark.parametrize("name", FAULTS)
def test_the_suite_notices(name: str, tmp_path: Path) -> None:
    file, right, wrong = FAULTS[name]
    path = copy_of_the_package(tmp_path) / file
    code = path.read_text()
    assert code.count(right) == 1, f"{file} no longer has this line once: {right}"
    path.write_text(code.replace(right, wrong))
    assert not suite_passes(tmp_path), f"not noticed: {name}"


def test_the_suite_passes_without_a_fault(tmp_path: Path) -> None:
    copy_of_the_package(tmp_path)
    assert suite_passes(tmp_path)
