"""A whole run, simulated: the options of a real one in, a record out.

Owns: putting scheduler, simulated executor and record together, and what is said about the result.
Does not own: costs and work (`calibrate`, `workload`), the loop (`runtime.loop`). For one card, as
`runtime.run` is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
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
from twofold.sim.ranking import Progress
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


def run(
    config: Config, costs: Costs, work: Work, folder: Path, progress: Progress | None = None
) -> SimResult:
    """Simulates a run with these options into `folder`, which gets the record of a real one without
    prompts and tokens. `progress` is told of every step. ValueError when the folder holds a run
    already or cannot be written, or no step was finished; then, or interrupted, it leaves none."""
    _check_folder(folder)
    spec = scheduler_spec(config)
    executor = SimExecutor(work, spec, costs=costs, seed=config.run.seed, with_rows=True)
    meta = {
        "config": to_dict(config),
        "reward": "",
        "data": "",
        "fingerprint": {"twofold": __version__, "device": "simulated"},
    }
    record = Record.create(folder, meta)
    try:
        with record:
            recorder = _Recorder(record, progress, spec.steps)
            outcome = drive(Scheduler(spec), executor, recorder, ev.RunStarted())
            history = [(time_s, event) for _, time_s, event in record.events()]
        if not executor.staleness:
            raise ValueError(
                f"the simulated run ended before its first step ({outcome}): change the workload "
                "or the options, so that there is a batch to train"
            )
    except BaseException:
        _remove(folder)
        raise
    return SimResult(outcome, measure(history, executor.staleness, f"the run ({outcome})"))


def _check_folder(folder: Path) -> None:
    """ValueError, one line, when no new run can be written there."""
    try:
        if (folder / "record.sqlite").exists():
            raise ValueError(f"{folder} already holds a run: name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK) else "Permission denied"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise ValueError(
            f"--out {folder} cannot be written ({why}): name a new folder, below one that you may "
            "write to"
        )


def _remove(folder: Path) -> None:
    """The record of a simulation that came to nothing, and the folder if nothing else is in it."""
    for name in ("record.sqlite", "record.sqlite-wal", "record.sqlite-shm", "lock"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class _Recorder:
    """The record, to whose first event belongs that the model which the run begins with exists."""

    def __init__(self, record: Record, progress: Progress | None, n_steps: int) -> None:
        self._record, self._progress, self._n_steps = record, progress, n_steps
        self._n_made = 0

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        first = [VersionRow(0, CHECKSUM)] if isinstance(event, ev.RunStarted) else []
        self._record.commit(now_s, event, commands, [*first, *rows])
        if isinstance(event, ev.Published) and self._progress is not None:
            self._n_made += 1
            self._progress(self._n_made, self._n_steps)


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
