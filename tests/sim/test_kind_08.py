"""Kind 8 of the failures that people report of RL frameworks: slow or long prompts starve or are
thrown away, so short ones are learnt.

Here nothing is dropped for age, what was sampled and what was trained agree, and a meter
(`obs.bias`) shows it. The meter is tried on records of trainers that do prefer the short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from twofold.events import RunStarted, StopRequested
from twofold.obs.bias import Bias, length_shares, selection_bias
from twofold.obs.record import (
    DroppedRow,
    FinishedRow,
    GroupRow,
    Record,
    RewardRow,
    Row,
    TrainedRow,
    VersionRow,
)
from twofold.runtime.loop import drive
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import GroupWork, Workload
from twofold.types import Prompt, SampleId

P, STEPS = 4, 40
SEED = 11


@dataclass(frozen=True)
class SlowWork:
    """One group in eight is twenty times as long as the others, slower to judge, never right."""

    n_groups: int | None = None

    def group(self, group_id: int) -> GroupWork:
        work = Workload(SEED, group_size=4, max_tokens=20).group(group_id)
        if Workload(SEED + group_id, group_size=1).group(0).reward_s < 0.05 * 0.1335:  # 1 in 8
            lengths = tuple(20 * n for n in work.lengths)
            return replace(work, lengths=lengths, reward_s=20.0, pass_rate=0.0)
        return replace(work, pass_rate=0.5)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize(
    "placement",
    [Placement(), Placement(cards=3), Placement(cards=4, generate_only=3, train_only=1)],
    ids=["one card", "shared", "separated"],
)
def test_kind_08_slow_and_long_groups_are_trained_as_often_as_they_are_sampled(
    placement: Placement, max_staleness: int, tmp_path: Path
) -> None:
    spec = SchedulerSpec(
        steps=STEPS, groups_per_step=P, group_size=4, max_staleness=max_staleness,
        max_running_samples=16, placement=placement,
    )  # fmt: skip
    work = SlowWork()
    executor = SimExecutor(work, spec, with_rows=True)
    with Record.create(tmp_path, {}) as record:
        assert drive(Scheduler(spec), executor, record, RunStarted()) == "done"
        statuses = list(record.query("SELECT DISTINCT status FROM groups"))
        whole = length_shares(record, 0, STEPS)
        bias = selection_bias(record)
    assert statuses == [("trained",)], "a group was thrown away, or starved"
    assert all(share.sampled == share.trained for share in whole), whole
    assert max(share.max_tokens for share in whole) > 100, f"seed {SEED}: no long ones"
    assert bias is not None and bias.n_lost == 0 and not bias.short_first, bias
    # what is on the way at the ends of the span is all that can differ
    n_ends = 2 * (max_staleness + 1) * P
    assert abs(bias.submitted.n_groups - bias.trained.n_groups) <= n_ends
    assert abs(bias.length_ratio - 1) <= 3 * bias.noise, bias.line()
    print(placement.name, max_staleness, bias.line())
    assert abs(bias.trained.pass_rate - bias.submitted.pass_rate) < 0.05, bias.line()


# ---------------------------------------------------------------- the meter


def biased_record(folder: Path, late: Literal["dropped", "starved"]) -> Record:
    """Of a trainer that starts 5 groups for each 4 it trains, and takes those that finish first:
    the longest is thrown away as too old, or never come back to."""
    work, record = SlowWork(), Record.create(folder, {})
    live: list[int] = []
    for version in range(STEPS):
        deadline = version + (1 if late == "dropped" else STEPS)
        fresh = range(version * (P + 1), (version + 1) * (P + 1))
        rows: list[Row] = []
        for gid in fresh:
            rows.append(GroupRow(gid, Prompt(f"prompt {gid}"), [], version, deadline, 4))
            made = work.group(gid)
            for i, n_tokens in enumerate(made.lengths):
                rows.append(FinishedRow(SampleId(gid, i), n_tokens, "stop", ""))
                rows.append(RewardRow(SampleId(gid, i), float(i < 4 * made.pass_rate)))
        live = sorted([*live, *fresh], key=lambda gid: max(work.group(gid).lengths))
        rows += [TrainedRow(gid, version) for gid in live[:P]]
        live = live[P:]
        if late == "dropped":
            rows += [DroppedRow(gid, "too old") for gid in live]
            live = []
        record.commit(float(version), StopRequested(reason="x"), [], rows)
        record.commit(
            version + 0.5, StopRequested(reason="x"), [], [VersionRow(version + 1, "simulated")]
        )
    return record


@pytest.mark.parametrize("late", ["dropped", "starved"])
def test_kind_08_the_meter_sees_a_trainer_that_prefers_the_short(
    late: Literal["dropped", "starved"], tmp_path: Path
) -> None:
    with biased_record(tmp_path, late) as record:
        bias = selection_bias(record)
        shares = length_shares(record, 0, STEPS)
    assert bias is not None
    print(bias.line())
    assert bias.short_first and bias.length_ratio < 0.7, "the long ones were never trained"
    assert bias.trained.quantiles[3] < bias.submitted.quantiles[3]
    assert bias.trained.pass_rate > bias.submitted.pass_rate + 0.02, "they were the hard ones"
    missing = bias.n_lost if late == "dropped" else bias.n_open
    assert bias.coverage < 0.85 and missing >= 0.12 * bias.submitted.n_groups
    long = [share for share in shares if share.max_tokens > 100]
    assert bias.share_gap > 0.02
    assert sum(share.trained for share in long) < 0.5 * sum(share.sampled for share in long)
    assert bias.line().startswith("trained of submitted, versions ")
    assert "SHORT FIRST" in bias.line() and "\n" not in bias.line()


def test_the_noise_is_that_of_groups(tmp_path: Path) -> None:
    """Two unbiased halves of the same data differ by no more than the noise says: within twice of
    it nearly always, and not always within a tenth (it would be no measure)."""
    work = Workload(SEED, group_size=4, max_tokens=200)
    ratios: list[float] = []
    noises: list[float] = []
    for trial in range(20):
        with Record.create(tmp_path / str(trial), {}) as record:
            rows: list[Row] = []
            for gid in range(60):
                first = gid < 30  # started at 0 and never trained, or trained at 0, started later
                rows.append(GroupRow(gid, Prompt(""), [], 0 if first else 1, 9, 4))
                for i, n_tokens in enumerate(work.group(1000 * trial + gid).lengths):
                    rows.append(FinishedRow(SampleId(gid, i), n_tokens, "stop", ""))
                if not first:
                    rows.append(TrainedRow(gid, 0))
            record.commit(0.0, RunStarted(), [], rows)
            bias: Bias | None = selection_bias(record, 0, 0)
        assert bias is not None
        ratios.append(abs(bias.length_ratio - 1))
        noises.append(bias.noise)
    inside = sum(r < 2 * n for r, n in zip(ratios, noises, strict=True))
    tiny = sum(r < 0.1 * n for r, n in zip(ratios, noises, strict=True))
    assert inside >= 17 and tiny <= 8, (ratios, noises)


def test_there_is_no_bias_to_tell_before_anything_is_trained(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}) as record:
        assert selection_bias(record) is None
        record.commit(0.0, RunStarted(), [], [GroupRow(0, Prompt(""), [], 0, 1, 2)])
        assert selection_bias(record) is None
