"""What a reward may return. (What it may do to its process: test_reward.)"""

import pickle

import numpy as np
import pytest
import torch

from twofold.step.reward_worker import judge


def judged(returned: object) -> dict[str, object]:
    """`judge` of a reward that returns this for two completions."""
    return judge(lambda completions: returned, pickle.dumps({"completions": ["a", "b"]}))


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
    assert judged(returned) == {"error": f"reward returned {kind} instead of a list of 2 numbers"}


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
