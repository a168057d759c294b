"""Advantages of a group."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from twofold.config import TrainConfig
from twofold.step.advantage import (
    advantages,
    group_centred,
    group_normalised,
    leave_one_out,
    record_advantages,
    shaped_reward,
)
from twofold.types import Group, Prompt, Sample, SampleId


def test_normalised_within_the_group() -> None:
    rewards = [0.0, 1.0, 1.0, 0.25]
    result = group_normalised(rewards)
    assert math.isclose(sum(result), 0.0, abs_tol=1e-9)
    assert math.isclose(statistics.stdev(result), 1.0, rel_tol=1e-5)
    assert result[1] == result[2] > result[3] > result[0]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.3] * 8, [0.0, 0.0]])
def test_no_variance_gives_zero(rewards: list[float]) -> None:
    assert group_normalised(rewards) == [0.0] * len(rewards)


def test_rounding_is_not_blown_up_to_an_advantage() -> None:
    assert max(map(abs, group_normalised([0.1 + 0.2, 0.3]))) < 1e-6


def test_failed_samples_are_left_out_of_the_statistics() -> None:
    rewards = [1.0, None, 0.0]
    samples = [Sample(SampleId(0, i), [5], reward=r) for i, r in enumerate(rewards)]
    samples[1].failed = "reward timed out"
    broken = Sample(SampleId(0, 3), [5], reward=-100.0, failed="worker lost")
    group = Group(0, Prompt("2 + 3 ="), [1], 0, 0, [*samples, broken])
    record_advantages([group], advantages([group], TrainConfig(), max_new_tokens=9))
    assert [s.advantage for s in group.samples] == [
        group_normalised([1.0, 0.0])[0], None, group_normalised([1.0, 0.0])[1], None,
    ]  # fmt: skip


def make_group(
    group_id: int, rewards: list[float | None], n_tokens: list[int] | None = None
) -> Group:
    """Behaviour log-probs are 0.5 above the reference's, so k1 is 0.5 a token."""
    samples = []
    for i, reward in enumerate(rewards):
        n = n_tokens[i] if n_tokens else 1
        failed = "reward timed out" if reward is None else None
        samples.append(Sample(SampleId(group_id, i), [5] * n, [-1.0] * n, reward=reward))
        samples[-1].failed, samples[-1].ref_logprobs = failed, [-1.5] * n
    return Group(group_id, Prompt("2 + 3 ="), [1], 0, 0, samples)


def of(groups: list[Group], **options: Any) -> list[list[float]]:
    """Advantages of all tokens, by sample."""
    values = advantages(groups, TrainConfig(**options), max_new_tokens=8)
    return [values[s.sample_id].tolist() for g in groups for s in g.samples if s.valid]


def test_centred_keeps_the_scale_of_the_rewards() -> None:
    assert group_centred([0.0, 1.0, 2.0]) == [-1.0, 0.0, 1.0]
    assert group_centred([0.0, 10.0, 20.0]) == [-10.0, 0.0, 10.0]


def test_leave_one_out_compares_with_the_others() -> None:
    rewards = [0.0, 1.0, 0.25, 0.75]
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    expected = [reward - mean for reward, mean in zip(rewards, others, strict=True)]
    assert leave_one_out(rewards) == pytest.approx(expected)
    assert leave_one_out([3.0]) == [0.0]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"])
def test_equal_rewards_give_exactly_zero(loss: str) -> None:
    groups = [make_group(0, [0.3] * 3), make_group(1, [0.1, 0.2, 0.3])]
    assert of(groups, loss=loss)[:3] == [[0.0]] * 3
    assert all(any(values) for values in of(groups, loss=loss)[3::2])


def test_reinforce_pp_is_normalised_over_the_tokens_of_the_batch() -> None:
    groups = [make_group(0, [1.0, 1.0], [1, 3]), make_group(1, [0.0, None, 1.0], [2, 5, 2])]
    flat = [value for values in of(groups, loss="reinforce_pp") for value in values]
    rewards = [1.0] + [1.0] * 3 + [0.0] * 2 + [1.0] * 2
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert flat == pytest.approx([(reward - mean) / std for reward in rewards], rel=1e-5)
    assert of([make_group(0, [0.7] * 3)], loss="reinforce_pp") == [[0.0]] * 3


def test_reinforce_pp_with_baseline_compares_within_the_group_first() -> None:
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 1.0])]
    first, second, third, fourth = of(groups, loss="reinforce_pp_baseline")
    assert first == second == [0.0]
    assert third[0] == -fourth[0] == pytest.approx(-0.5 / math.sqrt(0.125), rel=1e-5)


def test_overlong_penalty_rises_over_the_buffer() -> None:
    """max_new_tokens is 8 and the buffer 4: up to 4 tokens are free."""
    config = TrainConfig(overlong_buffer_tokens=4, overlong_penalty=0.5)
    group = make_group(0, [1.0] * 5, [1, 4, 5, 6, 8])
    shaped = [shaped_reward(sample, config, max_new_tokens=8) for sample in group.samples]
    assert shaped == [1.0, 1.0, 0.875, 0.75, 0.5]
    plain = [shaped_reward(sample, TrainConfig(), 8) for sample in group.samples]
    assert plain == [1.0] * 5
    short, long = of([make_group(0, [1.0, 1.0], [2, 8])], overlong_buffer_tokens=4)
    assert short[0] > 0 > long[0], "equal rewards, but one is too long"


KL = {"kl_coef": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}


def test_kl_in_the_reward_is_of_the_whole_sample() -> None:
    """0.1 x 0.5 for each token, off the sample's reward; then the group's mean is taken off."""
    long, short = of([make_group(0, [1.0, 1.0], [4, 2])], loss="dr_grpo", **KL)
    assert long == pytest.approx([-0.05] * 4) and short == pytest.approx([0.05] * 2)


def test_kl_in_the_reward_of_reinforce_pp_is_what_is_still_to_come() -> None:
    groups = [make_group(0, [1.0], [3])]
    (values,) = of(groups, loss="reinforce_pp", **KL)
    to_go = [1 - 0.15, 1 - 0.1, 1 - 0.05]
    mean, std = statistics.fmean(to_go), statistics.pstdev(to_go)
    assert values == pytest.approx([(r - mean) / std for r in to_go], rel=1e-4)


def test_a_kl_term_in_the_loss_leaves_the_rewards_alone() -> None:
    groups = [make_group(0, [1.0, 0.0], [4, 2])]
    assert of(groups, kl_coef=0.1) == of(groups)


def test_what_is_recorded_is_the_mean_over_the_tokens() -> None:
    groups = [make_group(0, [1.0, None], [3, 2])]
    values = advantages(groups, TrainConfig(loss="reinforce_pp", **KL), 8)
    record_advantages(groups, values)
    first, second = groups[0].samples
    assert first.advantage == pytest.approx(0, abs=1e-9) and second.advantage is None
