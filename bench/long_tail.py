"""Long tails in simulation: what staleness buys, and what it does not: `python bench/long_tail.py`.

Lengths are Pareto with exponent 1.2 and at most 50 times their median. Three regimes on one shared
card: empty slots cost time; slots are always full; and what a pause has to prefill again is dear.
For each S: seconds for the steps, the gain against S = 0, staleness, and the mean length of what
was trained in the middle of the run against what was started then. Everything printed is simulated,
with the costs below; the last line is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from twofold import events as ev
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.workload import GroupWork, Workload

SEED, ALPHA, MEDIAN_TOKENS, CAP = 20261207, 1.2, 40, 50
GROUPS_PER_STEP, GROUP_SIZE = 32, 8


class ParetoWorkload(Workload):
    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        least = MEDIAN_TOKENS / 2 ** (1 / ALPHA)  # so that half are longer than the median
        draws = (least * random.paretovariate(ALPHA) for _ in range(self.group_size))
        lengths = tuple(max(1, min(round(n), CAP * MEDIAN_TOKENS)) for n in draws)
        return replace(super().group(group_id), lengths=lengths)


class Lengths:
    """A recorder: the groups that were started, and trained, under each version."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []  # (version, group)
        self.trained: list[tuple[int, int]] = []

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        for command in commands:
            if isinstance(command, ev.Generate):
                self.started += [(command.version, group.group_id) for group in command.admit]
            elif isinstance(command, ev.Train):
                self.trained += [(command.version, gid) for gid in command.group_ids]


def simulate(staleness: int, slots: int, costs: Costs, steps: int) -> dict[str, float]:
    spec = SchedulerSpec(
        steps=steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_staleness=staleness,
        max_running_samples=slots,
        quantum_decode_steps=16,
    )
    workload = ParetoWorkload(seed=SEED, group_size=GROUP_SIZE, prompt_tokens=64, reward_s=0.1)
    executor, lengths = SimExecutor(workload, spec, costs=costs), Lengths()
    assert drive(Scheduler(spec), executor, lengths, ev.RunStarted()) == "done"
    assert max(executor.staleness) <= staleness
    middle = range(steps // 10, steps - steps // 10)

    def mean(groups: list[tuple[int, int]]) -> float:
        tokens = [n for v, gid in groups if v in middle for n in workload.group(gid).lengths]
        return sum(tokens) / len(tokens)

    stale = executor.staleness
    return {
        "staleness": staleness,
        "seconds": executor.now_s,
        "mean_staleness": sum(age * n for age, n in stale.items()) / stale.total(),
        "trained_over_started": mean(lengths.trained) / mean(lengths.started),
    }


REGIMES = {
    # a decode step costs the same for 1 as for 256 samples, so empty slots are lost time
    "empty slots cost": (256, Costs(decode_step_s=0.03, prefill_token_s=1e-5, train_s=20.0)),
    # few slots, full nearly always, and each token has its price: no time is left to win
    "slots full": (
        4,
        Costs(decode_step_s=0.0, decode_token_s=0.001, prefill_token_s=1e-5, train_s=2.0),
    ),
    # a prefilled token costs what a decoded one does (a CPU): each pause is paid for
    "prefill dear": (
        32,
        Costs(decode_step_s=0.001, decode_token_s=0.001, prefill_token_s=1e-3, train_s=2.0),
    ),
}


def sweep(steps: int) -> dict[str, list[dict[str, float]]]:
    return {
        name: [simulate(staleness, slots, costs, steps) for staleness in (0, 1, 2, 4)]
        for name, (slots, costs) in REGIMES.items()
    }


def main() -> None:
    steps = 200
    results = sweep(steps)
    print(f"simulated, seed {SEED}: {steps} steps of {GROUPS_PER_STEP} groups x {GROUP_SIZE}, one")
    print(f"shared card, Pareto {ALPHA} lengths, median {MEDIAN_TOKENS}, at most {CAP} medians")
    for name, rows in results.items():
        print(f"\n{name}\n  S   seconds  against S = 0  mean staleness  trained / started length")
        for row in rows:
            gain = rows[0]["seconds"] / row["seconds"] - 1
            print(
                f"  {row['staleness']:1} {row['seconds']:9.0f} {gain:+14.1%}"
                f" {row['mean_staleness']:15.2f} {row['trained_over_started']:25.4f}"
            )
    print(json.dumps({"name": "long_tail", "simulated": True, "steps": steps, **results}))


if __name__ == "__main__":
    main()
