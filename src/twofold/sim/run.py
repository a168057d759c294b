"""A whole run, simulated: the options of a real one in, a record out.

Owns: putting scheduler, simulated executor and record together, and what is said about the result.
Does not own: costs and work (`calibrate`, `workload`), the loop (`runtime.loop`). For one card, as
`runtime.run` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twofold import __version__
from twofold import events as ev
from twofold.config import Config, to_dict
from twofold.events import Command, Event
from twofold.obs.record import Record, VersionRow
from twofold.runtime.loop import drive
from twofold.runtime.spec import scheduler_spec
from twofold.sched.scheduler import Scheduler
from twofold.sim.calibrate import Calibration
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.observe import Measured, measure
from twofold.sim.rows import CHECKSUM
from twofold.sim.workload import Synthetic, Work, Workload


class SimResult(NamedTuple):
    outcome: str
    measured: Measured

    def line(self) -> str:
        n_steps, step_s, staleness, tokens_per_s = self.measured
        return (
            f"{self.outcome}: {n_steps} steps, {step_s:.3g} s a step (mean, without evaluation), "
            f"{tokens_per_s:.4g} tokens/s, mean staleness {staleness:.3f}"
        )


def run(config: Config, costs: Costs, work: Work, folder: Path) -> SimResult:
    """Simulates a run with these options into `folder`, which gets the record of a real one without
    prompts and tokens. ValueError when it holds a run already, or no step was finished."""
    if (folder / "record.sqlite").exists():
        raise ValueError(f"{folder} already holds a run: name another folder")
    spec = scheduler_spec(config)
    executor = SimExecutor(work, spec, costs=costs, seed=config.run.seed, with_rows=True)
    meta = {
        "config": to_dict(config),
        "reward": "",
        "data": "",
        "fingerprint": {"twofold": __version__, "device": "simulated"},
    }
    with Record.create(folder, meta) as record:
        outcome = drive(Scheduler(spec), executor, _FromVersion0(record), ev.RunStarted())
        history = [(time_s, event) for _, time_s, event in record.events()]
    return SimResult(outcome, measure(history, executor.staleness, f"the run ({outcome})"))


class _FromVersion0:
    """The record, to whose first event belongs that the model which the run begins with exists."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        first = [VersionRow(0, CHECKSUM)] if isinstance(event, ev.RunStarted) else []
        self._record.commit(now_s, event, commands, [*first, *rows])


def choose_work(
    config: Config, calibration: Calibration | None, synthetic: Synthetic | None
) -> Work:
    """What there is to do: as given, else as recorded, else invented. ValueError when it does not
    fit the options."""
    size = config.rollout.group_size
    if synthetic is not None:
        if synthetic.group_size != size:
            raise ValueError(
                f"rollout.group_size = {size}, the workload's is {synthetic.group_size}: "
                "make them equal"
            )
        if (longest := synthetic.lengths.max_tokens) > config.rollout.max_new_tokens:
            raise ValueError(
                f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, the workload has "
                f"completions of up to {longest} tokens (lengths.max_tokens): make them equal"
            )
        return synthetic
    if calibration is not None:
        return calibration.work(config)
    return Workload(config.run.seed, size, config.rollout.max_new_tokens)
