"""Kinds of failure that people report of RL frameworks, each with a test by its number: what a run
of a tiny model does instead. The units behind them have tests of their own.

 5  cached prefixes or keys survive an update of the weights
 6  log-probs of generation and training differ
10  NaN from group size 1, zero variance, empty batches, None as a reward
11  the loss changes with the micro-batch
12  a reward hangs, raises, forks, prints without end; a failed sample counts as 0
13  token ids change on the way from sampling to training
14  samples that are left out drag their group's mean
16  an installation that conflicts
18  no chat template, pad = eos, two eos ids, no bos
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tests.e2e.rewards import always_right, even_sum, none_at_all, some_fail
from tests.e2e.small import folder, small_config, versions
from tests.kind_rewards import hostile, kind_of

from twofold.config import TrainConfig, check
from twofold.model import attention, weights
from twofold.obs.record import Record
from twofold.runtime import checkpoint, run
from twofold.step import train as training
from twofold.step.logprob import chunked_logprobs
from twofold.step.optimizer import Optimizer, load_weights
from twofold.step.pack import Pack, Part, build_pack
from twofold.types import Group, Sample

__all__ = ["folder"]

ROOT = Path(__file__).parents[1]
EXACT = attention.kernel_name() == "cpu kernel"


def trained_groups(run_dir: Path) -> list[Group]:
    with Record.open(run_dir, read_only=True) as record:
        n_versions = len(versions(record))
        return [group for v in range(n_versions) for group in record.trained_groups(v)]


def metric(run_dir: Path, name: str) -> list[float]:
    with Record.open(run_dir, read_only=True) as record:
        return [row.value for row in record.metrics(name)]


# ---------------------------------------------------------------- 5


def test_kind_05_no_key_outlives_the_weights_that_made_it(folder: Path, tmp_path: Path) -> None:
    """Every token of a run with large updates is computed again from its whole prefix, under the
    weights of its version and without a cache: the recorded log-probs are those. With caches that
    are kept over updates, as only `kv_after_update = "keep"` asks for, they are not."""
    gaps: dict[str, float] = {}
    for kept in ("recompute", "keep"):
        config = small_config(
            folder, tmp_path / kept, rollout__kv_after_update=kept, sched__max_staleness=3,
            train__steps=6, train__learning_rate=0.03, task__held_out=0,
            run__checkpoint_every=1, run__keep_checkpoints=100,
        )  # fmt: skip
        assert run.train(config, reward=even_sum).outcome == "done"
        samples = [(group, s) for group in trained_groups(tmp_path / kept) for s in group.samples]
        assert sum(len(set(s.versions)) > 1 for _, s in samples) >= 3, "too few were paused"
        gaps[kept] = 0.0
        for version in range(6):
            model = weights.load_model(folder, torch.float32)
            if version:
                load_weights(model, checkpoint.find(tmp_path / kept / "checkpoints", version)[1])
            for group, sample in samples:
                own = [i for i, v in enumerate(sample.versions) if v == version]
                if own:
                    again = uncached_logprobs(model, group, sample, config.rollout.temperature)
                    found = torch.tensor(sample.logprobs)
                    gaps[kept] = max(gaps[kept], float((again - found)[own].abs().max()))
    print(gaps)
    assert gaps["recompute"] <= (0.0 if EXACT else 1e-5)
    assert gaps["keep"] > 1e-3, "the test would not see a key of older weights"


@torch.no_grad()
def uncached_logprobs(model: Any, group: Group, sample: Sample, temperature: float) -> torch.Tensor:
    pack = build_pack([Part(group.prompt_ids, [sample])], "cpu")
    hidden = model(pack.token_ids, pack.rows)[pack.hidden_index]
    return chunked_logprobs(hidden, model.head_weight, pack.targets, temperature)[0]


# ---------------------------------------------------------------- 6


def test_kind_06_sampling_and_training_agree_on_every_logprob(folder: Path, tmp_path: Path) -> None:
    """With a temperature and truncation, of fresh and of stale tokens: at learning rate 0 the ratio
    is 1; what truncation left of the distribution is recorded beside it."""
    config = small_config(
        folder, tmp_path / "run", rollout__temperature=0.7, rollout__top_p=0.9, rollout__top_k=40,
        train__learning_rate=0.0, train__steps=6, task__held_out=0,
    )  # fmt: skip
    run.train(config, reward=even_sum)
    limit = 0.0 if EXACT else 1e-5
    assert max(metric(tmp_path / "run", "staleness/mean")) > 0
    assert max(metric(tmp_path / "run", "logprob_gap/max")) <= limit
    ratios = metric(tmp_path / "run", "ratio/min") + metric(tmp_path / "run", "ratio/max")
    assert len(ratios) >= 6 and all(abs(ratio - 1) <= limit for ratio in ratios)
    masses = [
        m for g in trained_groups(tmp_path / "run") for s in g.samples for m in s.kept_logmass
    ]
    assert min(masses) < math.log(0.95) and max(masses) <= 0


# ---------------------------------------------------------------- 10


def test_kind_10_what_would_divide_by_zero_is_refused_or_finite(
    folder: Path, tmp_path: Path
) -> None:
    for section, option in (
        ("rollout", "group_size"), ("sched", "groups_per_step"), ("train", "micro_batch_tokens"),
        ("train", "updates_per_batch"), ("rollout", "max_running_samples"),
    ):  # fmt: skip
        config = small_config(folder, tmp_path / "refused")
        setattr(getattr(config, section), option, 1 if option == "group_size" else 0)
        with pytest.raises(ValueError, match=rf"^{section}\.{option} = [01] is refused"):
            check(config)

    config = small_config(folder, tmp_path / "level", train__steps=2, train__weight_decay=0.1)
    assert run.train(config, reward=always_right).outcome == "done"
    with Record.open(tmp_path / "level", read_only=True) as record:
        assert all(math.isfinite(row.value) for row in record.metrics())
        assert len(set(versions(record).values())) == 1, "nothing to learn moved the weights"

    config = small_config(
        folder, tmp_path / "alone", rollout__group_size=1, train__loss="reinforce_pp",
        train__steps=2, sched__groups_per_step=4,
    )  # fmt: skip
    assert run.train(config, reward=even_sum).outcome == "done"
    with Record.open(tmp_path / "alone", read_only=True) as record:
        assert all(math.isfinite(row.value) for row in record.metrics())
        assert len(set(versions(record).values())) > 1

    config = small_config(folder, tmp_path / "none", sched__max_drops_per_step=2, task__held_out=0)
    outcome = run.train(config, reward=none_at_all).outcome
    assert outcome.startswith("failed: 3 groups dropped") and "None" in outcome


# ---------------------------------------------------------------- 11


@pytest.mark.parametrize("loss", get_args(get_type_hints(TrainConfig)["loss"]))
def test_kind_11_the_gradient_does_not_depend_on_the_micro_batch(
    folder: Path, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients: list[torch.Tensor] = []
    update = Optimizer.update

    def watched(self: Optimizer, *arguments: Any) -> float:
        parts = [master.grad.flatten() for master in self.masters.values()]  # type: ignore
        gradients.append(torch.cat(parts))
        return update(self, *arguments)

    monkeypatch.setattr(Optimizer, "update", watched)
    for rows in (1, 4096):
        config = small_config(
            folder, tmp_path / str(rows), train__micro_batch_tokens=rows, train__loss=loss,
            train__steps=1, task__held_out=0, run__save_model=False, run__checkpoint_every=0,
        )  # fmt: skip
        run.train(config, reward=even_sum)
    one_by_one, at_once = gradients
    largest = at_once.abs().max()
    assert largest > 0
    assert (one_by_one - at_once).abs().max() <= 1e-6 * largest


# ---------------------------------------------------------------- 12


def test_kind_12_a_hostile_reward_fails_its_own_samples_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"TWOFOLD_TEST_MARK={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    config = small_config(
        folder, tmp_path / "run", reward__timeout_s=0.4, train__steps=1, task__held_out=0,
        sched__groups_per_step=3, rollout__group_size=6,
    )  # fmt: skip
    start_s = time.monotonic()
    assert run.train(config, reward=hostile).outcome == "done"
    assert time.monotonic() - start_s < 30
    samples = [s for group in trained_groups(tmp_path / "run") for s in group.samples]
    kinds = [kind_of(sample.token_ids) for sample in samples]
    assert {"hangs", "raises", "forks", "prints", ""} <= set(kinds), "not every kind was met"
    for sample, kind in zip(samples, kinds, strict=True):
        if kind in ("hangs", "raises"):
            assert sample.reward is None and sample.advantage is None
            assert {"hangs": "0.4 s", "raises": "no such file"}[kind] in (sample.failed or "")
        else:
            assert sample.failed is None and sample.reward in (0.5, 1.0)
    failed = float(sum(kind in ("hangs", "raises") for kind in kinds))
    assert metric(tmp_path / "run", "samples/failed") == [failed]
    assert (tmp_path / "run" / "reward.log").stat().st_size < 3_000_000
    assert not marked_processes(mark), "a process of the reward is left"


def marked_processes(mark: str) -> list[int]:
    """Those that inherited the environment variable from this one, whoever their parent is now."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


# ---------------------------------------------------------------- 13


def test_kind_13_the_sampled_ids_are_the_trained_ids(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model writes ids that no text would encode to; they are trained all the same."""
    packs: list[Pack] = []

    def watched(*arguments: Any) -> Pack:
        packs.append(build_pack(*arguments))
        return packs[-1]

    monkeypatch.setattr(training, "build_pack", watched)
    config = small_config(folder, tmp_path / "run", train__steps=2, task__held_out=0)
    run.train(config, reward=even_sum)
    with Record.open(tmp_path / "run", read_only=True) as record:
        sampled = {
            sample.sample_id: sample.token_ids
            for version in range(2)
            for group in record.trained_groups(version)
            for sample in group.samples
        }
    tokenizer = weights.load_tokenizer(folder)
    changed = 0
    for pack in packs:
        targets = pack.targets.split([len(sample.token_ids) for sample in pack.samples])
        for sample, own in zip(pack.samples, targets, strict=True):
            assert own.tolist() == sampled[sample.sample_id]
            text = tokenizer.decode(own)
            changed += tokenizer(text, add_special_tokens=False)["input_ids"] != own.tolist()
    assert changed >= 3, "all ids were those of their text: the test shows nothing"


# ---------------------------------------------------------------- 14


def test_kind_14_a_sample_without_a_reward_moves_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantages of its siblings are those of a group that never had it."""
    trained: set[Any] = set()

    def watched(parts: list[Part], device: Any) -> Pack:
        trained.update(sample.sample_id for part in parts for sample in part.samples)
        return build_pack(parts, device)

    monkeypatch.setattr(training, "build_pack", watched)
    config = small_config(folder, tmp_path / "run", rollout__group_size=6, task__held_out=0)
    run.train(config, reward=some_fail)
    mixed = 0
    for group in trained_groups(tmp_path / "run"):
        rewards = [s.reward for s in group.samples if s.reward is not None]
        for sample in group.samples:
            if sample.reward is None:
                assert sample.advantage is None and sample.sample_id not in trained
            elif len(set(rewards)) > 1:
                mean, std = statistics.mean(rewards), statistics.stdev(rewards)
                assert sample.advantage == pytest.approx((sample.reward - mean) / std, rel=1e-4)
                mixed += len(rewards) < len(group.samples)
    assert mixed >= 5, "no group had both: the test shows nothing"


# ---------------------------------------------------------------- 16


def test_kind_16_two_commands_install_pinned_versions() -> None:
    """Each command sets up what it needs; everything it installs has one exact version, torch one
    with a build for CPUs, and what runs these tests are those versions."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(INSTALLED\)", makefile, re.M)
    assert re.search(r"^test: lint", makefile, re.M)
    assert re.search(r"^lint: \$\(INSTALLED\)", makefile, re.M)
    assert "pip install -c constraints.txt -e '.[dev]'" in makefile
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {normal(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in (x for listed in (project["dependencies"], *extras) for x in listed):
        name = normal(re.split(r"[\[<>=!~;]", requirement)[0])
        if name == project["name"]:
            continue  # an extra that takes another one in
        assert name in pins, f"{name} has no exact version in constraints.txt"
        installed = importlib.metadata.version(name).partition("+")[0]
        assert installed == pins[name], f"{name} {installed} is installed, pinned is {pins[name]}"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# ---------------------------------------------------------------- 18


def variant(folder: Path, path: Path, template: bool, **ids: Any) -> Path:
    """The model folder with other special tokens, as its own files say."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"pad_token": tokenizer["eos_token"], "bos_token": None}
    if not template:
        del tokenizer["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((path / name).read_text())
        config |= {"bos_token_id": None, "pad_token_id": ids["eos_token_id"][0], **ids}
        (path / name).write_text(json.dumps(config))
    return path


def test_kind_18_special_tokens_are_what_the_folder_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pad = eos, two (here many) eos ids, no bos: a completion stops at any of them, which is its
    last token and is trained; padding masks nothing. Without a chat template chat is refused in one
    line, plain text is continued."""
    stops = list(range(2, 60))  # a random model soon meets one
    odd = variant(folder, tmp_path / "odd", template=True, eos_token_id=stops)
    targets: list[list[int]] = []

    def watched(parts: list[Part], device: Any) -> Pack:
        targets.extend(sample.token_ids for part in parts for sample in part.samples)
        return build_pack(parts, device)

    monkeypatch.setattr(training, "build_pack", watched)
    config = small_config(odd, tmp_path / "run", train__steps=3, task__held_out=0)
    assert run.train(config, reward=even_sum).outcome == "done"
    samples = [s for group in trained_groups(tmp_path / "run") for s in group.samples]
    ends = {s.token_ids[-1] for s in samples if s.finish_reason == "stop"}
    assert len(ends) >= 3 and ends <= set(stops)
    assert not any(set(s.token_ids[:-1]) & set(stops) for s in samples)
    assert any(ids[-1] in ends for ids in targets)

    bare = variant(folder, tmp_path / "bare", template=False, eos_token_id=[2])
    with pytest.raises(ValueError, match="no chat template") as refused:
        run.train(small_config(bare, tmp_path / "chat"), reward=even_sum)
    assert "\n" not in str(refused.value) and not (tmp_path / "chat").exists()
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} and {i} is "}) + "\n" for i in range(8)))
    config = small_config(bare, tmp_path / "text", train__steps=1, task__held_out=0)
    config.task.name, config.task.path = "jsonl", str(rows)
    assert run.train(config, reward=even_sum).outcome == "done"
