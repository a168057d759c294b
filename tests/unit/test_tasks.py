"""Tasks and the rewards that ship with the package."""

import json
from pathlib import Path

import pytest

from twofold.config import TaskConfig
from twofold.tasks.load import load_task
from twofold.tasks.rewards import exact_match, last_number, math_verify, reasoning_gym
from twofold.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples"


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def questions(prompts: list[Prompt]) -> list[str]:
    return [json.dumps(prompt.content) for prompt in prompts]


def test_addition_is_all_sums_once_and_held_out_is_held_out():
    task = load_task(TaskConfig(name="addition", held_out=24))
    assert (len(task.train), len(task.held_out), task.reward) == (57, 24, "last_number")
    assert len({*questions(task.train), *questions(task.held_out)}) == 81
    for prompt in task.train + task.held_out:
        a, b = _terms(prompt)
        assert prompt.columns == {"answer": str(a + b)}
    again = load_task(TaskConfig(name="addition", held_out=24))
    assert again == task
    other = load_task(TaskConfig(name="addition", held_out=24, seed=1))
    assert set(questions(other.held_out)) != set(questions(task.held_out))


def test_two_digit_addition_is_all_pairs_of_two_digit_numbers():
    task = load_task(TaskConfig(name="addition", digits=2, held_out=100))
    pairs = {_terms(prompt) for prompt in task.train + task.held_out}
    assert pairs == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(task.held_out) == 100 and len(task.train) == 8000
    assert all(int(p.columns["answer"]) == sum(_terms(p)) for p in task.train)


def _terms(prompt: Prompt) -> tuple[int, int]:
    words = prompt.content[0]["content"].replace("?", "").split()
    return int(words[2]), int(words[4])


def test_repeated_prompts_never_leak_from_held_out_into_train(tmp_path):
    rows = [{"prompt": f"question {i % 5}", "row": i} for i in range(50)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    task = load_task(TaskConfig(name="jsonl", path=str(file), held_out=2))
    assert len(task.held_out) == 2 and len(task.train) == 30
    assert not set(questions(task.held_out)) & set(questions(task.train))
    with pytest.raises(ValueError, match=r"task\.held_out: 5 of 5 different prompts"):
        load_task(TaskConfig(name="jsonl", path=str(file), held_out=5))
    with pytest.raises(ValueError, match=r"take 0 to 4"):
        load_task(TaskConfig(name="jsonl", path=str(file), held_out=-1))


def test_jsonl_reads_chat_and_text_and_keeps_the_other_columns(tmp_path):
    messages = [{"role": "user", "content": "line\u2028separator"}]
    file = tmp_path / "data.jsonl"
    rows = [{"q": messages, "answer": 1, "tags": ["a"]}, {"q": "text", "answer": 2, "tags": None}]
    file.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n", "utf-8")
    task = load_task(TaskConfig(name="jsonl", path=str(file), prompt_column="q", held_out=0))
    assert task.train == [
        Prompt(messages, {"answer": 1, "tags": ["a"]}),
        Prompt("text", {"answer": 2, "tags": None}),
    ]
    assert task.columns == ["answer", "tags"] and task.reward == "math_verify"
    assert task.train[0].is_chat and not task.train[1].is_chat


def nested(opening: str, closing: str, levels: int) -> str:
    """A row whose column x is this deep."""
    return '{"prompt": "a", "x": ' + opening * levels + "1" + closing * levels + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "data.jsonl:1: no rows"),
        ('{"prompt": "a"}\n{"prompt" "b"}', "data.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n[1]', "data.jsonl:2: a row is a JSON object, not list"),
        ('{"promt": "a", "x": 1}', "data.jsonl:1: no column 'prompt' among promt, x"),
        ('{"prompt": "a", "x": 1}\n{"prompt": "b"}', "data.jsonl:2: columns differ .*: x;"),
        ('{"prompt": ""}', "data.jsonl:1: column 'prompt' must be text or a list"),
        ('{"prompt": [{"role": "user"}]}', "data.jsonl:1: column 'prompt': a chat message is"),
        ('{"prompt": "a", "completions": 1}', "data.jsonl:1: column 'completions' is what rewards"),
        ('{"prompt": "a\\ud800"}', r"data.jsonl:1: column 'prompt': character 2 is \\ud800, half"),
        (
            '{"prompt": [{"role": "user", "content": "\\udc01"}]}',
            r"data.jsonl:1: column 'prompt': character 1 is \\udc01, half",
        ),
        (
            '{"prompt": "a", "x": 1}\n' + nested("[", "]", 10**5),
            "data.jsonl:2: lists or objects are nested deeper than 100",
        ),
        (  # read without trouble, but not written
            nested('{"y":[', "]}", 50),
            "data.jsonl:1: lists or objects are nested deeper than 100",
        ),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, text, message):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_task(TaskConfig(name="jsonl", path=str(file), held_out=0))
    assert "\n" not in str(caught.value)


def test_jsonl_takes_whole_surrogate_pairs_and_some_nesting(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(nested("[", "]", 99).replace('"a"', '"\\ud83d\\ude00"'))
    (prompt,) = load_task(TaskConfig(name="jsonl", path=str(file), held_out=0)).train
    assert prompt.content == "\U0001f600"


def test_files_that_cannot_be_read():
    with pytest.raises(ValueError, match=r"task\.path: the jsonl task needs a file"):
        load_task(TaskConfig(name="jsonl"))
    with pytest.raises(ValueError, match=r"task\.path: cannot read none\.jsonl"):
        load_task(TaskConfig(name="jsonl", path="none.jsonl"))


def test_names_are_corrected():
    with pytest.raises(ValueError, match="no task 'adition'; did you mean 'addition'"):
        load_task(TaskConfig(name="adition"))
    with pytest.raises(ValueError, match="no 'chain_sums'; did you mean 'chain_sum'"):
        load_task(TaskConfig(name="reasoning_gym", dataset="chain_sums"))
    with pytest.raises(ValueError, match="no option 'max_term'; did you mean 'max_terms'"):
        options = {"max_term": 3}
        load_task(TaskConfig(name="reasoning_gym", dataset="chain_sum", dataset_options=options))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset": ""}, "needs a dataset"),
        ({"dataset_options": {"seed": 3}}, r"dataset_options\.seed: set task\.seed"),
        ({"dataset_options": {"min_terms": 0}}, "chain_sum refuses .*min_terms must be positive"),
        ({"size": 0}, "0 items cannot be made"),
        ({"size": 8, "held_out": 8}, "task.held_out: 8 of 8"),
    ],
)
def test_reasoning_gym_refusals(config, message):
    with pytest.raises(ValueError, match=message):
        load_task(TaskConfig(name="reasoning_gym", **{"dataset": "chain_sum", **config}))


def test_datasets_that_would_misjudge_after_json_are_refused(monkeypatch):
    from reasoning_gym.arithmetic.gcd import GCDConfig, GCDDataset
    from reasoning_gym.factory import DATASETS

    class Tuples(GCDDataset):
        def __getitem__(self, idx):
            return {**super().__getitem__(idx), "metadata": {"cells": (1, 2)}}

        def score_answer(self, answer, entry):
            return float(entry["metadata"]["cells"] == (1, 2))

    monkeypatch.setitem(DATASETS, "tuples", (Tuples, GCDConfig))
    with pytest.raises(ValueError, match="needs metadata that JSON cannot hold"):
        load_task(TaskConfig(name="reasoning_gym", dataset="tuples"))


@pytest.mark.parametrize(
    ("dataset", "options"), [("chain_sum", {"max_terms": 3, "max_digits": 2}), ("gcd", {})]
)
def test_reasoning_gym_is_judged_by_its_own_scorer(dataset, options):
    config = TaskConfig(
        name="reasoning_gym", dataset=dataset, dataset_options=options, size=20, held_out=4, seed=3
    )
    task = load_task(config)
    assert load_task(config) == task and task.reward == "reasoning_gym"
    assert len(task.held_out) == 4
    for prompt in task.train[:4]:
        assert prompt.content == [{"role": "user", "content": prompt.columns["question"]}]
        assert json.loads(json.dumps(prompt.columns)) == prompt.columns
        answer = prompt.columns["answer"]
        replies = chat(answer, f"So <answer> {answer} </answer>!", "x", f"{answer} or so")
        columns = {name: [value] * 4 for name, value in prompt.columns.items()}
        right, tagged, wrong, partial = reasoning_gym(completions=replies, **columns)
        assert (right, tagged, wrong) == (1.0, 1.0, 0.0) and 0 <= partial < 1


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("7", "7", 1.0),
        ("3 + 4 = 7.", "7", 1.0),
        ("7, or maybe 8", "7", 0.0),
        ("about 7.0", 7, 1.0),
        ("it is 1,234.50", "1234.5", 1.0),
        ("-3", "-3", 1.0),
        ("5-3", "3", 1.0),
        ("\u22123", "-3", 1.0),
        ("17", "7", 0.0),
        ("probability .5", "0.5", 1.0),
        ("1, 2,345", "345", 0.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_last_number(reply, answer, reward):
    assert last_number(chat(reply), [answer]) == [reward]
    assert last_number([reply], [answer], level=[1]) == [reward]  # text prompts


def test_last_number_refuses_answers_that_are_none():
    with pytest.raises(ValueError, match="answer 'five' is not a number"):
        last_number(chat("5"), ["five"])


def test_exact_match():
    replies = chat(" Paris\n", "paris", "Paris.", "5")
    assert exact_match(replies, ["Paris", "Paris", "Paris", 5]) == [1.0, 0.0, 0.0, 1.0]


def test_math_verify_compares_values():
    replies = chat(
        "The answer is $\\frac{1}{2}$.", "0.5", "\\boxed{2/4}", "I think it is 1/3", "no idea"
    )
    expected = [1.0, 1.0, 1.0, 0.0, 0.0]
    assert math_verify(replies, ["\\frac{1}{2}"] * 5) == expected
    assert math_verify(replies, ["$1/2$"] * 5) == expected
    assert math_verify(chat("so 12"), [12]) == [1.0]
    with pytest.raises(ValueError, match="cannot read the answer"):
        math_verify(chat("5"), ["???"])


def test_the_example_with_own_data_and_reward(monkeypatch):
    import tomllib

    monkeypatch.chdir(EXAMPLES.parent)
    options = tomllib.loads((EXAMPLES / "own_task.toml").read_text())
    task = load_task(TaskConfig(**options["task"]))
    assert len(task.train) == 48 and len(task.held_out) == 16

    from twofold.tasks.rewards import resolve_reward

    reward = resolve_reward(options["reward"]["function"])
    replies = chat("3 x 4 = 12", "11", "20", "no idea")
    assert reward(completions=replies, answer=[12] * 4, prompts=[]) == [1.0, 0.2, 0.0, 0.0]
