"""A shared card changes phase: what leaves the device and what comes back.

Owns: who gives memory back when. Generation and training use the same weights in the same storage,
so a switch moves none of them. Does not own: which switch comes when (`sched/phase`).
"""

from __future__ import annotations

from twofold.step.generate import Generator
from twofold.step.train import Trainer
from twofold.types import Phase


def switch(
    before: Phase, after: Phase, generator: Generator, trainer: Trainer, keep_kv: bool
) -> None:
    """Leaving GENERATE pauses unfinished samples at a token. Their KV cache is given back to the
    device (`keep_kv` False: they are prefilled again under the new weights) or kept. Leaving TRAIN
    gives the gradients back."""
    if before == Phase.GENERATE:
        generator.pause(keep_kv)
        if not keep_kv:
            generator.release()
    if before == Phase.TRAIN:
        trainer.release()
