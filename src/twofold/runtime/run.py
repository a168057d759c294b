"""The commands that train: a new run, and one that is resumed.

Owns: putting the parts together for one process and one card, and the run folder. Does not own: the
loop (`runtime/loop`), decisions (`sched`), the step (`step`).

RUN/  config.toml        the resolved options
      record.sqlite      everything that happened
      reward.log         what rewards printed, if they did
      checkpoints/       weights and optimizer of some versions
      tensorboard/       scalars, for TensorBoard
      model/             the trained model, a Hugging Face folder
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from twofold import __version__
from twofold.config import Config, check, from_dict, to_dict, to_toml
from twofold.events import Command, Event, Resumed, RunStarted
from twofold.model import attention, resolve, weights
from twofold.obs.progress import Progress
from twofold.obs.record import MetricRow, Record, VersionRow
from twofold.obs.tensorboard import TensorBoard
from twofold.obs.trackers import Trackers, packages
from twofold.runtime import checkpoint
from twofold.runtime.device import choose_device, with_dtype
from twofold.runtime.local import LocalExecutor, phase_name
from twofold.runtime.loop import drive
from twofold.runtime.memory import check_memory
from twofold.runtime.rewards import Rewards
from twofold.runtime.spec import scheduler_spec as scheduler_spec
from twofold.runtime.store import Store
from twofold.runtime.worker import Worker
from twofold.sched.scheduler import Scheduler
from twofold.step.reward import RewardPool
from twofold.tasks.load import Task, load_task
from twofold.tasks.rewards import RewardName, reward_names


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `outcome`: "done", "stopped: why" or "failed: why"."""

    outcome: str
    run_dir: Path
    version: int


def train(
    config: Config,
    reward: RewardName | Sequence[RewardName] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Post-trains a model as `config` says. `reward`, if given, is a function with TRL's signature,
    or several, and takes the place of `config.reward.function` or `functions`.

    Raises ValueError, with one line naming the option, before anything is written.
    """
    check(config)
    config = with_dtype(config)
    run_dir = _new_run_dir(config)
    with (
        _opened(config, run_dir, reward, progress) as parts,
        Record.create(run_dir, _meta(config, reward, parts)) as record,
        _kept(run_dir),
    ):
        (run_dir / "config.toml").write_text(to_toml(config))
        return parts.start(record)


def resume(
    run_dir: str | Path,
    reward: RewardName | Sequence[RewardName] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Takes up a run where its record ends: the newest verified checkpoint is loaded, the recorded
    batches after it are trained again, unfinished samples go on from their recorded tokens.

    Raises ValueError when there is no run, it is finished, another process has it, or the model,
    the data or the checkpoint are not those of the run.
    """
    run_dir = Path(run_dir)
    with Record.open(run_dir) as record:
        meta = record.meta()
        config = from_dict(meta["config"])
        if meta["reward"] and reward is None:
            raise ValueError(
                f"{run_dir}: its reward was the Python function {meta['reward']}; resume it with "
                f"twofold.resume({str(run_dir)!r}, reward=...)"
            )
        scheduler = Scheduler(scheduler_spec(config))
        last_s = None
        for _, last_s, event in record.events():
            scheduler.handle(event, last_s)
        exported = (run_dir / "model" / "config.json").is_file() or not config.run.save_model
        if scheduler.outcome == "done" and exported:
            raise ValueError(f"{run_dir}: the run is finished ({scheduler.steps_made} steps)")
        ended = (row.command for row in record.commands() if row.ended_by is not None)
        last_card_seq = max((command.seq for command in ended if command.cards), default=-1)
        with _opened(config, run_dir, reward, progress, last_card_seq) as parts:
            parts.check_same(meta)
            with _kept(run_dir):
                if last_s is None:  # it died before its first event
                    return parts.start(record)
                parts.redo(record, scheduler.version)
                if scheduler.outcome == "done":  # it died while the model was written
                    return parts.finish(scheduler)
                return parts.drive(scheduler, record, Resumed(epoch=record.epoch() + 1), last_s)


class _Parts:
    """The parts of one process: what `drive` needs, put together."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        pool: RewardPool,
        folder: Path,
        task: Task,
        progress: Progress,
        last_card_seq: int,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self.store = Store()
        self.rewards = Rewards(pool)
        self._folder = folder
        self._task = task
        self.worker = Worker(
            config,
            folder,
            run_dir,
            task,
            self.store,
            self.rewards.judge,
            self.rewards.stopped,
            choose_device(config),
        )
        self.executor = LocalExecutor(
            self.worker,
            self.store,
            self.rewards,
            deterministic=config.run.deterministic,
            last_card_seq=last_card_seq,
        )
        self.executor.on_quantum = progress.quantum
        self.executor.on_wait = lambda what: progress.phase(f"wait for the {what}")
        self.executor.on_command = lambda command: progress.phase(phase_name(command))

    def start(self, record: Record) -> RunResult:
        """A run from its first event on."""
        self.store.write(VersionRow(0, checkpoint.weights_checksum(self.worker.model)))
        return self.drive(Scheduler(scheduler_spec(self.config)), record, RunStarted())

    def drive(
        self, scheduler: Scheduler, record: Record, first: Event, start_s: float = 0.0
    ) -> RunResult:
        with stop_signals(self.rewards.stop, self.progress), _Watched(self, record) as watched:
            self.executor.begin(start_s)
            drive(scheduler, self.executor, watched, first, start_s)
            return self.finish(scheduler)

    def finish(self, scheduler: Scheduler) -> RunResult:
        if scheduler.outcome == "done" and self.config.run.save_model:
            weights.save_model(self.worker.model, self.run_dir / "model", self._folder)
            self.progress.message(f"model    {self.run_dir / 'model'} (a Hugging Face folder)")
        return RunResult(scheduler.outcome, self.run_dir, scheduler.version)

    def fingerprint(self) -> dict[str, Any]:
        """What bit-exactness depends on beside the options."""
        return {
            "twofold": __version__,
            "torch": torch.__version__,
            "device": str(self.worker.model.device),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "attention": attention.kernel_name(self.worker.model.device.type),
        }

    def data_digest(self) -> str:
        """sha256 of the training prompts with their columns, in order."""
        digest = hashlib.sha256()
        for prompt in self._task.train:
            digest.update(json.dumps([prompt.content, prompt.columns], sort_keys=True).encode())
        return digest.hexdigest()

    def check_same(self, meta: dict[str, Any]) -> None:
        """Refuses other data; says when machine or build are others than those of the record."""
        if meta["data"] != self.data_digest():
            raise ValueError(
                f"{self.run_dir}: the training prompts are not those the run was started with; "
                "restore the data, or start a new run"
            )
        now = self.fingerprint()
        for name, then in meta["fingerprint"].items():
            if then != now[name]:
                self.progress.message(
                    f"resume   {name} was {then}, is {now[name]}: steps that are trained again may "
                    "differ in bits from the recorded ones"
                )

    def redo(self, record: Record, version: int) -> None:
        """Brings card and store to where the record ends."""
        self._require_same_weights(record)
        self.worker.load_checkpoint(newest=version)
        self._require_same_weights(record)
        start = f"the checkpoint of version {self.worker.version}"
        if self.worker.version == 0:
            start = "the model that the run began with (no checkpoint yet)"
        self.progress.message(f"resume   from {start}")
        n_updates = self.config.train.updates_per_batch
        while groups := record.trained_groups(self.worker.version):
            self.progress.message(
                f"resume   step {self.worker.version // n_updates + 1} is trained again"
            )
            self.worker.train_groups(groups)
            if self.worker.version == version:
                break  # trained but not published: the outstanding Publish does it
            self.worker.publish(self.worker.version + n_updates)
            if not self._same_weights(record):
                self.progress.message(
                    f"resume   version {self.worker.version} differs in bits from the recorded "
                    "one; the run goes on from these weights"
                )
        assert self.worker.version == version, f"at {self.worker.version}, record at {version}"
        self.worker.trainer.release()  # generation may be next, without a switch
        for group in record.live_groups():
            self.store.add(group)
            self.worker.generator.admit([group])

    def _same_weights(self, record: Record) -> bool:
        now = checkpoint.weights_checksum(self.worker.model)
        return now == record.checksum(self.worker.version)

    def _require_same_weights(self, record: Record) -> None:
        """Weights that were read, not computed, are equal on every machine."""
        if not self._same_weights(record):
            what = f"the checkpoint of version {self.worker.version}"
            if self.worker.version == 0:
                what = f"model.name = {self.config.model.name!r}"
            raise ValueError(
                f"{self.run_dir}: {what} does not hold the weights that the run had; restore them, "
                "or start a new run"
            )


class _Watched:
    """The record, and those who look on while it is written."""

    def __init__(self, parts: _Parts, record: Record) -> None:
        self._record = record
        self._progress = parts.progress
        self._steps = parts.config.train.steps
        self._updates_per_batch = parts.config.train.updates_per_batch
        self._tensorboard = TensorBoard(parts.run_dir) if parts.config.run.tensorboard else None
        self._trackers = Trackers(parts.config, parts.run_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._trackers.close()

    def commit(self, now_s: float, event: Event, commands: list[Command], rows: list[Any]) -> None:
        self._record.commit(now_s, event, commands, rows)
        metrics: dict[str, float] = {}
        version = -1
        for row in rows:
            if isinstance(row, MetricRow):
                version = row.version
                metrics[row.name] = row.value
        if event.kind == "Trained":
            self._progress.step(version // self._updates_per_batch, self._steps, metrics)
        elif event.kind == "Evaluated":
            self._progress.evaluation(version, metrics)
        if self._tensorboard is not None and metrics:
            self._tensorboard.scalars(version, metrics)
        if metrics:
            self._trackers.scalars(version, metrics)


@contextmanager
def reward_pool(
    config: Config,
    reward: RewardName | Sequence[RewardName] | None,
    task: Task,
    log_path: Path | None = None,
) -> Iterator[RewardPool]:
    """Reward processes; gone when it closes."""
    pool = RewardPool(
        reward or config.reward.named or task.reward,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        weights=config.reward.weights,
        log_path=log_path,
    )
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _opened(
    config: Config,
    run_dir: Path,
    reward: RewardName | Sequence[RewardName] | None,
    progress: Progress | None,
    last_card_seq: int = -1,
) -> Iterator[_Parts]:
    """Everything a run needs, checked; reward processes are gone when it closes."""
    progress = progress or Progress()
    try:
        packages(config.run)  # refused now rather than when the model is loaded
        task = load_task(config.task)
        folder, chosen = resolve.resolve(config.model.name)
        progress.message(chosen)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        device = choose_device(config)
        progress.message(
            f"device   {device}, {torch.get_num_threads()} threads, {config.model.dtype}, "
            f"attention: {attention.kernel_name(device.type)}"
        )
        progress.message(check_memory(config, folder, task, device))
        with reward_pool(config, reward, task, run_dir / "reward.log") as pool:
            parts = _Parts(config, run_dir, pool, folder, task, progress, last_card_seq)
            weights.check_tokenizer(parts.worker.tokenizer, parts.worker.model.spec, folder)
            pool.check(task.columns)  # its processes have started while the model was loaded
            progress.message(f"run      {run_dir}")
            yield parts
    finally:
        progress.close()


@contextmanager
def stop_signals(stop: Callable[[str], None], progress: Progress) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run cleanly; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread: a caller in another thread handles them
        return

    def on_signal(number: int, frame: object) -> None:
        stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        progress.message("stopping after what runs now; Ctrl-C again to interrupt")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _kept(run_dir: Path) -> Iterator[None]:
    """What stops a run from outside (a full disk) loses none of it: says how it goes on."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{error}; nothing recorded is lost: mend that (free space on the disk, say), then "
            f"twofold resume {run_dir}"
        ) from error


def _new_run_dir(config: Config) -> Path:
    """Where the run will be written. Nothing is made here."""
    if config.run.dir:
        run_dir = Path(config.run.dir)
        if run_dir.exists() and not run_dir.is_dir():
            raise ValueError(f"run.dir = {str(run_dir)!r} is a file; name another place")
        if run_dir.exists() and any(run_dir.iterdir()):
            raise ValueError(
                f"run.dir = {str(run_dir)!r} is not empty; resume it with `twofold resume "
                f"{run_dir}`, or name another folder"
            )
    else:
        n = 1
        while (run_dir := Path("runs") / f"{config.run.name}-{n}").exists():
            n += 1
    parent = next(folder for folder in run_dir.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"run.dir: {parent} is not writable; name another place")
    return run_dir


def _meta(
    config: Config, reward: RewardName | Sequence[RewardName] | None, parts: _Parts
) -> dict[str, Any]:
    return {
        "config": to_dict(config),
        "reward": "" if reward is None else ", ".join(reward_names(reward)),
        "data": parts.data_digest(),
        "fingerprint": parts.fingerprint(),
    }
