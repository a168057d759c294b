"""Every option reaches the part that it is for, and what a run writes can be read."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.rewards import beside_another, even_sum, none_at_all, some_fail, talkative
from tests.e2e.small import folder, small_config

from twofold.config import load_config, to_toml
from twofold.model import weights
from twofold.obs.record import Record
from twofold.runtime import run
from twofold.sched.scheduler import SchedulerSpec
from twofold.step.prompts import PromptSource, encode_prompt
from twofold.tasks.load import load_task
from twofold.types import Group

__all__ = ["folder"]


def trained(folder: Path, run_dir: Path, reward: Any = even_sum, **changes: Any) -> list[Group]:
    """The groups that a run with these options trained."""
    config = small_config(folder, run_dir, **changes)
    assert run.train(config, reward=reward).outcome == "done"
    with Record.open(run_dir, read_only=True) as record:
        return [group for v in range(config.train.steps) for group in record.trained_groups(v)]


def commands(run_dir: Path, kind: str) -> list[Any]:
    with Record.open(run_dir, read_only=True) as record:
        return [row.command for row in record.commands() if row.command.kind == kind]


# ---------------------------------------------------------------- options


def test_the_scheduler_gets_every_option_of_its_own(folder: Path, tmp_path: Path) -> None:
    wanted = SchedulerSpec(
        steps=11, groups_per_step=12, group_size=13, max_staleness=14, max_running_samples=15,
        quantum_decode_steps=20, max_drops_per_step=17, needs_reference=True, evaluate=True,
        eval_every=18, checkpoint_every=19, updates_per_batch=4, dynamic_sampling=True,
    )  # fmt: skip
    assert all(f.name == "cards" or getattr(wanted, f.name) != f.default for f in fields(wanted))
    config = small_config(
        folder, tmp_path, train__steps=11, sched__groups_per_step=12, rollout__group_size=13,
        sched__max_staleness=14, rollout__max_running_samples=15, rollout__quantum_decode_steps=20,
        sched__max_drops_per_step=17, train__kl_coef=0.5, task__held_out=1, run__eval_every=18,
        run__checkpoint_every=19, train__updates_per_batch=4, sched__dynamic_sampling=True,
    )  # fmt: skip
    assert run.scheduler_spec(config) == wanted
    config.task.held_out, config.train.kl_coef = 0, 0.0
    spec = run.scheduler_spec(config)
    assert not spec.evaluate and not spec.needs_reference


def test_evaluations_and_checkpoints_come_as_often_as_asked(folder: Path, tmp_path: Path) -> None:
    trained(
        folder, tmp_path / "run", train__steps=7, run__eval_every=3, run__checkpoint_every=2,
        run__keep_checkpoints=3, run__eval_samples=2, task__held_out=5,
    )  # fmt: skip
    assert [c.version for c in commands(tmp_path / "run", "Evaluate")] == [0, 3, 6, 7]
    assert [c.version for c in commands(tmp_path / "run", "Checkpoint")] == [2, 4, 6, 7]
    left = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["version-000004", "version-000006", "version-000007"]
    with Record.open(tmp_path / "run", read_only=True) as record:
        rates = [row.value * 5 * 2 for row in record.metrics("eval/pass_rate")]
        greedy = [row.value * 5 for row in record.metrics("eval/greedy_pass_rate")]
    assert all(n == pytest.approx(round(n)) for n in rates + greedy), "of 5 prompts, 2 samples each"
    assert any(round(n) % 2 for n in rates), "could be one sample each as well"


def test_a_run_gives_up_after_so_many_drops(folder: Path, tmp_path: Path) -> None:
    config = small_config(folder, tmp_path / "run", sched__max_drops_per_step=3, task__held_out=0)
    result = run.train(config, reward=none_at_all)
    assert result.outcome.startswith("failed: 4 groups dropped in step 1")
    assert "reward returned None" in result.outcome


def test_a_reward_gets_its_time_and_no_more(folder: Path, tmp_path: Path) -> None:
    config = small_config(
        folder, tmp_path / "run", reward__timeout_s=0.25, reward__function="tests.e2e.rewards:slow",
        sched__max_drops_per_step=0, task__held_out=0,
    )  # fmt: skip
    outcome = run.train(config).outcome
    assert "1 groups dropped" in outcome and "longer than 0.25 s (reward.timeout_s)" in outcome


def test_rewards_have_as_many_processes_as_asked(folder: Path, tmp_path: Path) -> None:
    """Two judge at the same time; with one, each would wait in vain and fail its group."""
    marks = tmp_path / "marks"
    marks.mkdir()
    trained(
        folder, tmp_path / "run", functools.partial(beside_another, marks),
        reward__workers=2, train__steps=1, task__held_out=0, sched__max_drops_per_step=0,
    )  # fmt: skip
    assert len(list(marks.iterdir())) == 2


@pytest.mark.parametrize(
    "option", [("top_k", 1), ("top_p", 1e-6), ("min_p", 0.999), ("temperature", 1e-3), None]
)
def test_truncation_and_temperature_reach_the_sampler(
    folder: Path, tmp_path: Path, option: tuple[str, Any] | None
) -> None:
    """Each of these alone makes the samples of a group equal; only truncation has a mass to
    report."""
    changes = {f"rollout__{option[0]}": option[1]} if option else {}
    groups = trained(folder, tmp_path / "run", train__steps=2, task__held_out=0, **changes)
    different = [len({tuple(s.token_ids) for s in group.samples}) for group in groups]
    assert different == ([1] if option else [4]) * 4
    logmasses = [m for group in groups for s in group.samples for m in s.kept_logmass]
    truncated = option is not None and option[0] != "temperature"
    assert all(m < 0 for m in logmasses) if truncated else set(logmasses) == {0.0}


def test_length_and_quantum_and_slots(folder: Path, tmp_path: Path) -> None:
    groups = trained(
        folder, tmp_path / "run", train__steps=2, rollout__max_new_tokens=6,
        rollout__quantum_decode_steps=2, rollout__max_running_samples=4, rollout__group_size=3,
        sched__groups_per_step=1, task__held_out=0,
    )  # fmt: skip
    lengths = [len(s.token_ids) for group in groups for s in group.samples]
    assert max(lengths) == 6 and len(lengths) == 6
    assert {c.max_decode_steps for c in commands(tmp_path / "run", "Generate")} == {2}
    with Record.open(tmp_path / "run", read_only=True) as record:
        quanta = [event for _, _, event in record.events() if event.kind == "Generated"]
    assert max(q.decode_steps for q in quanta) == 2
    assert 3 < max(q.n_tokens / q.decode_steps for q in quanta if q.decode_steps) <= 4, "4 slots"


def test_the_cache_has_the_size_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    config = small_config(
        folder, tmp_path / "run", rollout__kv_cache_tokens=14, rollout__kv_block_tokens=7
    )
    with pytest.raises(ValueError, match=r"KV cache of \d+ tokens, kv_cache_tokens is 14"):
        run.train(config, reward=even_sum)
    assert not (tmp_path / "run").exists()
    config.rollout.kv_cache_tokens = 7 * 19
    with run._opened(config, tmp_path / "run", even_sum, None) as parts:
        lanes = parts.worker.generator._lanes
        lanes.make_room()
        assert lanes.cache is not None
        assert (lanes.cache.n_blocks, lanes.cache.block_tokens) == (19, 7)


def test_the_system_prompt_is_put_before_every_question(folder: Path, tmp_path: Path) -> None:
    config = small_config(folder, tmp_path / "run", task__system_prompt="Be brief.", train__steps=1)
    asked: list[list[int]] = []
    with run._opened(config, tmp_path / "run", even_sum, None) as parts:
        asked = [*parts.worker._prompt_ids, *parts.worker._eval_set.prompt_ids]
    groups = trained(folder, tmp_path / "run", task__system_prompt="Be brief.", train__steps=1)
    tokenizer = weights.load_tokenizer(folder)
    task = load_task(config.task)
    for group in groups:
        assert group.prompt_ids == encode_prompt(group.prompt, tokenizer, "Be brief.")
        assert "Be brief." in tokenizer.decode(group.prompt_ids)
    expected = [encode_prompt(p, tokenizer, "Be brief.") for p in [*task.train, *task.held_out]]
    assert asked == expected


def test_the_seed_decides_data_order_and_noise(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "the only question", "answer": "1"}')
    one = {"task__name": "jsonl", "task__path": str(tmp_path / "one.jsonl"), "task__held_out": 0}

    def first(name: str, seed: int, **changes: Any) -> tuple[list[Any], list[list[int]]]:
        groups = trained(folder, tmp_path / name, run__seed=seed, train__steps=1, **changes)
        return [g.prompt for g in groups], [s.token_ids for g in groups for s in g.samples]

    source = PromptSource(load_task(small_config(folder, tmp_path).task).train, seed=3)
    prompts, tokens = first("a", 3)
    assert prompts == [source.prompt(0), source.prompt(1)]
    assert first("again", 3) == (prompts, tokens) and first("b", 4)[0] != prompts
    asked, drawn = first("one", 3, **one)
    asked_too, drawn_too = first("other", 4, **one)
    assert asked == asked_too
    assert not any(ids in drawn_too for ids in drawn), "the same prompts with other noise"


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
def test_threads_are_set(folder: Path, tmp_path: Path) -> None:
    n = torch.get_num_threads() + 1
    config = small_config(folder, tmp_path / "run", run__threads=n)
    with run._opened(config, tmp_path / "run", even_sum, None) as parts:
        assert torch.get_num_threads() == n
        assert parts.fingerprint()["threads"] == n


def test_the_optimizer_gets_its_options(folder: Path, tmp_path: Path) -> None:
    trained(
        folder, tmp_path / "run", train__steps=4, train__schedule="linear", train__warmup_steps=2,
        train__learning_rate=1e-2,
    )  # fmt: skip
    with Record.open(tmp_path / "run", read_only=True) as record:
        rates = [row.value for row in record.metrics("learning_rate")]
    assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2, 0.5e-2])


# ---------------------------------------------------------------- what a run writes


def test_step_times_and_speeds_add_up(folder: Path, tmp_path: Path) -> None:
    """The phases and the waiting of a step make the step, the steps make the run, and the tokens
    per second are all tokens."""
    trained(folder, tmp_path / "run", some_fail, train__steps=6, rollout__group_size=3)
    with Record.open(tmp_path / "run", read_only=True) as record:
        by_version: dict[int, dict[str, float]] = {}
        for row in record.metrics():
            by_version.setdefault(row.version, {})[row.name] = row.value
        events = list(record.events())
    steps = [by_version[version] for version in range(1, 7)]
    for step in steps:
        parts = {k: v for k, v in step.items() if k.startswith("time/") and k != "time/step_s"}
        assert {"time/generate", "time/train", "time/wait"} <= parts.keys()
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(step["time/step_s"], rel=1e-3)
        assert step["tokens_per_s"] > 0
    last_n, last_s = max((n, time_s) for n, time_s, event in events if event.kind == "Trained")
    assert sum(step["time/step_s"] for step in steps) == pytest.approx(last_s)
    before = [event for n, _, event in events if n < last_n]
    n_tokens = sum(event.n_tokens for event in before if event.kind == "Generated")
    spoken = sum(step["tokens_per_s"] * step["time/step_s"] for step in steps)
    assert spoken == pytest.approx(n_tokens)
    dropped = sum(event.kind == "Discarded" for event in before)
    assert dropped > 0 and sum(step["groups/dropped"] for step in steps) == dropped


@pytest.mark.filterwarnings("ignore")  # TensorBoard's reader
def test_tensorboard_has_the_recorded_scalars(folder: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    trained(folder, tmp_path / "run", run__tensorboard=True, train__steps=3)
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    shown = {
        (point.step, name): float(make_ndarray(point.tensor_proto))
        for name in reader.Tags()["tensors"]
        for point in reader.Tensors(name)
    }
    assert {reader.SummaryMetadata(name).plugin_data.plugin_name for _, name in shown} == {
        "scalars"
    }
    with Record.open(tmp_path / "run", read_only=True) as record:
        recorded = {(row.version, row.name): row.value for row in record.metrics()}
    assert len(recorded) > 60 and (0, "eval/pass_rate") in recorded
    assert shown == pytest.approx(recorded, rel=1e-6)  # float32
    trained(folder, tmp_path / "without", run__tensorboard=False, train__steps=1)
    assert not (tmp_path / "without" / "tensorboard").exists()


def test_the_options_of_a_run_read_back_equal(folder: Path, tmp_path: Path) -> None:
    config = small_config(
        folder, tmp_path / "run", train__steps=1, train__learning_rate=1.25e-7,
        task__dataset_options={"min_terms": 2, "names": ["a", "b"]}, run__save_model=False,
    )  # fmt: skip
    before = copy.deepcopy(config)
    run.train(config, reward=even_sum)
    assert config == before, "a run changes nothing in what it was given"
    assert load_config(tmp_path / "run" / "config.toml") == config
    assert (tmp_path / "run" / "config.toml").read_text() == to_toml(config)
    assert not (tmp_path / "run" / "model").exists()


def test_what_a_reward_prints_is_kept(folder: Path, tmp_path: Path) -> None:
    groups = trained(folder, tmp_path / "run", talkative, train__steps=2, task__held_out=0)
    lines = (tmp_path / "run" / "reward.log").read_text().splitlines()
    assert set(lines) == {"judged 4 completions"} and len(lines) >= len(groups)


def test_the_rewards_in_the_metrics_are_those_of_the_record(folder: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path / "run", train__steps=3)
    with Record.open(tmp_path / "run", read_only=True) as record:
        means = [row.value for row in record.metrics("reward/mean")]
        for version, mean in enumerate(means):
            samples = [s for g in record.trained_groups(version) for s in g.samples]
            judged = even_sum(None, None, [s.token_ids for s in samples])
            assert [s.reward for s in samples] == judged
            assert mean == pytest.approx(statistics.fmean(judged))
