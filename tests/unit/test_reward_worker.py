"""What a reward may return. (What it may do to its process: test_reward.)"""

import asyncio
import pickle

import numpy as np
import pytest
import torch

from twofold.step.reward_worker import Reward, judge


def judged(returned: object) -> dict[str, object]:
    """`judge` of a reward that returns this for two completions."""
    reply = judged_by(Reward("it", lambda completions: returned, 1.0))
    parts = reply.pop("parts", None)
    assert parts is None or parts == {"it": reply["rewards"]}
    return reply


def judged_by(*rewards: Reward) -> dict[str, object]:
    return judge(list(rewards), pickle.dumps({"completions": ["a", "b"]}))


def returning(name: str, *values: object, weight: float = 1.0) -> Reward:
    return Reward(name, lambda completions: list(values), weight)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5],
        (True, 0.5),
        np.array([1.0, 0.5], np.float32),
        [np.float64(1), torch.tensor(0.5)],
        torch.tensor([1.0, 0.5], dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_lists_tuples_arrays_and_tensors_are_rewards(returned):
    assert judged(returned) == {"rewards": [1.0, 0.5], "failures": [None, None]}


@pytest.mark.parametrize(
    "returned",
    [
        *(None, 1.0, np.float32(1), np.array(1.0), b"ab", bytearray(2), "10"),
        *({"a": 1, "b": 0}, {"a": 1, "b": 0}.values(), {0.0, 1.0}),
        *(range(2), iter([1, 0]), map(float, "10"), (x for x in (1.0, 0.0))),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_other_types_are_refused_by_name(returned):
    kind = type(returned).__name__
    why = f"reward returned {kind} instead of a list of 2 numbers"
    assert judged(returned) == {"rewards": [None] * 2, "failures": [why] * 2}


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        (1e308, "reward 1e+308 is beyond float32"),
        (-3.5e38, "reward -3.5e+38 is beyond float32"),
        (10**400, "reward is beyond float32"),
        (3.4e38, None),
        (b"1", "reward returned bytes instead of a number"),
        (1j, "reward returned complex instead of a number"),
        ([1.0], "reward returned list instead of a number"),
    ],
)
def test_values_that_training_could_not_hold_fail_their_sample(value, failure):
    expected = value if failure is None else None
    assert judged([1.0, value]) == {"rewards": [1.0, expected], "failures": [None, failure]}


# ---------------------------------------------------------------- several functions


def test_the_reward_is_the_weighted_sum_of_those_that_apply():
    reply = judged_by(
        returning("a", 1.0, None, weight=2.0), returning("b", 0.5, 0.25), returning("c", None, None)
    )
    assert reply == {
        "rewards": [2.5, 0.25],
        "failures": [None, None],
        "parts": {"a": [1.0, None], "b": [0.5, 0.25], "c": [None, None]},
    }


def test_where_none_applies_there_is_no_reward():
    assert judged([None, 0.0])["failures"] == ["reward returned None", None]
    reply = judged_by(returning("a", None, 0.0), returning("b", None, None))
    assert reply["rewards"] == [None, 0.0]
    assert reply["failures"] == ["no reward applies: all returned None", None]


def test_one_that_fails_fails_the_sample_and_is_named():
    reply = judged_by(returning("a", 1.0, 1.0), returning("b", float("nan"), 1.0))
    assert reply["rewards"] == [None, 2.0]
    assert reply["failures"] == ["b: reward returned nan", None]
    too_few = judged_by(returning("a", 1.0, 1.0), returning("b", 1.0))
    assert too_few["failures"] == ["b: reward returned 1 values for 2 completions"] * 2
    huge = judged_by(returning("a", 3e38, 1.0), returning("b", 3e38, 1.0))
    assert huge["failures"] == ["reward 6e+38 is beyond float32", None]


def test_async_functions_wait_at_the_same_time_and_share_a_loop():
    loops = []
    turn = []

    async def first(completions):
        loops.append(asyncio.get_running_loop())
        turn.append("first")
        while len(turn) < 2:  # for ever, if the other did not run meanwhile
            await asyncio.sleep(0.001)
        return [1.0, None]

    async def second(completions):
        turn.append("second")
        return [1.0, 2.0]

    rewards = [Reward("f", first, 1.0), returning("s", 0.5, 0.5), Reward("g", second, 10.0)]
    assert judged_by(*rewards)["rewards"] == [11.5, 20.5]
    assert judged_by(*rewards)["rewards"] == [11.5, 20.5]
    assert loops[0] is loops[1], "a client that the reward keeps stays usable"


def test_an_async_function_that_raises_says_so():
    async def bad(completions):
        raise KeyError("no such answer")

    assert "KeyError: 'no such answer'" in judged_by(Reward("bad", bad, 1.0))["error"]
    assert "no such answer" in judged_by(returning("a", 1, 1), Reward("bad", bad, 1.0))["error"]
