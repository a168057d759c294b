"""The update: right gradients however it is cut, weights in place, nothing stale or broken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.batches import (
    SEED,
    VERSION,
    assert_equal,
    gradients,
    make_batch,
    make_trainer,
    plain_logprobs,
    weights,
)
from tests.tiny import VOCAB, tiny_model
from torch import Tensor

from twofold.config import TrainConfig
from twofold.model.transformer import Transformer
from twofold.step.optimizer import lr_at
from twofold.step.pack import plan_packs
from twofold.types import Group

KL = 0.3


def plain_gradients(
    model: Transformer, reference: Transformer, groups: list[Group], correction: str, kl_coef: float
) -> dict[str, Tensor]:
    """The step as the formula says it: one forward pass per sample, nothing shared or skipped."""
    valid = [(g, s) for g in groups for s in g.samples if s.reward is not None]
    loss = torch.zeros(())
    for group, sample in valid:
        rewards = torch.tensor([s.reward for s in group.samples if s.reward is not None])
        advantage = (sample.reward - rewards.mean()) / (rewards.std() + 1e-6)
        new = plain_logprobs(model, group.prompt_ids, sample.token_ids)
        with torch.no_grad():
            ref = plain_logprobs(reference, group.prompt_ids, sample.token_ids)
        behaviour = torch.tensor(sample.logprobs)
        if correction == "none":
            ratio, importance = torch.exp(new - behaviour), 1.0
        else:
            ratio = torch.exp(new - new.detach())
            importance = torch.exp(new.detach() - behaviour).clamp(max=2.0)
        objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = torch.exp(ref - new) - (ref - new) - 1
        loss = loss + (kl_coef * kl - importance * objective).mean() / len(valid)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, KL])
@pytest.mark.parametrize("correction", ["none", "token_truncated"])
def test_gradients_equal_the_plain_step_for_any_micro_batch(
    correction: str, kl_coef: float, tied: bool
) -> None:
    model = tiny_model(SEED, tied_embeddings=tied)
    reference = tiny_model(SEED, tied_embeddings=tied)
    with torch.no_grad():
        reference.layers[0].qkv *= 1.3
        if not tied:  # a residual stream of unit size keeps the rounding well below 1e-6
            model.embedding *= 4
            reference.embedding *= 4
    groups = make_batch(model, noise=0.5)
    expected = plain_gradients(model, reference, groups, correction, kl_coef)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    n_packs = set()
    for micro_batch_tokens in (10_000, 60, 40, 10):
        trainer = make_trainer(
            model,
            learning_rate=0.0,
            micro_batch_tokens=micro_batch_tokens,
            correction=correction,
            kl_coef=kl_coef,
        )
        if kl_coef:
            trainer.score(reference, groups)
        metrics = trainer.train(groups, VERSION)
        assert metrics["clip_fraction"] > 0
        assert metrics.get("kl", 1.0) > 0
        for name, grad in gradients(model).items():
            assert (grad - expected[name]).abs().max() <= 1e-6 * largest, name
        keep = trainer._is_trained(trainer._prepare(groups))
        n_packs.add(len(plan_packs(groups, micro_batch_tokens, keep)))
    assert {1, 2} < n_packs and max(n_packs) >= 4


def test_fresh_tokens_have_ratio_one_and_no_gap() -> None:
    model = tiny_model(SEED)
    metrics = make_trainer(model, max_staleness=0).train(make_batch(model), VERSION)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["logprob_gap/max"] < 1e-5
    assert metrics["clip_fraction"] == 0
    assert metrics["staleness/max"] == 0


def test_policy_equal_to_its_reference_has_no_kl() -> None:
    model = tiny_model(SEED)
    groups = make_batch(model)
    trainer = make_trainer(model, kl_coef=KL)
    trainer.score(copy.deepcopy(model), groups)
    assert groups[2].samples[2].ref_logprobs is None, "the failed sample is not scored"
    assert trainer.train(groups, VERSION)["kl"] == 0.0


def test_metrics_of_a_batch() -> None:
    model = tiny_model(SEED)
    groups = make_batch(model, noise=0.5)
    groups[0].samples[0].finish_reason = "length"
    trained = [s for g in (groups[0], groups[2]) for s in g.samples if s.reward is not None]
    valid = trained + groups[1].samples
    metrics = make_trainer(model).train(groups, VERSION)
    n_tokens = sum(len(s.token_ids) for s in trained)
    assert metrics["tokens/trained"] == n_tokens
    prompts = len(groups[0].prompt_ids) + len(groups[2].prompt_ids)
    assert metrics["rows/trained"] == prompts + n_tokens - len(trained)
    assert metrics["samples/failed"] == 1
    assert metrics["groups/no_variance"] == 1
    assert metrics["pass_rate"] == 7 / 11
    assert metrics["reward/mean"] == 7.5 / 11
    assert metrics["length/truncated"] == 1 / 11
    assert metrics["length/max"] == max(len(s.token_ids) for s in valid)
    assert metrics["staleness/max"] == 1
    assert 0 < metrics["staleness/mean"] < 1
    assert 0 < metrics["entropy"] <= torch.tensor(VOCAB).log()
    assert metrics["logprob_gap/max"] < 1e-5, "only tokens of the version being trained count"
    assert "kl" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())


def test_equal_rewards_of_any_size_have_a_mean() -> None:
    model = tiny_model(SEED)
    metrics = make_trainer(model).train(make_batch(model, [[1e308] * 4]), VERSION)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (1e308, 0.0)


def test_groups_without_variance_leave_everything_but_the_schedule() -> None:
    model = tiny_model(SEED)
    trainer = make_trainer(model, weight_decay=0.1, schedule="linear")
    trainer.train(make_batch(model), VERSION)  # so that there is momentum to leave alone
    groups = make_batch(model, [[1.0] * 4, [0.0, None, 0.0, 0.0], [None, None]])
    before = weights(model)
    metrics = trainer.train(groups, VERSION + 1)
    assert make_trainer(model).train(groups[2:], VERSION)["samples/failed"] == 2
    assert_equal(weights(model), before)
    assert trainer.state_tensors()["step"] == 1
    assert metrics["grad_norm"] == metrics["loss"] == metrics["tokens/trained"] == 0
    assert metrics["groups/no_variance"] == 3
    assert metrics["learning_rate"] == lr_at(VERSION + 1, trainer._config, 10)
    assert all(value == value for value in metrics.values()), "no NaN"
    for group in groups:
        assert all(s.advantage == (0.0 if s.valid else None) for s in group.samples)


def test_failed_samples_change_nothing() -> None:
    results = []
    for rewards in ([[1.0, 0.0, 0.5, None]], [[1.0, 0.0, 0.5]]):
        model = tiny_model(SEED)
        make_trainer(model).train(make_batch(model, rewards), VERSION)
        results.append(weights(model))
    assert_equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_rate_zero_leaves_weights_bit_identical(dtype: torch.dtype) -> None:
    model = tiny_model(SEED, dtype)
    before = weights(model)
    trainer = make_trainer(model, learning_rate=0.0, weight_decay=0.1)
    for _ in range(3):
        assert trainer.train(make_batch(model), VERSION)["grad_norm"] > 0
    assert_equal(weights(model), before)


def test_bfloat16_model_is_updated_in_place_from_float32_masters() -> None:
    model = tiny_model(SEED, torch.bfloat16)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    before = weights(model)
    trainer = make_trainer(model, learning_rate=1e-6)
    masters = {n: trainer.state_tensors()[f"master.{n}"].clone() for n in before}
    trainer.train(make_batch(model), VERSION)
    state = trainer.state_tensors()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    for name, parameter in model.named_parameters():
        master = state[f"master.{name}"]
        assert master.dtype == torch.float32
        assert not torch.equal(master, masters[name]), "an update below bfloat16's grain is kept"
        assert torch.equal(parameter, master.bfloat16())
        assert parameter.grad is None, "gradients live in float32"


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """The gradient of two micro-batches is the float32 sum of the two bfloat16 gradients."""

    def master_gradients(groups: list[Group], max_rows: int = 99) -> dict[str, Tensor]:
        model = tiny_model(SEED, torch.bfloat16)
        trainer = make_trainer(model, learning_rate=0.0, micro_batch_tokens=max_rows)
        trainer.train(groups, VERSION)
        return {name: master.grad for name, master in trainer.optimizer.masters.items()}

    batch = make_batch(tiny_model(SEED, torch.bfloat16), [[1.0, 0.0], [1.0, 0.0]])
    assert len(plan_packs(batch, 20, lambda s: True)) == len(batch) == 2
    first, second = master_gradients(batch[:1]), master_gradients(batch[1:])
    for name, grad in master_gradients(batch, 20).items():
        total = (first[name] + second[name]) / 2  # the mean is over four samples, not over two
        assert torch.equal(grad, total), name
        assert not torch.equal(grad, grad.bfloat16().float()), name


def test_gradient_is_clipped_to_the_norm() -> None:
    model = tiny_model(SEED)
    batch = make_batch(model)
    norm = make_trainer(model, learning_rate=0.0).train(batch, VERSION)["grad_norm"]
    whole = gradients(model)
    for limit in (norm / 3, norm * 2):
        trainer = make_trainer(model, learning_rate=0.0, max_grad_norm=limit)
        assert trainer.train(batch, VERSION)["grad_norm"] == pytest.approx(norm)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, whole[name] * min(1.0, limit / norm))


def test_norms_are_not_decayed() -> None:
    """With no gradient to speak of, what is left of a step is the decay."""
    model = tiny_model(SEED)
    before = weights(model)
    trainer = make_trainer(model, weight_decay=0.5, learning_rate=1e-2, adam_eps=1e6)
    trainer.train(make_batch(model), VERSION)
    for name, after in weights(model).items():
        decay = 1 - 0.5 * 1e-2 if after.ndim > 1 else 1.0
        torch.testing.assert_close(after, before[name] * decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_identically(dtype: torch.dtype) -> None:
    model = tiny_model(SEED, dtype)
    trainer = make_trainer(model)
    trainer.train(make_batch(model), VERSION)
    saved = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    second = make_batch(model, [[0.0, 1.0, 1.0]])
    trainer.train(second, VERSION)

    other = tiny_model(SEED + 1, dtype)
    resumed = make_trainer(other)
    resumed.load_state_tensors(saved)
    resumed.train(second, VERSION)
    assert_equal(weights(other), weights(model))
    assert_equal(resumed.state_tensors(), trainer.state_tensors())


def test_state_of_another_model_is_refused() -> None:
    state = make_trainer(tiny_model(SEED, width=16)).state_tensors()
    with pytest.raises(ValueError, match="does not fit the model"):
        make_trainer(tiny_model(SEED)).load_state_tensors(state)
    with pytest.raises(ValueError, match="does not fit the model"):
        make_trainer(tiny_model(SEED)).load_state_tensors({})


@pytest.mark.parametrize("version", [VERSION - 2, VERSION + 1])
def test_a_token_outside_the_staleness_window_is_refused(version: int) -> None:
    model = tiny_model(SEED)
    groups = make_batch(model)
    groups[2].samples[1].versions[-1] = version
    before = weights(model)
    with pytest.raises(AssertionError, match="tokens of versions"):
        make_trainer(model, max_staleness=1).train(groups, VERSION)
    assert_equal(weights(model), before)


def test_unfinished_and_unrewarded_samples_are_refused() -> None:
    model = tiny_model(SEED)
    for field, message in (("finish_reason", "is not finished"), ("reward", "has no reward")):
        groups = make_batch(model)
        setattr(groups[0].samples[3], field, None)
        with pytest.raises(AssertionError, match=message):
            make_trainer(model).train(groups, VERSION)
    with pytest.raises(AssertionError, match="has no reference log-probs"):
        make_trainer(model, kl_coef=KL).train(make_batch(model), VERSION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_loss_stops_before_the_weights_change(dtype: torch.dtype) -> None:
    model = tiny_model(SEED, dtype)
    groups = make_batch(model)
    trainer = make_trainer(model, micro_batch_tokens=30)
    before = weights(model)
    state = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    kept = groups[2].samples[0].logprobs[0]
    groups[2].samples[0].logprobs[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"version 3: .* sample \(2, 0\)"):
        trainer.train(groups, VERSION)
    assert_equal(weights(model), before)
    assert_equal(trainer.state_tensors(), state)
    groups[2].samples[0].logprobs[0] = kept
    assert trainer.train(groups, VERSION)["grad_norm"] > 0, "nothing of it is left"


def test_a_broken_gradient_stops_before_the_weights_change() -> None:
    model = tiny_model(SEED)
    trainer = make_trainer(model)
    groups, before = make_batch(model), weights(model)
    hook = model.layers[1].down.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(FloatingPointError, match=r"version 3: the gradient .* layers\.1\.down"):
        trainer.train(groups, VERSION)
    assert_equal(weights(model), before)
    hook.remove()
    assert trainer.train(groups, VERSION)["grad_norm"] > 0


def test_gradient_buffers_are_reused_and_given_back() -> None:
    model = tiny_model(SEED, torch.bfloat16)
    trainer = make_trainer(model)
    groups = make_batch(model)
    pointers = []
    for _ in range(2):
        trainer.train(groups, VERSION)
        pointers.append([m.grad.data_ptr() for m in trainer.optimizer.masters.values()])
    assert pointers[0] == pointers[1]
    trainer.release()
    assert all(master.grad is None for master in trainer.optimizer.masters.values())
    assert trainer.train(groups, VERSION)["grad_norm"] > 0


def test_learning_rate_schedule() -> None:
    def rates(schedule: Any) -> list[float]:
        config = TrainConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)
        return [lr_at(step, config, 6) for step in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_a_step_on_the_accelerator_equals_the_cpu() -> None:
    """adam_eps above the gradients' size, so that a step is about proportional to the gradient."""
    results = []
    groups = make_batch(tiny_model(SEED), noise=0.5)
    for device in ("cpu", "cuda"):
        model = tiny_model(SEED, device=device)
        pointers = [p.data_ptr() for p in model.parameters()]
        metrics = make_trainer(model, adam_eps=1e-3).train(groups, VERSION)
        assert [p.data_ptr() for p in model.parameters()] == pointers
        results.append(({n: w.cpu() for n, w in weights(model).items()}, metrics))
    (cpu_weights, cpu_metrics), (gpu_weights, gpu_metrics) = results
    for name in cpu_weights:
        torch.testing.assert_close(gpu_weights[name], cpu_weights[name], rtol=1e-4, atol=1e-4)
    assert gpu_metrics == pytest.approx(cpu_metrics, rel=1e-4, abs=1e-4)
