"""What the scheduler needs to know of the options.

Owns: `SchedulerSpec` from a `Config`. Does not own: either of them. Importable without torch, so
that a record can be read, and a run simulated, with the options it has.
"""

from __future__ import annotations

from twofold.config import Config
from twofold.sched.spec import SchedulerSpec


def scheduler_spec(config: Config) -> SchedulerSpec:
    """Of a run on one card. ValueError as `SchedulerSpec` raises it."""
    return SchedulerSpec(
        steps=config.train.steps,
        groups_per_step=config.sched.groups_per_step,
        group_size=config.rollout.group_size,
        max_staleness=config.sched.max_staleness,
        max_running_samples=config.rollout.max_running_samples,
        quantum_decode_steps=config.rollout.quantum_decode_steps,
        max_drops_per_step=config.sched.max_drops_per_step,
        updates_per_batch=config.train.updates_per_batch,
        dynamic_sampling=config.sched.dynamic_sampling,
        needs_reference=config.train.kl_coef > 0,
        evaluate=config.task.held_out > 0,
        eval_every=config.run.eval_every,
        checkpoint_every=config.run.checkpoint_every,
    )
