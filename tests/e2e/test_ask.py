"""What MODEL, RUN and RUN@STEP stand for, and what is answered about them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config, versions

from twofold.config import Config
from twofold.model import weights
from twofold.obs.record import Record
from twofold.runtime import ask, checkpoint, run
from twofold.step.prompts import encode_prompt
from twofold.types import Prompt

__all__ = ["folder"]

REWARD = "tests.e2e.rewards:even_sum"
STEPS = 3


@pytest.fixture(scope="module")
def config(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a run that is trained: every version is on disk."""
    config = small_config(
        folder,
        tmp_path_factory.mktemp("ask") / "run",
        train__steps=STEPS,
        train__learning_rate=0.03,
        run__checkpoint_every=1,
        run__keep_checkpoints=9,
        run__eval_samples=3,
        run__eval_every=1,
        reward__function=REWARD,
    )
    assert run.train(config).outcome == "done"
    return config


class Lines(run.Progress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(version, checksum of the weights) of every evaluation that is made."""
    seen: list[tuple[int, str]] = []
    evaluate = ask.evaluation.evaluate

    def noting(model: Any, *args: Any, version: int, **options: Any) -> Any:
        seen.append((version, checkpoint.weights_checksum(model)))
        return evaluate(model, *args, version=version, **options)

    monkeypatch.setattr(ask.evaluation, "evaluate", noting)
    return seen


def recorded(config: Config) -> tuple[dict[int, str], dict[int, dict[str, float]]]:
    """The checksum and the evaluation of each version."""
    with Record.open(Path(config.run.dir), read_only=True) as record:
        rates: dict[int, dict[str, float]] = {}
        for row in record.metrics():
            if row.name.startswith("eval/"):
                rates.setdefault(row.version, {})[row.name] = row.value
        return versions(record), rates


# ---------------------------------------------------------------- evaluate


@pytest.mark.parametrize(
    ("step", "version"), [("", STEPS), ("@0", 0), ("@1", 1), ("@2", 2), (f"@{STEPS}", STEPS)]
)
def test_a_run_and_its_steps_are_the_versions_of_its_record(
    config: Config, judged: list[tuple[int, str]], step: str, version: int
) -> None:
    """The weights are those, and so the pass rates are those that the run measured."""
    checksums, rates = recorded(config)
    assert len(set(checksums.values())) == STEPS + 1, "the versions do not differ"
    lines = Lines()
    metrics = ask.evaluate(f"{config.run.dir}{step}", config, 3, lines)
    assert judged == [(version, checksums[version])]
    assert metrics == rates[version]
    expected = {"": "run/model", "@0": "model"}.get(step, f"checkpoint of version {version}")
    assert expected in lines.lines[0]
    assert f"reward   {REWARD}" in lines.lines


def test_a_model_folder_is_judged_by_the_task(
    folder: Path, config: Config, judged: list[tuple[int, str]]
) -> None:
    """The same as version 0 of a run from it; greedy alone when no samples are asked for."""
    checksums, rates = recorded(config)
    metrics = ask.evaluate(str(folder), config, 0)
    assert judged == [(0, checksums[0])]
    assert metrics == {k: v for k, v in rates[0].items() if k.startswith("eval/greedy_")}
    by_task = copy.deepcopy(config)
    by_task.reward.function = ""
    lines = Lines()
    ask.evaluate(str(folder), by_task, 0, lines)
    assert "reward   last_number" in lines.lines


def test_a_run_without_a_trained_model_is_its_newest_checkpoint(
    config: Config, tmp_path: Path, judged: list[tuple[int, str]]
) -> None:
    checksums, _ = recorded(config)
    shutil.copytree(config.run.dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    ask.evaluate(str(tmp_path / "run"), config, 0)
    tensors = tmp_path / "run" / "checkpoints" / f"version-{STEPS:06d}" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    ask.evaluate(str(tmp_path / "run"), config, 0)
    assert judged == [(STEPS, checksums[STEPS]), (STEPS - 1, checksums[STEPS - 1])]
    with pytest.raises(ValueError, match=f"no checkpoint of version {STEPS}.*differs"):
        ask.evaluate(f"{tmp_path / 'run'}@{STEPS}", config, 0)


def test_a_step_that_is_not_there_is_refused_and_names_those_that_are(config: Config) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint of version 99 .*have: 1, 2, 3$") as error:
        ask.evaluate(f"{config.run.dir}@99", config, 0)
    assert "\n" not in str(error.value)


def test_nothing_held_out_is_refused(config: Config) -> None:
    nothing = copy.deepcopy(config)
    nothing.task.held_out = 0
    with pytest.raises(ValueError, match=r"^task.held_out = 0"):
        ask.evaluate(config.run.dir, nothing, 0)


def test_a_run_with_a_python_reward_is_judged_by_no_other_unasked(
    folder: Path, tmp_path: Path
) -> None:
    config = small_config(folder, tmp_path / "run", train__steps=1)
    run.train(config, reward=even_sum)
    for target in ("run", "run@1", "run@0"):
        with pytest.raises(ValueError, match=r"even_sum.*--reward\.function"):
            ask.evaluate(str(tmp_path / target), config, 0)
    config.reward.function = "exact_match"
    assert ask.evaluate(str(tmp_path / "run"), config, 0)["eval/greedy_failed"] == 0.0


# ---------------------------------------------------------------- generate


def their_greedy(folder: Path, question: str, dtype: torch.dtype, n: int) -> str:
    from transformers import AutoModelForCausalLM

    tokenizer = weights.load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.tensor([encode_prompt(Prompt([{"role": "user", "content": question}]), tokenizer)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
    )
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str) and text
    return text


def test_greedy_is_what_transformers_gives(folder: Path, config: Config) -> None:
    """A run answers with its trained model, in the dtype that it was trained in; a folder with its
    own weights."""
    question = "What is 3 + 4?"
    trained = Path(config.run.dir) / "model"
    answer = ask.generate(config.run.dir, question, 16, 0.0, 0, 1)
    assert answer == [their_greedy(trained, question, torch.float32, 16)]
    base = ask.generate(str(folder), question, 4, 0.0, 0, 1)
    assert base == [their_greedy(folder, question, torch.bfloat16, 4)]
    assert ask.generate(f"{config.run.dir}@0", question, 4, 0.0, 0, 1) != answer
    assert ask.generate(f"{config.run.dir}@{STEPS}", question, 16, 0.0, 0, 1) == answer


def test_samples_differ_and_a_seed_repeats_them(folder: Path) -> None:
    def answers(seed: int, n: int = 5, temperature: float = 1.0) -> list[str]:
        return ask.generate(str(folder), "What is 3 + 4?", 12, temperature, seed, n)

    five = answers(7)
    assert len(set(five)) == 5
    assert answers(7) == five and answers(7, n=2) == five[:2]
    assert not set(answers(8)) & set(five)
    assert len(set(answers(7, temperature=0.01))) == 1
    assert len(set(answers(7, temperature=0.0))) == 1


def test_a_folder_without_a_chat_template_continues_plain_text(
    folder: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    options = json.loads((plain / "tokenizer_config.json").read_text())
    del options["chat_template"]
    (plain / "tokenizer_config.json").write_text(json.dumps(options))
    with_template = ask.generate(str(folder), "the number", 8, 0.0, 0, 1)
    assert ask.generate(str(plain), "the number", 8, 0.0, 0, 1) != with_template
