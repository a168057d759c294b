"""What work costs in seconds: the cost model of the simulator and the planner.

Owns: the formulas (all linear in counts that are known before the work starts) and their
coefficients. Does not own: where coefficients come from (`calibrate` fits them to recorded runs,
`cluster` derives them from a machine's figures), what there is to do (`workload`), when (`sched`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Costs:
    """Seconds of one worker: the cards that generate together (a replica), or all that train.

    A quantum takes `quantum_s` + per decode step `decode_step_s` + per sampled token
    `decode_token_s` + per sampled token and token of its context `decode_context_s` + per prefilled
    token `prefill_token_s`. Everything else is affine in its tokens. ValueError when a coefficient
    is negative or not finite.
    """

    quantum_s: float = 0.0
    decode_step_s: float = 0.03
    decode_token_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_token_s: float = 0.001
    score_s: float = 0.5
    score_token_s: float = 0.0
    train_s: float = 2.0  # a batch: all its updates
    train_token_s: float = 0.0
    publish_s: float = 0.01  # the cards that train hold the new weights, ready to be sent
    fetch_s: float = 0.1  # they travel to a replica that only generates, beside what it does
    receive_s: float = 0.05  # that replica takes them into use, between two quanta
    to_generate_s: float = 0.05  # Switch to GENERATE or EVAL
    to_train_s: float = 0.05  # Switch to any other phase
    eval_s: float = 3.0
    checkpoint_s: float = 0.5
    discard_s: float = 0.001
    event_s: float = 0.0  # host work for each event: scheduler, record

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"costs.{field.name} = {value}: seconds are finite, 0 or more")

    def quantum(self, steps: int, tokens: int, context_tokens: int, prefill_tokens: int) -> float:
        """`context_tokens`: over all sampled tokens, the sum of the tokens each attends to."""
        return (
            self.quantum_s
            + steps * self.decode_step_s
            + tokens * self.decode_token_s
            + context_tokens * self.decode_context_s
            + prefill_tokens * self.prefill_token_s
        )

    def train(self, tokens: int) -> float:
        """`tokens`: of all samples of the batch that are computed, a group's prompt counted once. A
        batch of which nothing is computed needs no update."""
        return self.train_s + tokens * self.train_token_s if tokens else 0.0

    def score(self, tokens: int) -> float:
        return self.score_s + tokens * self.score_token_s
