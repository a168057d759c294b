"""Whole runs of a tiny model: what a run leaves behind, and what it promises on the way."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.e2e.rewards import even_sum, some_fail
from tests.e2e.small import folder, small_config, versions

from twofold.config import Config
from twofold.model import attention, weights
from twofold.obs.record import Record
from twofold.runtime import checkpoint, run
from twofold.step.generate import Generator
from twofold.step.prompts import PromptSource, encode_prompt
from twofold.step.sampling import Sampling
from twofold.step.train import Trainer
from twofold.tasks.load import load_task
from twofold.types import Group, Sample, SampleId

__all__ = ["folder"]


def checksum(run_dir: Path, version: int) -> str | None:
    with Record.open(run_dir, read_only=True) as record:
        return record.checksum(version)


def test_a_run_leaves_a_record_checkpoints_and_a_model(folder: Path, tmp_path: Path) -> None:
    config = small_config(folder, tmp_path / "run", run__checkpoint_every=2)
    result = run.train(config, reward=even_sum)
    assert (result.outcome, result.version) == ("done", 4)
    assert {p.name for p in result.run_dir.glob("checkpoints/version-*")} == {
        "version-000002",
        "version-000004",
    }
    with Record.open(result.run_dir, read_only=True) as record:
        assert list(versions(record)) == [0, 1, 2, 3, 4]
        assert [len(record.trained_groups(v)) for v in range(4)] == [2, 2, 2, 2]
        assert not record.live_groups()
        names = {row.name for row in record.metrics()}
    assert {"reward/mean", "staleness/max", "time/step_s", "eval/greedy_pass_rate"} <= names


def test_the_saved_folder_gives_transformers_the_same_logits(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from twofold.model.attention import Rows

    result = run.train(small_config(folder, tmp_path / "run"), reward=even_sum)
    saved = result.run_dir / "model"
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    ours = weights.load_model(saved, torch.float32)
    assert checkpoint.weights_checksum(ours) == checksum(result.run_dir, 4)
    ids = torch.arange(5, 25)
    logits = ours(ids, Rows.whole([len(ids)])) @ ours.head_weight.T
    torch.testing.assert_close(logits, theirs(ids[None]).logits[0])


def plain_synchronous_loop(config: Config, folder: Path) -> str:
    """Generate a batch, reward it, train it, again: the definition of S = 0. -> checksum"""
    model = weights.load_model(folder, getattr(torch, config.model.dtype))
    tokenizer = weights.load_tokenizer(folder)
    source = PromptSource(load_task(config.task).train, seed=config.run.seed)
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_ids=weights.stop_ids(folder),
    )
    trainer = Trainer(
        model,
        config.train,
        config.rollout.temperature,
        max_staleness=0,
        total_steps=config.train.steps,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    n_groups = config.sched.groups_per_step
    for version in range(config.train.steps):
        groups = []
        for group_id in range(version * n_groups, (version + 1) * n_groups):
            prompt = source.prompt(group_id)
            samples = [Sample(SampleId(group_id, i)) for i in range(config.rollout.group_size)]
            ids = encode_prompt(prompt, tokenizer)
            groups.append(Group(group_id, prompt, ids, version, version, samples))
        generator = Generator(
            model,
            sampling,
            seed=config.run.seed,
            stream="train",
            max_running_samples=64,
            kv_cache_tokens=0,
            kv_block_tokens=16,
        )
        generator.version = version
        generator.admit(groups)
        while generator.unfinished:
            generator.run(max_decode_steps=1000)
        for sample in (sample for group in groups for sample in group.samples):
            [sample.reward] = even_sum(None, None, [sample.token_ids])
        trainer.train(groups, version)
    return checkpoint.weights_checksum(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_staleness_0_is_the_plain_synchronous_loop_bit_for_bit(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    config = small_config(
        folder,
        tmp_path / "run",
        sched__max_staleness=0,
        model__dtype=dtype,
        run__deterministic=False,
    )
    plain = plain_synchronous_loop(copy.deepcopy(config), folder)
    result = run.train(config, reward=even_sum)
    assert checksum(result.run_dir, 4) == plain
    assert checksum(result.run_dir, 4) != checksum(result.run_dir, 0)


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_staler_than_the_threshold_and_nothing_is_dropped_for_age(
    folder: Path, tmp_path: Path, staleness: int
) -> None:
    config = small_config(
        folder,
        tmp_path / "run",
        sched__max_staleness=staleness,
        train__steps=8,
        run__deterministic=False,
    )
    result = run.train(config, reward=even_sum)
    seen = 0
    with Record.open(result.run_dir, read_only=True) as record:
        for version in range(8):
            for group in record.trained_groups(version):
                assert version - min(v for s in group.samples for v in s.versions) <= staleness
                seen = max(seen, version - min(v for s in group.samples for v in s.versions))
        reasons = list(record.query("SELECT drop_reason FROM groups WHERE status = 'dropped'"))
    assert seen > 0, "nothing was stale, so the bound was not tested"
    assert reasons == []


def test_failed_samples_are_left_out_and_hopeless_groups_replaced(
    folder: Path, tmp_path: Path
) -> None:
    config = small_config(folder, tmp_path / "run", rollout__group_size=3)
    result = run.train(config, reward=some_fail)
    assert result.outcome == "done"
    with Record.open(result.run_dir, read_only=True) as record:
        trained = [group for v in range(4) for group in record.trained_groups(v)]
        dropped = list(record.query("SELECT drop_reason FROM groups WHERE status = 'dropped'"))
        samples = [s for group in trained for s in group.samples]
    assert any(s.failed for s in samples) and dropped, "the reward never failed"
    assert all("reward" in reason for (reason,) in dropped)
    assert all(s.advantage is None for s in samples if s.failed)
    assert len(trained) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_learning_rate_0_keeps_the_ratio_at_1(
    folder: Path, tmp_path: Path, temperature: float, dtype: str
) -> None:
    """20 steps: behaviour log-probs equal the training forward's, of fresh and of stale tokens, and
    do not drift. Bit for bit with the compiled kernels, whose rows do not depend on the batch."""
    config = small_config(
        folder,
        tmp_path / "run",
        model__dtype=dtype,
        train__steps=20,
        train__learning_rate=0.0,
        rollout__temperature=temperature,
        task__held_out=0,
    )
    result = run.train(config, reward=even_sum)
    with Record.open(result.run_dir, read_only=True) as record:
        values = {
            name: [row.value for row in record.metrics(name)]
            for name in ("logprob_gap/max", "ratio/min", "ratio/max", "staleness/mean")
        }
        weights_seen = set(versions(record).values())
    gap, low, high = (
        max(values["logprob_gap/max"]),
        1 - min(values["ratio/min"]),
        max(values["ratio/max"]) - 1,
    )
    print(f"largest gap {gap:.2e}, ratio from 1 - {low:.2e} to 1 + {high:.2e}")
    assert len(weights_seen) == 1
    assert len(values["ratio/min"]) >= 15, "too few steps had something to train"
    assert sum(0 < mean < 1 for mean in values["staleness/mean"]) >= 10, "fresh and stale in a step"
    assert len(values["logprob_gap/max"]) >= 10
    exact = attention.kernel_name() == "cpu kernel"
    limit = 0.0 if exact else {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert max(gap, low, high) <= limit


def test_generation_and_training_share_their_storage(folder: Path, tmp_path: Path) -> None:
    """RL Fusion: the parameters that the trainer changes are those that generation reads, before
    and after an update, and a switch moves no weight."""
    config = small_config(folder, tmp_path / "run", model__dtype="bfloat16")
    with (
        run._opened(config, tmp_path / "run", even_sum, None) as parts,
        Record.create(tmp_path / "run", {}) as record,
    ):
        worker = parts.worker
        before = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
        assert worker.generator._model is worker.model is worker.trainer._model
        assert parts.start(record).outcome == "done"
        changed = record.checksum(0) != record.checksum(4)
        assert changed
        assert {name: p.data_ptr() for name, p in worker.model.named_parameters()} == before


def test_kept_caches_go_on_across_an_update(folder: Path, tmp_path: Path) -> None:
    """kv_after_update = "keep": paused samples mix versions without being prefilled again; the
    result differs from "recompute", where a paused sample's keys are those of the new weights."""
    tokens = {}
    for kept in ("keep", "recompute"):
        config = small_config(
            folder,
            tmp_path / kept,
            rollout__kv_after_update=kept,
            sched__max_staleness=3,
            train__steps=8,
            train__learning_rate=0.03,
        )
        assert run.train(config, reward=even_sum).outcome == "done"
        with Record.open(tmp_path / kept, read_only=True) as record:
            groups = [group for v in range(8) for group in record.trained_groups(v)]
        samples = [sample for group in groups for sample in group.samples]
        assert any(len(set(sample.versions)) > 1 for sample in samples), "nothing was paused"
        tokens[kept] = [sample.token_ids for sample in samples]
    assert tokens["keep"] != tokens["recompute"]


def test_a_reference_model_bounds_the_step(folder: Path, tmp_path: Path) -> None:
    """With a KL term the reference scores every batch: 0 in the first step, then above."""
    config = small_config(folder, tmp_path / "run", train__kl_coef=0.1, sched__max_staleness=0)
    run.train(config, reward=even_sum)
    with Record.open(tmp_path / "run", read_only=True) as record:
        kl = [row.value for row in record.metrics("kl")]
        phases = {row.command.kind for row in record.commands()}
    assert "Score" in phases
    assert kl[0] == 0.0 and all(value > 0 for value in kl[1:])
