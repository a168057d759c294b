"""What the scheduler must know of a run.

Owns: these numbers and what of them cannot work. Does not own: the options of a run (`config`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twofold.sched.placement import Placement


@dataclass(frozen=True)
class SchedulerSpec:
    """Raises ValueError for what cannot work."""

    steps: int
    groups_per_step: int  # P
    group_size: int  # G
    max_staleness: int  # S
    max_running_samples: int  # slots per replica
    quantum_decode_steps: int = 16
    max_drops_per_step: int = 32
    updates_per_batch: int = 1  # U
    dynamic_sampling: bool = False  # groups whose rewards are all equal are dropped
    needs_reference: bool = False
    evaluate: bool = False
    eval_every: int = 0  # steps; 0: before the first and after the last only
    checkpoint_every: int = 0  # steps; 0: after the last only
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        least = {"steps": 0, "groups_per_step": 1, "group_size": 1, "max_running_samples": 1,
                 "quantum_decode_steps": 1, "max_staleness": 0, "max_drops_per_step": 0,
                 "updates_per_batch": 1,
                 "eval_every": 0, "checkpoint_every": 0}  # fmt: skip
        for name, low in least.items():
            value = vars(self)[name]
            if value < low:
                raise ValueError(f"{name} is {value}: it must be at least {low}")
        if self.batches_ahead < 0:
            raise ValueError(
                f"updates_per_batch is {self.updates_per_batch}: with max_staleness "
                f"{self.max_staleness} it may be {self.max_staleness + 1} at most"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError("dynamic_sampling compares the samples of a group: give 2 or more")
        if self.placement.score_only and not self.needs_reference:
            raise ValueError(
                f"score_only is {self.placement.score_only}: there is no reference model to hold; "
                "make it 0"
            )

    @property
    def batches_ahead(self) -> int:
        """S': how many batches late a group may be trained. The last of a batch's U updates finds
        weights U - 1 versions newer than the first, and is within S too: (S' + 1) U - 1 <= S."""
        return (self.max_staleness + 1) // self.updates_per_batch - 1

    @property
    def scores_in_step(self) -> bool:
        """The cards that train score a batch before they train it."""
        return self.needs_reference and not self.placement.score_only
