"""The rows of a simulated run: the tables of a real one, without prompts, texts and tokens.

Owns: what goes into them. Does not own: the tables (`obs.record`), the facts (`executor`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twofold import events as ev
from twofold.obs.rows import (
    DroppedRow,
    FinishedRow,
    GroupRow,
    MetricRow,
    RewardRow,
    Row,
    TrainedRow,
    VersionRow,
)
from twofold.sim.slots import SimGroup
from twofold.types import Prompt, SampleId

CHECKSUM = "simulated"


def version(number: int) -> list[Row]:
    return [VersionRow(number, CHECKSUM)]


def generated(
    command: ev.Generate, fresh: Sequence[SimGroup], finished: Sequence[ev.Finished]
) -> list[Row]:
    start_version = {gid: start for gid, start, _ in command.admit}
    groups: list[Row] = [
        GroupRow(g.group_id, Prompt(""), [], start_version[g.group_id], g.deadline, len(g.samples))
        for g in fresh
    ]
    return groups + [
        FinishedRow(SampleId(gid, index), n_tokens, "stop", "") for gid, index, n_tokens in finished
    ]


def rewarded(group: SimGroup) -> list[Row]:
    """The first `n_valid` samples have a reward: 1 or 0, as many ones as the pass rate says."""
    n_valid = group.work.n_valid
    n_passed = round(group.work.pass_rate * n_valid)
    return [
        RewardRow(SampleId(group.group_id, i), float(i < n_passed), None)
        if i < n_valid
        else RewardRow(SampleId(group.group_id, i), None, "simulated failure")
        for i in range(len(group.samples))
    ]


def dropped(command: ev.Discard) -> list[Row]:
    return [DroppedRow(command.group_id, command.reason)]


def trained(command: ev.Train, groups: Sequence[SimGroup], last_update: int) -> list[Row]:
    """`last_update`: the version that the batch's last update finds."""
    tokens: Counter[int] = Counter()
    samples: Counter[int] = Counter()  # by their oldest token
    for group in groups:
        for sample in group.samples:
            samples[last_update - sample.runs[0][0]] += 1
            for token_version, n_tokens in sample.runs:
                tokens[last_update - token_version] += n_tokens
    mean = sum(age * n for age, n in tokens.items()) / tokens.total()
    made = last_update + 1
    rows: list[Row] = [TrainedRow(group.group_id, command.version) for group in groups]
    rows += [
        MetricRow(made, "staleness/mean", mean),
        MetricRow(made, "staleness/max", float(max(tokens))),
    ]
    for what, counts in (("tokens", tokens), ("samples", samples)):
        rows += [MetricRow(made, f"staleness/{what}_{age}", float(n)) for age, n in counts.items()]
    return rows
