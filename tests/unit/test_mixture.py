"""Mixtures: shares by weight, every prompt of every source, one form of columns."""

import json
from collections import Counter

import pytest

from twofold.config import TaskConfig
from twofold.step.prompts import PromptSource, quotas
from twofold.tasks.load import load_task
from twofold.tasks.rewards import own
from twofold.types import Prompt


def jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def source(shares, seed=0):
    return PromptSource([Prompt(str(i)) for i in range(sum(n for n, _ in shares))], seed, shares)


# ---------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1], [1, 1]),
        ([2, 1], [2, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.25, 0.5, 0.25], [1, 2, 1]),
        ([3], [1]),
        ([2**0.5, 1], [586, 414]),
        ([999, 1], [999, 1]),
        ([1499, 1], [999, 1]),  # the nearest share
    ],
)
def test_quotas(weights, expected):
    assert quotas(weights) == expected


def test_a_source_that_would_never_be_asked_is_refused():
    with pytest.raises(ValueError, match=r"task\.mixture: weight 1 is less than a thousandth"):
        quotas([10_000, 1])
    with pytest.raises(ValueError, match=r"weight 1e-12 is less"):
        quotas([1, 1e-12])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "shares", [[(5, 2), (3, 1)], [(1, 1), (7, 1), (4, 3)], [(10, 0.1), (2, 1)]]
)
def test_each_cycle_has_the_shares_and_each_source_its_own_epochs(shares, seed):
    mixed, per_cycle = source(shares, seed), quotas([weight for _, weight in shares])
    length, sizes = sum(per_cycle), [n for n, _ in shares]
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    n_cycles = max(-(-n // q) for n, q in zip(sizes, per_cycle, strict=True))
    asked = [mixed.item(g) for g in range(3 * n_cycles * length)]

    def of(item):
        return max(k for k, first in enumerate(firsts) if item >= first)

    for start in range(0, len(asked), length):
        counts = Counter(of(item) for item in asked[start : start + length])
        assert [counts[k] for k in range(len(shares))] == per_cycle, f"seed {seed}"
    # coverage: after as many cycles as promised, everything has been asked
    assert set(asked[: n_cycles * length]) == set(range(sum(sizes))), f"seed {seed}"
    for k, n in enumerate(sizes):
        own_items = [item for item in asked if of(item) == k]
        for start in range(0, len(own_items) - n + 1, n):
            epoch = own_items[start : start + n]
            assert sorted(epoch) == list(range(firsts[k], firsts[k] + n)), f"seed {seed}"


def test_the_prompt_of_a_group_depends_on_nothing_else():
    shares = [(5, 2), (30, 1)]
    straight = source(shares, 3)
    expected = [straight.item(g) for g in range(500)]
    backwards = source(shares, 3)
    assert [backwards.item(g) for g in reversed(range(500))] == expected[::-1]
    assert [source(shares, 4).item(g) for g in range(500)] != expected
    # fixed for good: a resumed run continues an older process's order
    assert expected[:9] == [0, 6, 3, 2, 21, 1, 4, 2, 32]


def test_a_mixture_of_one_is_no_mixture():
    alone = PromptSource([Prompt(str(i)) for i in range(7)], 2)
    assert [source([(7, 3)], 2).item(g) for g in range(30)] == [alone.item(g) for g in range(30)]


# ---------------------------------------------------------------- sources


def test_columns_are_the_union_and_each_source_holds_out_its_own(tmp_path):
    a = jsonl(tmp_path / "a", [{"prompt": f"a{i}", "answer": i, "level": 1} for i in range(6)])
    b = jsonl(tmp_path / "b", [{"q": f"b{i}", "answer": i, "tests": "t"} for i in range(9)])
    mixture = [{"path": a, "weight": 2, "held_out": 1}, {"path": b, "prompt_column": "q"}]
    config = TaskConfig(name="jsonl", mixture=mixture, held_out=3)
    task = load_task(config)
    assert load_task(config) == task
    assert task.shares == ((5, 2.0), (6, 1.0)) and task.reward == "math_verify"
    assert [p.content[0] for p in task.train] == ["a"] * 5 + ["b"] * 6
    assert [p.content[0] for p in task.held_out] == ["a"] + ["b"] * 3
    assert task.columns == ["answer", "level", "tests"]
    for prompt in task.train + task.held_out:
        number = int(prompt.content[1:])
        level, tests = (1, None) if prompt.content[0] == "a" else (None, "t")
        assert prompt.columns == {"answer": number, "level": level, "tests": tests}


def test_what_one_source_holds_out_no_source_trains_on(tmp_path):
    rows = [{"prompt": f"{i}", "answer": i} for i in range(20)]
    files = [jsonl(tmp_path / "a", rows[:15]), jsonl(tmp_path / "b", rows[5:])]
    task = load_task(TaskConfig(name="jsonl", mixture=[{"path": f} for f in files], held_out=4))
    assert not {p.content for p in task.held_out} & {p.content for p in task.train}
    assert sum(n for n, _ in task.shares) == len(task.train)
    with pytest.raises(ValueError, match=r"task\.mixture\[1\]: other sources hold out all its pr"):
        mixture = [{"path": files[0], "held_out": 14}, {"path": jsonl(tmp_path / "c", rows[:1])}]
        load_task(TaskConfig(name="jsonl", mixture=mixture, held_out=0, seed=3))


def test_reasoning_gym_datasets_in_one_mixture():
    mixture = [
        {"dataset": "chain_sum", "dataset_options": {"max_terms": 2}, "weight": 3},
        {"dataset": "gcd", "size": 10},
    ]
    task = load_task(TaskConfig(name="reasoning_gym", mixture=mixture, size=20, held_out=2))
    assert task.reward == "reasoning_gym"
    assert Counter(p.columns["dataset"] for p in task.held_out) == {"chain_sum": 2, "gcd": 2}
    assert Counter(p.columns["dataset"] for p in task.train)["gcd"] == task.shares[1][0] <= 8


def test_sources_are_judged_by_their_own_rewards():
    mixture = [{"name": "addition", "digits": 2}, {"name": "reasoning_gym", "dataset": "gcd"}]
    task = load_task(TaskConfig(mixture=mixture, size=20, held_out=2))
    assert task.reward == "own"
    for prompt in task.held_out:
        reward = {True: "last_number", False: "reasoning_gym"}[prompt.columns["metadata"] is None]
        assert prompt.columns["own_reward"] == reward
        answer = prompt.columns["answer"]
        replies = [[{"role": "assistant", "content": text}] for text in (answer, "none")]
        columns = {name: [value] * 2 for name, value in prompt.columns.items()}
        assert own(completions=replies, **columns) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"weight": 0}, r"task\.mixture\[1\]: weight = 0 is refused: give a number above 0"),
        ({"weight": "2"}, r"task\.mixture\[1\]: weight = '2' is refused"),
        ({"pth": "x"}, r"task\.mixture\[1\]: pth is not an option; did you mean 'path'\?"),
        ({"weigth": 2}, r"task\.mixture\[1\]: weigth is not an option; did you mean 'weight'\?"),
        ({"system_prompt": "x"}, r"\[1\]: system_prompt is an option of \[task\] itself"),
        ({"mixture": []}, r"task\.mixture\[1\]: mixture is an option of \[task\] itself"),
        ({"digits": 7}, r"task\.mixture\[1\]: task\.digits = 7 is refused"),
        ({"size": "3"}, r"task\.mixture\[1\]: task\.size = '3' is not a whole number"),
        ({"name": "jsonl"}, r"task\.mixture\[1\]: task\.path: the jsonl task needs a file"),
        ({"held_out": 81}, r"task\.mixture\[1\]: task\.held_out: 81 of 81"),
    ],
)
def test_refusals_name_the_source(entry, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(TaskConfig(mixture=[{}, entry], held_out=0))
    assert "\n" not in str(caught.value)
