"""Options: what is read, what is refused and how it is said."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from twofold import config
from twofold.config import Config, check, from_dict, load_config, to_dict, to_toml


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "somewhere"\n[train]\nsteps = 7\nlearning_rate = 1\n'
        '[task]\nname = "reasoning_gym"\ndataset = "gcd"\n[task.dataset_options]\nmin_terms = 2\n'
    )
    return path


def test_file_over_defaults_and_overrides_over_file(toml: Path) -> None:
    overrides = ["--train.steps", "9", "--run.deterministic=true", "--train.kl_coef=1e-3"]
    loaded = load_config(toml, overrides)
    assert loaded.model.name == "somewhere"
    assert loaded.train.steps == 9
    assert loaded.run.deterministic is True
    assert loaded.train.kl_coef == 1e-3
    assert loaded.task.dataset_options == {"min_terms": 2}
    assert loaded.rollout == Config().rollout
    assert type(loaded.train.learning_rate) is float  # a whole number is a number


def test_last_override_wins_and_text_may_look_like_anything() -> None:
    overrides = ["--train.steps=1", "--train.steps=2", "--run.name=a=b", "--model.name", "3"]
    loaded = load_config(None, overrides)
    assert (loaded.train.steps, loaded.run.name, loaded.model.name) == (2, "a=b", "3")


def test_table_from_inline_toml() -> None:
    loaded = load_config(None, ["--task.dataset_options", "{min_terms = 2, words = ['a']}"])
    assert loaded.task.dataset_options == {"min_terms": 2, "words": ["a"]}


def test_resolved_config_reads_back(toml: Path, tmp_path: Path) -> None:
    loaded = load_config(toml, ["--reward.function", 'it\'s "quoted".py:f'])
    (tmp_path / "config.toml").write_text(to_toml(loaded))
    assert load_config(tmp_path / "config.toml") == loaded
    assert from_dict(to_dict(loaded)) == loaded


def test_defaults_pass_their_own_checks_and_are_not_shared() -> None:
    check(Config())
    Config().task.dataset_options["x"] = 1
    assert Config().task.dataset_options == {}


def test_lists(tmp_path: Path) -> None:
    file = tmp_path / "lists.toml"
    file.write_text(
        '[reward]\nfunctions = ["last_number", "own.py:f"]\nweights = [1, 0.5]\n'
        '[task]\nmixture = [{name = "jsonl", path = "a"}, {weight = 2}]\n'
    )
    loaded = load_config(file, ["--rollout.stop", r'["\n\n", "END"]'])
    assert loaded.rollout.stop == ["\n\n", "END"]
    assert loaded.reward.weights == [1.0, 0.5] and type(loaded.reward.weights[0]) is float
    assert loaded.reward.named == ["last_number", "own.py:f"]
    assert loaded.task.mixture == [{"name": "jsonl", "path": "a"}, {"weight": 2}]
    (tmp_path / "again.toml").write_text(to_toml(loaded))
    assert load_config(tmp_path / "again.toml") == loaded
    assert Config().reward.named == [] and Config().rollout.stop == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.stop", "x"], r"rollout.stop = 'x' is not a list, for example \[1, 2\] or .*"),
        (["--rollout.stop", "[3]"], r"rollout.stop = '\[3\]' is not a list, .*"),
        (["--rollout.stop=['']"], r"rollout.stop = \[''\] is refused: an empty text ends nothing"),
        (["--reward.weights=['a']"], "reward.weights = .* is not a list, .*"),
        (["--task.digits=3"], "task.digits = 3 is refused: give 1 or 2"),
        (
            ["--reward.function=a:b", "--reward.functions=['c:d']"],
            r"reward.functions = \['c:d'\] is refused: reward.function names one already; .*",
        ),
    ],
)
def test_refused_lists(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(None, overrides)
    assert re.fullmatch(message, str(caught.value)), caught.value
    with pytest.raises(ValueError, match=r"rollout\.stop\[1\] = 3 is not text"):
        from_dict({"rollout": {"stop": ["a", 3]}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--train.lerning_rate", "1"],
            "train.lerning_rate is not an option; did you mean train.learning_rate?",
        ),
        (
            ["--train.max_staleness=1"],
            "train.max_staleness is not an option; did you mean sched.max_staleness?",
        ),
        (["--steps=1"], "steps is not an option; did you mean train.steps?"),
        (["--zzz.qqq=1"], "zzz.qqq is not an option; twofold train --help lists them"),
        (["--train.steps", "x"], "train.steps = 'x' is not a whole number"),
        (["--train.steps", "3.0"], "train.steps = '3.0' is not a whole number"),
        (["--train.learning_rate", "fast"], "train.learning_rate = 'fast' is not a number"),
        (["--train.learning_rate", "inf"], "train.learning_rate = 'inf' is not a number"),
        (["--run.deterministic", "1"], "run.deterministic = '1' is not true or false"),
        (
            ["--model.dtype", "float16"],
            "model.dtype = 'float16' is not one of auto, bfloat16, float32; did you mean bfloat16?",
        ),
        (
            ["--task.dataset_options", "2"],
            "task.dataset_options = '2' is not a table, for example {min_terms = 2}",
        ),
        (["--train.steps"], "train.steps needs a value, for example --train.steps VALUE"),
        (
            ["--train.steps", "--run.seed=1"],
            "train.steps needs a value, for example --train.steps VALUE",
        ),
        (
            ["train.steps=1"],
            "'train.steps=1' is not an option; options look like --section.option value",
        ),
    ],
)
def test_override_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "trian is not a section of options; did you mean train?"),
        (
            {"zzz": {}},
            "zzz is not a section of options; there are model, task, reward, rollout, sched, "
            "train, run",
        ),
        ({"train": 3}, "train = 3 is not a section with options"),
        ({"train": {"steps": True}}, "train.steps = True is not a whole number"),
        ({"train": {"steps": "3"}}, "train.steps = '3' is not a whole number"),
        ({"train": {"kl_coef": True}}, "train.kl_coef = True is not a number"),
        ({"train": {"kl_coef": float("nan")}}, "train.kl_coef = nan is not a number"),
        ({"run": {"save_model": 1}}, "run.save_model = 1 is not true or false"),
        ({"run": {"name": 1}}, "run.name = 1 is not text"),
    ],
)
def test_errors_in_values_with_a_type(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_dict(values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("rollout.temperature", "0", "0.1"),
        ("rollout.group_size", "1", "2"),
        ("rollout.top_p", "0", "1"),
        ("rollout.top_p", "1.1", "0.5"),
        ("rollout.min_p", "1", "0"),
        ("rollout.max_new_tokens", "0", "1"),
        ("rollout.kv_cache_tokens", "64", "65"),
        ("sched.max_staleness", "-1", "0"),
        ("sched.groups_per_step", "0", "1"),
        ("train.steps", "0", "1"),
        ("train.learning_rate", "-1e-9", "0"),
        ("train.beta2", "1", "0"),
        ("train.clip_low", "1.5", "1"),
        ("train.importance_cap", "0", "1"),
        ("train.micro_batch_tokens", "0", "1"),
        ("reward.timeout_s", "0", "0.1"),
        ("run.device", "gpu", "cuda"),
        ("run.name", "a/b", "b"),
        ("run.keep_checkpoints", "0", "1"),
    ],
)
def test_ranges(name: str, bad: str, good: str) -> None:
    load_config(None, [f"--{name}", good])
    with pytest.raises(ValueError) as caught:
        load_config(None, [f"--{name}", bad])
    text = str(caught.value)
    assert text.startswith(f"{name} = ")
    assert "is refused: " in text
    assert "\n" not in text


def test_check_finds_a_wrong_type_that_python_code_put_there() -> None:
    wrong = Config()
    wrong.train.steps = "3"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"train\.steps = '3' is not a whole number"):
        check(wrong)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.toml: No such file"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[train]\nsteps = = 3")
    with pytest.raises(ValueError, match=r"bad\.toml is not a TOML file: .*line 2"):
        load_config(tmp_path / "bad.toml")


def test_every_option_has_help_and_a_known_kind() -> None:
    assert len(config.OPTIONS) == sum(len(fields(vars(Config())[s])) for s in config.SECTIONS)
    for option in config.OPTIONS.values():
        assert option.help
        assert isinstance(option.kind, tuple) or option.kind in (int, float, bool, str, dict, list)
        assert (option.item in (float, str, dict)) == (option.kind is list), option
