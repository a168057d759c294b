"""Losses and gradients equal TRL's on fixed tensors.

TRL holds what TRL 1.13.0 (torch 2.13.0, CPU) gave: its GRPOTrainer._compute_loss and, for
rloo, RLOOTrainer._compute_loss, were run with a stub in place of the model that returned L, padded
to 4 x 4, and autograd's gradient of the loss by L was taken; the importance weights are those of
GRPOTrainer._generate_and_score_completions for the four `vllm_importance_sampling_mode`s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twofold.config import TrainConfig
from twofold.step.loss import DENOMINATORS, Columns, Totals, policy_losses

LENGTHS = [3, 1, 4, 2]  # of four samples
L = [-0.5, -1.2, -0.3, -2.0, -0.7, -0.1, -1.5, -0.9, -0.4, -1.1]  # current log-probs
B = [-0.9, -1.1, -0.3, -1.6, -1.2, -0.6, -1.4, -0.2, -0.5, -1.3]  # behaviour
P = [-0.7, -1.3, -0.2, -1.9, -0.8, -0.5, -1.3, -0.6, -0.4, -1.0]  # proximal
Q = [-0.6, -1.0, -0.9, -1.7, -0.7, -0.3, -1.2, -1.1, -0.8, -0.9]  # reference
ADVANTAGES = [1.2, -0.8, 0.5, -1.1]
MAX_NEW_TOKENS = 5
OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 1.4, "importance_floor": 0.6}
KL_COEF = 0.25
MASKED = 2  # the sample that is truncated in "masked"

# name: loss, then the gradient of each token
TRL = """
grpo: .034376
  0 -.090484 -.1 0 0 0 -.028276 -.015518 .151961 .167943
grpo k3: .04537
  .001983 -.095096 -.0906 -.021866 0 .002832 -.033743 -.012686 .162264 .161024
grpo k3_unbiased: .044697
  .003108 -.094254 -.0875 -.012568 0 .005152 -.032518 -.013966 .165776 .160309
dr_grpo: -.132364
  0 -.05429 -.06 0 0 0 -.022621 -.012415 .060784 .067177
dapo: -.264728
  0 -.10858 -.12 0 0 0 -.045242 -.024829 .121569 .134354
dapo k3: -.25463
  .002379 -.114116 -.10872 -.008746 0 .004532 -.053988 -.020298 .129811 .128819
cispo: .082837
  -.156 -.10858 -.12 .053626 -.065 -.065 -.045242 -.024829 .121569 .134354
gspo: .016544
  -.110517 -.110517 -.110517 0 -.032852 -.032852 -.032852 -.032852 .159752 .159752
rloo: -.011464
  0 0 0 0 -.152675 -.152675 -.152675 -.152675 .371211 .371211
grpo masked: .15942
  0 -.090484 -.1 0 0 0 0 0 .151961 .167943
dr_grpo masked: -.032329
  0 -.05429 -.06 0 0 0 0 0 .060784 .067177
dapo masked: -.107762
  0 -.180967 -.2 0 0 0 0 0 .202615 .223924
grpo token_truncated: -.022742
  -.149182 -.090484 -.1 .134064 -.048351 0 -.028276 -.015518 .151961 .167943
dapo token_truncated: -.31732
  -.179019 -.10858 -.12 .053626 -.077362 0 -.045242 -.024829 .121569 .134354
grpo token_masked: .02561
  -.149182 -.090484 -.1 .134064 0 0 -.028276 -.015518 .151961 .167943
dapo token_masked: -.239958
  -.179019 -.10858 -.12 .053626 0 0 -.045242 -.024829 .121569 .134354
grpo sequence_truncated: -.00771
  -.134986 -.12214 -.1 .134064 -.042183 0 -.03125 -.028276 .1925 .174181
dapo sequence_truncated: -.323707
  -.161983 -.146568 -.12 .053626 -.067493 0 -.05 -.045242 .154 .139345
grpo sequence_masked: -.374391
  -.134986 -.12214 -.1 .134064 -.042183 0 -.03125 -.028276 0 0
dapo sequence_masked: -.617052
  -.161983 -.146568 -.12 .053626 -.067493 0 -.05 -.045242 0 0
gspo token_truncated: -.014817
  -.112071 -.112071 -.112071 .134064 -.033443 -.033443 -.033443 -.033443 .160552 .160552
"""


def read_table() -> dict[str, tuple[float, list[float]]]:
    lines = iter(TRL.strip().splitlines())
    table = {}
    for head, gradient in zip(lines, lines, strict=True):
        name, _, loss = head.partition(": ")
        table[name] = (float(loss), [float(number) for number in gradient.split()])
    return table


EXPECTED = read_table()


def ours(name: str) -> tuple[float, list[float]]:
    loss, *changes = name.split()
    masked = changes == ["masked"]
    options: dict[str, Any] = {"loss": loss, **OPTIONS}
    with_kl = corrected = False
    for change in changes:
        if change.startswith("k3"):
            with_kl, options["kl_coef"], options["kl_estimator"] = True, KL_COEF, change
        elif change != "masked":
            corrected, options["correction"] = True, change
    counted = [n for i, n in enumerate(LENGTHS) if not (masked and i == MASKED)]
    totals = Totals(len(LENGTHS), sum(counted), MAX_NEW_TOKENS)
    by_sample = [
        0.0 if masked and i == MASKED else DENOMINATORS[loss](totals, n)
        for i, n in enumerate(LENGTHS)
    ]
    lengths = torch.tensor(LENGTHS)
    columns = Columns(
        lengths=lengths,
        behaviour=torch.tensor(B),
        advantages=torch.tensor(ADVANTAGES).repeat_interleave(lengths),
        weights=torch.tensor(by_sample).repeat_interleave(lengths),
        proximal=torch.tensor(P) if corrected else None,
        ref_logprobs=torch.tensor(Q) if with_kl else None,
    )
    logprobs = torch.tensor(L, requires_grad=True)
    losses, _ = policy_losses(logprobs, columns, TrainConfig(**options))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.sum().item(), gradient.tolist()


@pytest.mark.parametrize("name", EXPECTED)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    loss, gradient = ours(name)
    expected_loss, expected_gradient = EXPECTED[name]
    assert loss == pytest.approx(expected_loss, abs=2e-6)
    assert gradient == pytest.approx(expected_gradient, abs=2e-6)


def test_the_numbers_tell_the_losses_apart() -> None:
    assert len({loss for loss, _ in EXPECTED.values()}) == len(EXPECTED)
