"""Options of the losses that do not go together are refused in one line that names one of them."""

from __future__ import annotations

import pytest

from twofold.config import load_config
from twofold.runtime.run import scheduler_spec


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("train.loss=dr_grpo rollout.group_size=1", "train.loss=reinforce_pp rollout.group_size=1"),
        ("train.loss=rloo rollout.group_size=1", "train.loss=ppo rollout.group_size=1"),
        ("train.updates_per_batch=4 sched.max_staleness=2", "train.updates_per_batch=4 "
         "sched.max_staleness=3"),
        ("train.updates_per_batch=3 sched.max_staleness=2", "train.updates_per_batch=3 "
         "sched.max_staleness=2 sched.groups_per_step=9"),
        ("train.epochs=2", "train.epochs=2 train.updates_per_batch=2"),
        ("train.updates_per_batch=6 train.epochs=2 sched.max_staleness=5",
         "train.updates_per_batch=6 train.epochs=3 sched.max_staleness=5"),
        ("train.kl_in_reward=true", "train.kl_in_reward=true train.kl_estimator=k1"),
        ("train.overlong_buffer_tokens=65", "train.overlong_buffer_tokens=64"),
        ("train.importance_floor=2", "train.importance_floor=0.5"),
        ("sched.dynamic_sampling=true train.loss=ppo", "sched.dynamic_sampling=true "
         "train.loss=dapo"),
        ("sched.dynamic_sampling=true train.loss=reinforce_pp", "sched.dynamic_sampling=true "
         "train.loss=reinforce_pp_baseline"),
        ("train.gae_lambda=1.1", "train.gae_lambda=1"),
        ("train.gamma=0", "train.gamma=0.9"),
        ("train.loss=grpp", "train.loss=grpo"),
        ("train.correction=truncated", "train.correction=token_truncated"),
    ],
)  # fmt: skip
def test_refused_in_one_line(bad: str, good: str) -> None:
    load_config(None, [f"--{option}" for option in good.split()])
    with pytest.raises(ValueError) as caught:
        load_config(None, [f"--{option}" for option in bad.split()])
    text = str(caught.value)
    named = {option.partition("=")[0] for option in bad.split()} | {"rollout.group_size"}
    assert text.partition(" = ")[0] in named, text
    assert "\n" not in text


def test_the_scheduler_gets_them() -> None:
    options = ["--train.updates_per_batch=2", "--sched.dynamic_sampling=true"]
    spec = scheduler_spec(load_config(None, options))
    assert (spec.updates_per_batch, spec.dynamic_sampling, spec.batches_ahead) == (2, True, 0)
