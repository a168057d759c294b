"""Advantages of a group."""

from __future__ import annotations

import math
import statistics

import pytest

from twofold.step.advantage import group_advantages, set_advantages
from twofold.types import Group, Prompt, Sample, SampleId


def test_normalised_within_the_group() -> None:
    rewards = [0.0, 1.0, 1.0, 0.25]
    advantages = group_advantages(rewards)
    assert math.isclose(sum(advantages), 0.0, abs_tol=1e-9)
    assert math.isclose(statistics.stdev(advantages), 1.0, rel_tol=1e-5)
    assert advantages[1] == advantages[2] > advantages[3] > advantages[0]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.3] * 8, [0.0, 0.0]])
def test_no_variance_gives_zero(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_rounding_is_not_blown_up_to_an_advantage() -> None:
    assert max(map(abs, group_advantages([0.1 + 0.2, 0.3]))) < 1e-6


def test_failed_samples_are_left_out_of_the_statistics() -> None:
    rewards = [1.0, None, 0.0]
    samples = [Sample(SampleId(0, i), reward=r) for i, r in enumerate(rewards)]
    samples[1].failed = "reward timed out"
    broken = Sample(SampleId(0, 3), reward=-100.0, failed="worker lost")
    group = Group(0, Prompt("2 + 3 ="), [1], 0, 0, [*samples, broken])
    set_advantages(group)
    assert [s.advantage for s in group.samples] == [
        group_advantages([1.0, 0.0])[0], None, group_advantages([1.0, 0.0])[1], None,
    ]  # fmt: skip
