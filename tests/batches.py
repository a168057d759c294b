"""Batches that are ready to train, a trainer for them, and what to compare afterwards.

Groups of random completions for a tiny model, with the log-probs and versions a generator would
have recorded.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from tests.tiny import VOCAB
from torch import Tensor

from twofold.config import TrainConfig
from twofold.model.attention import Rows
from twofold.model.transformer import Transformer
from twofold.step.train import Trainer
from twofold.types import Group, Prompt, Sample, SampleId

SEED = 17
TEMPERATURE = 0.8
VERSION = 3
MAX_NEW_TOKENS = 9
REWARDS = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, None, 1.0]]


def plain_logprobs(model: Transformer, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    """Log-probs of a completion by a forward pass over the sample alone."""
    ids = prompt_ids + token_ids
    hidden = model(torch.tensor(ids, device=model.device), Rows.whole([len(ids)], model.device))
    logits = F.linear(hidden, model.head_weight).float() / TEMPERATURE
    distribution = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    return distribution[torch.arange(len(token_ids)), token_ids]


@torch.no_grad()
def make_batch(
    model: Transformer, rewards: list[list[float | None]] = REWARDS, *, noise: float = 0.0
) -> list[Group]:
    """Random completions of 1 to 9 tokens. Behaviour log-probs are the model's, and `noise` away
    for tokens of older versions (with noise 0 all are of VERSION)."""
    print("seed", SEED)
    rng = random.Random(SEED)
    groups = []
    for group_id, group_rewards in enumerate(rewards):
        prompt_ids = [rng.randrange(VOCAB) for _ in range(rng.randint(4, 9))]
        samples = []
        for index, reward in enumerate(group_rewards):
            ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            versions = [VERSION if not noise else VERSION - rng.randint(0, 1) for _ in ids]
            logprobs = [
                logprob + rng.gauss(0, noise) * (VERSION - version)
                for logprob, version in zip(
                    plain_logprobs(model, prompt_ids, ids).tolist(), versions, strict=True
                )
            ]
            failed = "reward timed out" if reward is None else None
            samples.append(
                Sample(SampleId(group_id, index), ids, logprobs, [0.0] * len(ids), versions, "stop")
            )
            samples[-1].reward, samples[-1].failed = reward, failed
        groups.append(Group(group_id, Prompt(""), prompt_ids, VERSION - 1, VERSION, samples))
    return groups


def make_trainer(model: Transformer, max_staleness: int = 1, **options: Any) -> Trainer:
    """Without clipping of the norm, so that gradients are seen as they are."""
    options = {"max_grad_norm": 0.0, "learning_rate": 1e-2} | options
    return Trainer(
        model,
        TrainConfig(**options),
        TEMPERATURE,
        max_staleness,
        total_steps=10,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
