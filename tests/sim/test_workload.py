"""What simulated runs are given to do: distributions, recorded groups, the file and its errors."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest

from twofold.sim.workload import (
    Beta,
    GroupWork,
    LogNormal,
    Pareto,
    Recorded,
    Synthetic,
    Workload,
    from_dict,
    load,
    save,
)

SEED = 11
N = 4000


def lengths(distribution: LogNormal | Pareto) -> list[int]:
    random = Random(SEED)
    return [distribution.draw(random) for _ in range(N)]


# ---------------------------------------------------------------- distributions


@pytest.mark.parametrize("made", [LogNormal(100, 1.0, 2000), Pareto(100, 1.5, 2000)])
def test_half_of_the_lengths_are_below_the_median_and_none_above_the_cap(
    made: LogNormal | Pareto,
) -> None:
    drawn = lengths(made)
    assert 0.47 < sum(n < 100 for n in drawn) / N < 0.53, SEED
    assert max(drawn) == 2000 and min(drawn) >= 1


def test_a_log_normal_has_the_spread_it_was_given() -> None:
    below = sum(n <= 100 * 2.718 for n in lengths(LogNormal(100, 1.0, 10**6))) / N
    assert 0.82 < below < 0.86, SEED  # one standard deviation: 0.841
    assert set(lengths(LogNormal(100, 0.0, 200))) == {100}


def test_the_tail_of_a_pareto_falls_with_the_power_alpha() -> None:
    drawn = lengths(Pareto(100, 2.0, 10**6))
    longer = sum(n > 300 for n in drawn) / N
    assert abs(longer - 0.5 / 3**2) < 0.015, SEED  # x3 -> 1 / 3^alpha of the half above the median
    heavy = sum(n > 300 for n in lengths(Pareto(100, 1.0, 10**6))) / N
    assert heavy > 2 * longer


@pytest.mark.parametrize("z", [-40.0, 40.0, 1e9, -1e9])
@pytest.mark.parametrize("made", [LogNormal(100, 50.0, 2000), Pareto(100, 0.001, 2000)])
def test_extreme_draws_stay_within_1_and_the_cap(made: LogNormal | Pareto, z: float) -> None:
    assert 1 <= made.at(z) <= 2000


def synthetic(**changes: Any) -> Synthetic:
    return Synthetic(
        **{"seed": SEED, "group_size": 8, "lengths": LogNormal(100, 1.0, 4000)} | changes
    )


def spread_within_groups(work: Synthetic) -> float:
    """Mean over the groups of the standard deviation of log-lengths, by that of all lengths."""
    groups = [[math.log(n) for n in work.group(g).lengths] for g in range(300)]
    overall = statistics.pstdev([x for group in groups for x in group])
    return statistics.mean(statistics.pstdev(group) for group in groups) / overall


def test_correlated_completions_of_a_group_are_alike() -> None:
    apart, alike = (
        spread_within_groups(synthetic()),
        spread_within_groups(synthetic(correlation=0.9)),
    )
    assert apart > 0.8 and alike < 0.4, (apart, alike, SEED)
    same = synthetic(correlation=1.0).group(3).lengths
    assert len(set(same)) == 1


def test_correlation_leaves_the_lengths_as_a_whole_alone() -> None:
    def median(work: Synthetic) -> float:
        return statistics.median(n for g in range(2000) for n in work.group(g).lengths)

    assert abs(median(synthetic(correlation=0.7)) / median(synthetic()) - 1) < 0.1, SEED


def test_a_group_is_a_function_of_its_id() -> None:
    work = synthetic(pass_rate=Beta(0.5, 0.5), prompt_tokens=(10, 90), invalid=0.2)
    assert [work.group(g) for g in (5, 3)] == [work.group(g) for g in (3, 5)][::-1]
    assert work.group(5) != synthetic(seed=SEED + 1, prompt_tokens=(10, 90)).group(5)


def test_whether_a_group_varies_follows_from_who_passed() -> None:
    work = synthetic(pass_rate=(0.0, 0.5, 1.0), bad_group=0.1, invalid=0.1)
    groups = [work.group(g) for g in range(400)]
    for group in groups:
        assert group.varies == (0 < group.pass_rate < 1) == group.trains
        assert round(group.pass_rate * group.n_valid, 6) % 1 == 0
    share = sum(group.varies for group in groups) / len(groups)
    assert 0.2 < share < 0.4, (share, SEED)  # the third with rate 0.5, less the bad groups
    assert any(group.n_valid == 0 for group in groups)
    assert all(synthetic(trains_all=True, pass_rate=(1.0,)).group(g).trains for g in range(9))


def test_pass_rates_have_the_mean_of_their_beta() -> None:
    work = synthetic(pass_rate=Beta(2.0, 6.0))
    mean = statistics.mean(work.group(g).pass_rate for g in range(1000))
    assert abs(mean - 0.25) < 0.03, SEED


def test_prompts_have_lengths_of_the_range() -> None:
    work = synthetic(prompt_tokens=(10, 12))
    assert {work.group(g).prompt_tokens for g in range(100)} == {10, 11, 12}


def test_the_schedules_of_other_tests_keep_their_random_stream() -> None:
    work = Workload(seed=3, group_size=2, max_tokens=200, long_tail=0.05)
    assert work.group(0).lengths == (200, 200) and work.group(7).lengths == (81, 91)


# ---------------------------------------------------------------- recorded groups


def group(n: int, **changes: Any) -> GroupWork:
    return GroupWork(**{"prompt_tokens": 5, "lengths": (n, 2 * n), "n_valid": 2, "reward_s": 0.1,
                        "varies": True} | changes)  # fmt: skip


def test_recorded_groups_are_stretched_over_a_run_in_their_order() -> None:
    recorded = Recorded((group(10), group(20), group(30)), n_total=6, max_tokens=100)
    assert [recorded.group(g).lengths[0] for g in range(6)] == [10, 10, 20, 20, 30, 30]
    shorter = Recorded(tuple(group(n) for n in range(1, 9)), n_total=4, max_tokens=100)
    assert [shorter.group(g).lengths[0] for g in range(4)] == [1, 3, 5, 7]


def test_a_run_that_needs_more_groups_gets_the_last_again_and_lengths_are_capped() -> None:
    recorded = Recorded((group(10), group(20, varies=False)), n_total=2, max_tokens=25)
    assert recorded.group(99) == group(20, varies=False, lengths=(20, 25))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": ()}, "groups = \\[\\]: a recorded workload needs one"),
        ({"n_total": 0}, "n_total = 0: give 1 or more"),
        ({"max_tokens": 0}, "max_tokens = 0: give 1 or more"),
    ],
)
def test_recorded_work_says_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recorded(**{"groups": (group(1),), "n_total": 1, "max_tokens": 9} | values)


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "work",
    [
        synthetic(),
        synthetic(lengths=Pareto(50, 1.2, 900), pass_rate=Beta(1.0, 3.0), n_groups=7),
        synthetic(pass_rate=(0.1, 0.9), prompt_tokens=(3, 30), correlation=0.5, trains_all=True),
    ],
)
def test_a_file_gives_the_work_back(work: Synthetic, tmp_path: Path) -> None:
    save(work, tmp_path / "work.toml")
    assert load(tmp_path / "work.toml") == work


FILE: dict[str, Any] = {
    "seed": 1,
    "group_size": 2,
    "lengths": {"kind": "lognormal", "median_tokens": 10, "sigma": 1, "max_tokens": 100},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": {"kind": "normal"}}, "give a table with kind = lognormal or pareto"),
        ({"lengths": "long"}, "lengths = 'long'"),
        ({"sede": 1}, "sede is not known; did you mean seed"),
        ({"group_size": 2.5}, "group_size = 2.5 is not a whole number"),
        ({"group_size": 0}, "group_size = 0: give 1 or more"),
        ({"invalid": -0.1}, "invalid = -0.1: give a share from 0 to 1"),
        ({"bad_group": 1.1}, "bad_group = 1.1: give a share"),
        ({"correlation": float("nan")}, "correlation = nan: give a share"),
        ({"reward_s": 0}, "reward_s = 0: give seconds above 0"),
        ({"reward_s": "1"}, "reward_s = '1' is not a number"),
        ({"pass_rate": []}, "pass_rate = \\[\\]: give one rate"),
        ({"pass_rate": [0.5, 2]}, "pass_rate = 2: give a share"),
        ({"pass_rate": 0.5}, "pass_rate = 0.5 is not a list of numbers"),
        ({"pass_rate": {"alpha": 0, "beta": 1}}, "pass_rate.alpha = 0: give more than 0"),
        ({"pass_rate": {"alpha": 1}}, "pass_rate.beta is missing"),
        ({"prompt_tokens": [9, 3]}, "prompt_tokens = \\[9, 3\\]: give \\[least, most\\]"),
        ({"prompt_tokens": [9]}, "give \\[least, most\\]"),
        ({"trains_all": 1}, "trains_all = 1 is not true or false"),
        ({"lengths": {"kind": "pareto"}}, "lengths.median_tokens is missing"),
        ({"n_groups": -1}, "n_groups = -1: give 0 or more"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        from_dict(FILE | change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": -1}, "lengths.sigma = -1: give 0 or more"),
        ({"median_tokens": 0}, "lengths.median_tokens = 0: give 1 or more"),
        ({"max_tokens": 9}, "lengths.max_tokens = 9 is below the median of 10"),
        ({"kind": "pareto"}, "lengths.sigma is not known"),
        ({"alpha": 1}, "lengths.alpha is not known"),
    ],
)
def test_wrong_lengths_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(FILE | {"lengths": FILE["lengths"] | change})


@pytest.mark.parametrize("alpha", [0, -1.5, float("inf")])
def test_a_pareto_without_a_tail_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"lengths.alpha = .*: give more than 0"):
        Pareto(10, alpha, 100)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none.toml: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("seed = ")
    with pytest.raises(ValueError, match=r"bad.toml: Invalid value"):
        load(tmp_path / "bad.toml")
