"""Every loss in the trainer: the same gradient however it is cut, several updates from a batch."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from tests.batches import (
    MAX_NEW_TOKENS,
    SEED,
    VERSION,
    assert_equal,
    gradients,
    make_batch,
    make_trainer,
    weights,
)
from tests.tiny import tiny_model
from torch import Tensor

from twofold.config import TrainConfig
from twofold.model.transformer import Transformer
from twofold.step.advantage import group_normalised
from twofold.step.loss import DENOMINATORS, Totals
from twofold.step.optimizer import load_weights, lr_at
from twofold.step.pack import plan_packs
from twofold.step.train import Trainer, mini_batches
from twofold.types import Group

HINTS = get_type_hints(TrainConfig)
LOSSES, CORRECTIONS = get_args(HINTS["loss"]), get_args(HINTS["correction"])
ESTIMATORS = get_args(HINTS["kl_estimator"])
VARIED = [[1.0, 0.0, 0.0, 0.5], [1.0, 0.2, 1.0, 0.7], [0.0, 1.0, None, 1.0], [0.3, 0.2, 1.0, 0.0]]

OPTIONS: list[dict[str, Any]] = [
    *({"loss": loss} for loss in LOSSES),
    *({"loss": "grpo", "correction": correction} for correction in CORRECTIONS[1:]),
    *({"loss": "dapo", "kl_coef": 0.3, "kl_estimator": estimator} for estimator in ESTIMATORS),
    *(
        {"loss": loss, "kl_coef": 0.3, "kl_estimator": "k1", "kl_in_reward": True}
        for loss in ("rloo", "reinforce_pp", "ppo")
    ),
    {"loss": "dapo", "mask_truncated": True, "overlong_buffer_tokens": 4},
    {"loss": "gspo", "correction": "token_masked"},
]


def words(options: dict[str, Any]) -> str:
    return " ".join(str(value) for value in options.values())


def unit_model(device: str = "cpu") -> Transformer:
    """With a residual stream of unit size: rounding well below 1e-6."""
    model = tiny_model(SEED, device=device)
    with torch.no_grad():
        model.embedding.mul_(4)
    return model


def stale_batch(model: Transformer) -> list[Group]:
    """Half of the tokens are a version old; some samples are truncated; all have a reference."""
    groups = make_batch(model, VARIED, noise=0.5)
    for group in groups:
        group.samples[1].finish_reason = "length"
        for sample in group.samples:
            sample.ref_logprobs = [value - 0.1 for value in sample.logprobs]
    return groups


def value_head_gradients(trainer: Trainer) -> dict[str, Tensor]:
    head = trainer._value_head
    return {} if head is None else {n: p.grad.clone() for n, p in head.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=words)
def test_the_gradient_is_the_same_for_any_micro_batch(options: dict[str, Any]) -> None:
    model = unit_model()
    groups = stale_batch(model)
    found, n_packs = [], set()
    for rows in (10_000, 60, 40, 10):
        trainer = make_trainer(model, learning_rate=0.0, micro_batch_tokens=rows, **options)
        metrics = trainer.train(groups, VERSION)
        found.append(gradients(model) | value_head_gradients(trainer))
        assert metrics["tokens/trained"] > 0
        keep = trainer._is_trained(trainer._prepare(groups))
        n_packs.add(len(plan_packs(groups, rows, keep)))
    assert {1, 2} < n_packs and max(n_packs) >= 4, n_packs
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    assert largest > 0
    for other in found[1:]:
        for name, grad in other.items():
            assert (grad - found[0][name]).abs().max() <= 1e-6 * largest, name


def test_every_loss_correction_and_estimator_is_among_these() -> None:
    assert {options["loss"] for options in OPTIONS} == set(LOSSES) == set(DENOMINATORS)
    assert {options.get("correction", "none") for options in OPTIONS} == set(CORRECTIONS)
    assert {options.get("kl_estimator", "k1") for options in OPTIONS} == set(ESTIMATORS)


def test_denominators_are_of_the_whole_update() -> None:
    lengths = [2, 5, 1]
    totals = Totals(n_samples=3, n_tokens=8, max_new_tokens=10)
    total = {
        loss: sum(n * weight(totals, n) for n in lengths) for loss, weight in DENOMINATORS.items()
    }
    assert total.pop("dr_grpo") == pytest.approx(8 / 30), "a constant, whatever the lengths"
    assert list(total.values()) == pytest.approx([1.0] * len(total)), "the others are means"
    by_token = [DENOMINATORS["dapo"](totals, n) for n in lengths]
    assert by_token == [1 / 8] * 3, "long samples count for more"
    by_sample = [n * DENOMINATORS["grpo"](totals, n) for n in lengths]
    assert by_sample == pytest.approx([1 / 3] * 3), "samples count alike"


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_rewards_give_no_update(loss: str) -> None:
    """All rewards of the batch are equal. PPO's critic still learns, its policy does not."""
    model = tiny_model(SEED)
    before = weights(model)
    options = {"loss": loss, "value_coef": 0.0} | ({"gae_lambda": 1.0} if loss == "ppo" else {})
    metrics = make_trainer(model, **options).train(make_batch(model, [[1.0] * 3] * 2), VERSION)
    assert metrics["grad_norm"] == 0.0
    assert_equal(weights(model), before)


# ---------------------------------------------------------------- truncated completions


def test_masked_completions_keep_their_part_in_the_statistics_alone() -> None:
    model = tiny_model(SEED)
    rewards: list[float | None] = [1.0, 0.0, 0.25]
    groups = make_batch(model, [rewards])
    cut = groups[0].samples[0]
    cut.finish_reason = "length"
    trainer = make_trainer(model, loss="dapo", mask_truncated=True)
    metrics = trainer.train(groups, VERSION)
    kept = sum(len(sample.token_ids) for sample in groups[0].samples[1:])
    assert metrics["tokens/trained"] == kept
    assert trainer._totals(groups) == Totals(3, kept, MAX_NEW_TOKENS)
    advantages = [sample.advantage for sample in groups[0].samples]
    assert advantages == pytest.approx(group_normalised([1.0, 0.0, 0.25]))
    assert metrics["length/truncated"] == pytest.approx(1 / 3)


def test_overlong_completions_of_an_equally_rewarded_group_are_trained() -> None:
    model = tiny_model(SEED)
    groups = make_batch(model, [[1.0] * 4])
    options = {"overlong_buffer_tokens": MAX_NEW_TOKENS, "overlong_penalty": 1.0}
    metrics = make_trainer(model, **options).train(groups, VERSION)
    assert metrics["grad_norm"] > 0
    assert metrics["reward/mean"] == 1.0, "the reward that is reported is the reward"
    longest = max(groups[0].samples, key=lambda sample: len(sample.token_ids))
    assert longest.advantage is not None and longest.advantage < 0


# ---------------------------------------------------------------- several updates from a batch


def test_mini_batches_are_whole_groups_in_order() -> None:
    groups = make_batch(tiny_model(SEED), VARIED)
    ids = [[g.group_id for g in part] for part in mini_batches(groups[::-1], 4, epochs=2)]
    assert ids == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [len(part) for part in mini_batches(groups, 1, epochs=1)] == [4]
    assert [len(part) for part in mini_batches(groups, 3, epochs=3)] == [4, 4, 4]


def test_two_updates_are_two_steps_of_half_the_batch() -> None:
    """Advantages of the group alone, no correction: the halves know nothing of each other."""
    one, two = tiny_model(SEED), tiny_model(SEED)
    groups = make_batch(one, VARIED)
    together = make_trainer(one, updates_per_batch=2, warmup_steps=8)
    metrics = together.train(groups, VERSION)
    apart = make_trainer(two, max_staleness=2, warmup_steps=8)
    apart.train(groups[:2], VERSION)
    apart.train(groups[2:], VERSION + 1)
    assert_equal(weights(one), weights(two))
    assert_equal(together.state_tensors(), apart.state_tensors())
    assert metrics["staleness/max"] == 1, "the second half was a version old when it was trained"
    assert metrics["ratio/max"] > 1 + 1e-4


def test_epochs_train_every_sample_again() -> None:
    model = tiny_model(SEED)
    groups = make_batch(model, VARIED)
    trainer = make_trainer(model, updates_per_batch=4, epochs=2, max_staleness=3)
    metrics = trainer.train(groups, VERSION)
    n_tokens = sum(len(s.token_ids) for g in groups for s in g.samples if s.advantage)
    assert metrics["tokens/trained"] == 2 * n_tokens
    assert trainer.state_tensors()["step"] == 4


@pytest.mark.parametrize("correction", ["decoupled", "token_masked", "sequence_truncated"])
def test_the_proximal_policy_is_that_before_the_step(correction: str) -> None:
    """Learning rate 0: the second update finds the weights that the step began with, so its ratio
    is 1 and its gradient that of a single update. With a rate the ratio moves, the clip binds."""
    model = unit_model()
    groups = stale_batch(model)
    both: dict[str, Any] = {"correction": correction, "max_staleness": 3}
    make_trainer(model, learning_rate=0.0, **both).train(groups, VERSION)
    single = gradients(model)
    twice = {"updates_per_batch": 2, "epochs": 2}
    make_trainer(model, learning_rate=0.0, **both, **twice).train(groups, VERSION)
    assert_equal(gradients(model), single)
    still = make_trainer(model, learning_rate=0.0, clip_low=0.0, clip_high=0.0, **both, **twice)
    moving = make_trainer(model, learning_rate=0.1, clip_low=0.0, clip_high=0.0, **both, **twice)
    bound = [trainer.train(groups, VERSION)["clip_fraction"] for trainer in (still, moving)]
    assert bound[1] > bound[0] + 0.1, "the second update's ratio is against the weights before"


def test_tokens_too_old_for_the_last_update_are_refused() -> None:
    model = tiny_model(SEED)
    groups = make_batch(model, VARIED, noise=0.5)  # some tokens are a version old
    with pytest.raises(AssertionError, match="tokens of versions"):
        make_trainer(model, updates_per_batch=2, max_staleness=1).train(groups, VERSION)
    make_trainer(model, updates_per_batch=2, max_staleness=2).train(groups, VERSION)


def test_the_learning_rate_counts_updates() -> None:
    config = TrainConfig(learning_rate=1.0, schedule="linear", updates_per_batch=2)
    assert [lr_at(version, config, 2) for version in range(5)] == [1, 0.75, 0.5, 0.25, 0]


def test_an_update_is_made_at_the_rate_of_its_version() -> None:
    """Adam's first step is the learning rate, wherever there is a gradient to speak of."""
    model = tiny_model(SEED)
    before = weights(model)
    trainer = make_trainer(model, learning_rate=0.08, warmup_steps=8)
    metrics = trainer.train(make_batch(model), VERSION)
    moved = max(float((now - before[name]).abs().max()) for name, now in weights(model).items())
    assert moved == pytest.approx(0.08 * (VERSION + 1) / 8, rel=1e-3)
    assert metrics["learning_rate"] == pytest.approx(0.08 * (VERSION + 1) / 8)


# ---------------------------------------------------------------- the critic


def ppo(model: Transformer, **options: Any) -> Trainer:
    return make_trainer(model, loss="ppo", **options)


def test_the_critic_learns_what_rewards_come() -> None:
    model = tiny_model(SEED)
    trainer = ppo(model, learning_rate=1e-3, value_coef=1.0, value_clip=0.0, value_lr_factor=10.0)
    rewards: list[list[float | None]] = [[1.0] * 4, [0.0] * 4, [0.5] * 4]
    explained = [
        trainer.train(make_batch(model, rewards), VERSION)["value/explained_variance"]
        for _ in range(60)
    ]
    assert explained[0] == 0.0, "it starts at 0"
    assert explained[-1] > 0.5


def test_the_loss_of_the_critic_is_a_mean_over_tokens() -> None:
    """The head says 0 at first, so the gradient of its bias is the mean of what it lacks."""
    model = tiny_model(SEED)
    trainer = ppo(model, value_coef=0.3, learning_rate=0.0, gae_lambda=1.0)
    groups = make_batch(model)
    trainer.train(groups, VERSION)
    valid = [s for group in groups for s in group.samples if s.reward is not None]
    returns = [s.reward for s in valid for _ in s.token_ids]
    assert value_head_gradients(trainer)["bias"].item() == pytest.approx(
        -0.3 * sum(returns) / len(returns), rel=1e-5
    )


def test_the_trunk_learns_from_the_critic_too() -> None:
    model = tiny_model(SEED)
    trainer = ppo(model, value_coef=1.0)
    trainer.train(make_batch(model), VERSION)  # the head is 0 and passes nothing on at first
    groups = make_batch(model)
    alone = {}
    for coef in (0.0, 1.0):
        copy = ppo(tiny_model(SEED), value_coef=coef, learning_rate=0.0)
        copy.load_state_tensors(trainer.state_tensors())
        copy.train(groups, VERSION)
        alone[coef] = gradients(copy._model)["layers.0.down"]
    assert not torch.equal(alone[0.0], alone[1.0])


def test_the_critic_is_in_the_checkpoint() -> None:
    model = tiny_model(SEED, torch.bfloat16)
    trainer = ppo(model)
    trainer.train(make_batch(model), VERSION)
    saved = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    assert saved["master.value_head.weight"].any() and "exp_avg.value_head.bias" in saved
    other = tiny_model(SEED + 1, torch.bfloat16)
    load_weights(other, saved)  # evaluation needs the model alone
    with pytest.raises(ValueError, match="does not fit the model"):
        make_trainer(other).load_state_tensors(saved)


def test_a_resumed_critic_goes_on_bit_identically() -> None:
    model, other = tiny_model(SEED), tiny_model(SEED + 1)
    trainer, resumed = ppo(model), ppo(other)
    groups = make_batch(model)
    trainer.train(groups, VERSION)
    saved = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    trainer.train(groups, VERSION)
    resumed.load_state_tensors(saved)
    resumed.train(groups, VERSION)
    assert_equal(resumed.state_tensors(), trainer.state_tensors())


def test_the_value_head_has_its_own_learning_rate() -> None:
    model = tiny_model(SEED)
    trainer = ppo(model, learning_rate=1e-3, value_lr_factor=7.0)
    trainer.train(make_batch(model), VERSION)
    step = trainer.state_tensors()["master.value_head.bias"].abs().item()
    assert step == pytest.approx(7e-3, rel=1e-3), "Adam's first step is the learning rate"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("options", OPTIONS, ids=words)
def test_the_gradient_on_the_accelerator_equals_the_cpus(options: dict[str, Any]) -> None:
    groups = stale_batch(unit_model())
    found = []
    for device in ("cpu", "cuda"):
        model = unit_model(device)
        trainer = make_trainer(model, learning_rate=0.0, **options)
        trainer.train(groups, VERSION)
        found.append(gradients(model) | value_head_gradients(trainer))
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    for name, grad in found[1].items():
        assert (grad.cpu() - found[0][name]).abs().max() <= 1e-4 * largest, name
