"""Thousands of seeded runs of the real scheduler on a virtual clock: see schedules.py."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from schedules import History, check_history, run_schedule

from twofold import events as ev
from twofold.sched import scheduler as scheduler_module
from twofold.sched.budget import Choice, Live, may_start
from twofold.sched.phase import TRANSITIONS

SEED = int(os.environ.get("TWOFOLD_TEST_SEED", "0"))
BLOCK = 1000


def run(seed: int) -> History:
    """One schedule; a failure says how to see it again."""
    try:
        history = run_schedule(seed)
        check_history(history)
    except Exception as error:
        again = f"PYTHONPATH=src:tests/sim python -c 'import test_schedules as t; t.run({seed})'"
        raise AssertionError(f"schedule {seed}: {error!r}\nagain: {again}") from error
    return history


def run_block(first: int, n_seeds: int) -> Counter[str]:
    """What happened in these schedules, counted."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + n_seeds):
        history = run(seed)
        seen[history.outcome.split(":")[0]] += 1
        seen["crashes"] += history.n_crashes
        seen["stops"] += sum(isinstance(e, ev.StopRequested) for e in history.events)
        seen["failures"] += sum(isinstance(e, ev.Failed) for e in history.events)
        seen["cancellations"] += sum(isinstance(e, ev.Cancelled) for e in history.events)
        seen["data ended"] += sum(isinstance(e, ev.DataEnded) for e in history.events)
        seen["dropped"] += sum(isinstance(e, ev.Discarded) for e in history.events)
        stale = max(history.staleness, default=0)
        several = history.spec.updates_per_batch > 1
        as_stale = stale == history.spec.max_staleness > 0
        seen["as stale as allowed" + ", several updates" * several] += as_stale
        seen["solved"] += any(
            "are all equal" in e.reason for e in history.commands if isinstance(e, ev.Discard)
        )
        for command in history.commands:
            if isinstance(command, ev.Switch):
                seen[f"{command.before} --> {command.after}"] += 1
        if seed % 20 == 0:
            lines = history.lines()
            assert run_schedule(seed).lines() == lines, f"schedule {seed} is not a function of it"
            for item in (*history.events, *history.commands):
                assert ev.from_json(ev.to_json(item)) == item
    return seen


@pytest.mark.parametrize("block", range(10))
def test_every_schedule_keeps_the_rule(block: int) -> None:
    first = (SEED * 10 + block) * BLOCK
    seen = run_block(first, BLOCK)
    print(f"schedules {first} to {first + BLOCK - 1}: {dict(seen)}")
    # not one of these may have been left out, or the test shows nothing
    wanted = ["done", "failed", "crashes", "stops", "failures", "cancellations", "data ended"]
    wanted += ["dropped", "solved", "as stale as allowed", "as stale as allowed, several updates"]
    wanted += [f"{before} --> {after}" for before, all_ in TRANSITIONS.items() for after in all_]
    assert all(seen[what] for what in wanted), [what for what in wanted if not seen[what]]


@pytest.mark.soak
def test_a_million_schedules_keep_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    for first in range(0, 10**6, BLOCK):
        seen += run_block(first, BLOCK)
        with capsys.disabled():
            print(f"\r{first + BLOCK:,} schedules", end="", flush=True)
    print(dict(seen))


def start_one_too_many(
    deadlines: list[int], deadline: int, version: int, groups_per_step: int
) -> int:
    return may_start(deadlines, deadline, version, groups_per_step) + 1


def first_ready_whatever_waits(
    ready: list[Live], waiting: list[Live], version: int, groups_per_step: int
) -> Choice:
    batch = tuple(group.group_id for group in ready[:groups_per_step])
    return Choice(batch, ()) if len(batch) == groups_per_step else Choice(None, ())


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("may_start", start_one_too_many), ("choose_batch", first_ready_whatever_waits)],
)
def test_a_broken_rule_is_noticed_where_tokens_are_trained(
    name: str, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the scheduler's own integrity check."""
    monkeypatch.setattr(scheduler_module, name, mutant)
    with pytest.raises(AssertionError):
        for seed in range(200):
            check_history(run_schedule(seed, checked=False))
