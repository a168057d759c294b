"""The commands that run something: train, resume, evaluate, generate.

Owns: putting the parts together for one process and one card, and the run folder. Does not own: the
loop (`runtime/loop`), decisions (`sched`), the step (`step`).

RUN/  config.toml        the resolved options
      record.sqlite      everything that happened
      checkpoints/       weights and optimizer of some versions
      tensorboard/       scalars, for TensorBoard
      model/             the trained model, a Hugging Face folder
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twofold import __version__
from twofold.config import Config, check, from_dict, load_run_config, to_dict, to_toml
from twofold.events import Command, Event, Resumed, RunStarted
from twofold.model import attention, resolve, weights
from twofold.model.transformer import Transformer
from twofold.obs.progress import Progress
from twofold.obs.record import MetricRow, Record, VersionRow
from twofold.obs.tensorboard import TensorBoard
from twofold.runtime import checkpoint
from twofold.runtime.local import LocalExecutor, phase_name
from twofold.runtime.loop import drive
from twofold.runtime.store import Store
from twofold.runtime.worker import Worker
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.step import evaluate as evaluation
from twofold.step.evaluate import EvalSet
from twofold.step.generate import Generator
from twofold.step.prompts import decode_completion, encode_prompt
from twofold.step.reward import RewardPool
from twofold.step.sampling import Sampling
from twofold.step.train import load_weights
from twofold.tasks.load import Task, load_task
from twofold.types import Group, Prompt, Sample, SampleId


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `outcome`: "done", "stopped: why" or "failed: why"."""

    outcome: str
    run_dir: Path
    version: int


def train(
    config: Config,
    reward: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Post-trains a model as `config` says. `reward`, if given, is a function with TRL's signature
    and takes the place of `config.reward.function`.

    Raises ValueError, with one line naming the option, before anything is written.
    """
    check(config)
    run_dir = _new_run_dir(config)
    with _opened(config, run_dir, reward, progress) as parts:
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(to_toml(config))
        with Record.create(run_dir, _meta(config, reward)) as record:
            checksum = checkpoint.weights_checksum(parts.worker.model)
            parts.store.write(VersionRow(0, checksum))
            return parts.drive(Scheduler(scheduler_spec(config)), record, RunStarted())


def resume(
    run_dir: str | Path,
    reward: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Takes up a run where its record ends: the newest verified checkpoint is loaded, the recorded
    batches after it are trained again, unfinished samples go on from their recorded tokens.

    Raises ValueError when there is no run, it is finished, or another process has it.
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
        last_s = 0.0
        for _, last_s, event in record.events():
            scheduler.handle(event, last_s)
        if scheduler.outcome == "done":
            raise ValueError(f"{run_dir}: the run is finished ({scheduler.version} steps)")
        ended = (row.command for row in record.commands() if row.ended_by is not None)
        last_card_seq = max((command.seq for command in ended if command.cards), default=-1)
        with _opened(config, run_dir, reward, progress, last_card_seq) as parts:
            parts.redo(record, scheduler.version)
            return parts.drive(scheduler, record, Resumed(epoch=record.epoch() + 1), last_s)


def scheduler_spec(config: Config) -> SchedulerSpec:
    """What the scheduler needs to know of the options."""
    return SchedulerSpec(
        steps=config.train.steps,
        groups_per_step=config.sched.groups_per_step,
        group_size=config.rollout.group_size,
        max_staleness=config.sched.max_staleness,
        max_running_samples=config.rollout.max_running_samples,
        quantum_decode_steps=config.rollout.quantum_decode_steps,
        max_drops_per_step=config.sched.max_drops_per_step,
        needs_reference=config.train.kl_coef > 0,
        evaluate=config.task.held_out > 0,
        eval_every=config.run.eval_every,
        checkpoint_every=config.run.checkpoint_every,
    )


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
        self.executor = LocalExecutor(
            pool,
            self.store,
            deterministic=config.run.deterministic,
            last_card_seq=last_card_seq,
        )
        self._folder = folder
        self.worker = self.executor.worker = Worker(
            config,
            folder,
            run_dir,
            task,
            self.store,
            self.executor.judge,
            self.executor.stopped,
            _device(config),
        )
        self.executor.on_quantum = progress.quantum
        self.executor.on_command = lambda command: progress.phase(phase_name(command))

    def drive(
        self, scheduler: Scheduler, record: Record, first: Event, start_s: float = 0.0
    ) -> RunResult:
        tensorboard = TensorBoard(self.run_dir) if self.config.run.tensorboard else None
        watched = _Watched(record, self.progress, tensorboard, self.config.train.steps)
        with _stop_signals(self.executor.stop, self.progress):
            self.executor.begin(start_s)
            drive(scheduler, self.executor, watched, first, start_s)
        if tensorboard is not None:
            tensorboard.close()
        if scheduler.outcome == "done" and self.config.run.save_model:
            weights.save_model(self.worker.model, self.run_dir / "model", self._folder)
            self.progress.message(f"model    {self.run_dir / 'model'} (a Hugging Face folder)")
        return RunResult(scheduler.outcome, self.run_dir, scheduler.version)

    def redo(self, record: Record, version: int) -> None:
        """Brings card and store to where the record ends."""
        self.worker.load_checkpoint()
        self.progress.message(f"resume   checkpoint of version {self.worker.version}")
        while groups := record.trained_groups(self.worker.version):
            self.progress.message(f"resume   step {self.worker.version + 1} is trained again")
            self.worker.train_groups(groups)
            if self.worker.version == version:
                break  # trained but not published: the outstanding Publish does it
            self.worker.publish(self.worker.version + 1)
            self._compare(record)
        assert self.worker.version == version, f"at {self.worker.version}, record at {version}"
        for group in record.live_groups():
            self.store.add(group)
            self.worker.generator.admit([group])

    def _compare(self, record: Record) -> None:
        checksum = checkpoint.weights_checksum(self.worker.model)
        if checksum != record.checksum(self.worker.version):
            self.progress.message(
                f"resume   version {self.worker.version} differs in bits from the recorded one "
                "(another machine, build or thread count); the run goes on from these weights"
            )


class _Watched:
    """The record, and those who look on while it is written."""

    def __init__(
        self, record: Record, progress: Progress, tensorboard: TensorBoard | None, steps: int
    ) -> None:
        self._record = record
        self._progress = progress
        self._tensorboard = tensorboard
        self._steps = steps

    def commit(self, now_s: float, event: Event, commands: list[Command], rows: list[Any]) -> None:
        self._record.commit(now_s, event, commands, rows)
        metrics: dict[str, float] = {}
        version = -1
        for row in rows:
            if isinstance(row, MetricRow):
                version = row.version
                metrics[row.name] = row.value
        if event.kind == "Trained":
            self._progress.step(version, self._steps, metrics)
        elif event.kind == "Evaluated":
            self._progress.evaluation(version, metrics)
        if self._tensorboard is not None and metrics:
            self._tensorboard.scalars(version, metrics)


def evaluate(
    target: str, config: Config, samples: int, progress: Progress | None = None
) -> dict[str, float]:
    """Held-out pass rates of a model, a run, or a run's version (RUN@STEP) on `config.task`;
    `samples` completions a prompt at temperature 1, 0 for greedy alone."""
    model, tokenizer_folder, version = _load_target(target, config)
    task = load_task(config.task)
    if not task.held_out:
        raise ValueError("task.held_out = 0: there is nothing to evaluate on")
    tokenizer = weights.load_tokenizer(tokenizer_folder)
    system_prompt = config.task.system_prompt
    ids = [encode_prompt(prompt, tokenizer, system_prompt) for prompt in task.held_out]
    with _reward_pool(config, None, task) as pool:
        pool.check(task.columns)
        executor = LocalExecutor(pool, Store(), deterministic=False)
        with _stop_signals(executor.stop, progress or Progress()):
            metrics = evaluation.evaluate(
                model,
                tokenizer,
                EvalSet(task.held_out, ids),
                executor.judge,
                Sampling(
                    max_new_tokens=config.rollout.max_new_tokens,
                    stop_ids=weights.stop_ids(tokenizer_folder),
                ),
                version=version,
                n_samples=samples,
                seed=config.run.seed,
                max_running_samples=config.rollout.max_running_samples,
                kv_block_tokens=config.rollout.kv_block_tokens,
                stopped=executor.stopped,
            )
    if metrics is None:
        raise KeyboardInterrupt
    return metrics


def generate(
    model: str, prompt: str, max_new_tokens: int, temperature: float, seed: int, n: int
) -> list[str]:
    """`n` answers to one user message; temperature 0 is greedy."""
    loaded, folder, version = _load_target(model, Config())
    tokenizer = weights.load_tokenizer(folder)
    chat = tokenizer.chat_template is not None
    asked = Prompt([{"role": "user", "content": prompt}] if chat else prompt)
    sampling = Sampling(
        temperature=temperature or 1.0,
        greedy=temperature == 0,
        max_new_tokens=max_new_tokens,
        stop_ids=weights.stop_ids(folder),
    )
    generator = Generator(
        loaded,
        sampling,
        seed=seed,
        stream="generate",
        max_running_samples=n,
        kv_cache_tokens=0,
        kv_block_tokens=Config().rollout.kv_block_tokens,
    )
    samples = [Sample(SampleId(0, i)) for i in range(n)]
    generator.admit([Group(0, asked, encode_prompt(asked, tokenizer), version, version, samples)])
    while generator.unfinished:
        generator.run(max_decode_steps=64)
    return [decode_completion(tokenizer, s.token_ids, sampling.stop_ids) for s in samples]


def _load_target(target: str, config: Config) -> tuple[Transformer, Path, int]:
    """The model that MODEL, RUN or RUN@STEP names, the folder of its tokenizer, its version. A RUN
    without a step is its trained model, or its newest checkpoint."""
    device = _device(config)
    name, _, step = target.rpartition("@") if re.search(r"@\d+$", target) else (target, "", "")
    run_dir = Path(name)
    if not (run_dir / "record.sqlite").is_file():
        folder, _ = resolve.resolve(target)
        return weights.load_model(folder, getattr(torch, config.model.dtype), device), folder, 0
    run_config = load_run_config(run_dir)
    dtype = getattr(torch, run_config.model.dtype)
    if not step and (run_dir / "model" / "config.json").is_file():
        return weights.load_model(run_dir / "model", dtype, device), run_dir / "model", 0
    folder, _ = resolve.resolve(run_config.model.name)
    model = weights.load_model(folder, dtype, device)
    if step == "0":
        return model, folder, 0
    version, tensors = checkpoint.find(run_dir / "checkpoints", int(step) if step else None)
    load_weights(model, tensors)
    return model, folder, version


@contextmanager
def _reward_pool(
    config: Config, reward: Callable[..., Any] | None, task: Task
) -> Iterator[RewardPool]:
    """Reward processes; gone when it closes."""
    pool = RewardPool(
        reward or config.reward.function or task.reward,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
    )
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _opened(
    config: Config,
    run_dir: Path,
    reward: Callable[..., Any] | None,
    progress: Progress | None,
    last_card_seq: int = -1,
) -> Iterator[_Parts]:
    """Everything a run needs, checked; reward processes are gone when it closes."""
    progress = progress or Progress()
    try:
        task = load_task(config.task)
        folder, chosen = resolve.resolve(config.model.name)
        progress.message(chosen)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        device = _device(config)
        progress.message(
            f"device   {device}, {torch.get_num_threads()} threads, {config.model.dtype}, "
            f"attention: {attention.kernel_name()}"
        )
        with _reward_pool(config, reward, task) as pool:
            parts = _Parts(config, run_dir, pool, folder, task, progress, last_card_seq)
            pool.check(task.columns)  # its processes have started while the model was loaded
            progress.message(f"run      {run_dir}")
            yield parts
    finally:
        progress.close()


@contextmanager
def _stop_signals(stop: Callable[[str], None], progress: Progress) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run cleanly; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread: a caller in another thread handles them
        return

    def on_signal(number: int, frame: object) -> None:
        stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        progress.message("stopping after what runs now; Ctrl-C again to interrupt")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _device(config: Config) -> torch.device:
    if config.run.device != "auto":
        return torch.device(config.run.device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _new_run_dir(config: Config) -> Path:
    if config.run.dir:
        run_dir = Path(config.run.dir)
        if run_dir.exists() and any(run_dir.iterdir()):
            raise ValueError(
                f"run.dir = {str(run_dir)!r} is not empty; resume it with `twofold resume "
                f"{run_dir}`, or name another folder"
            )
        return run_dir
    n = 1
    while (run_dir := Path("runs") / f"{config.run.name}-{n}").exists():
        n += 1
    return run_dir


def _meta(config: Config, reward: Callable[..., Any] | None) -> dict[str, Any]:
    return {
        "config": to_dict(config),
        "reward": "" if reward is None else getattr(reward, "__qualname__", repr(reward)),
        "fingerprint": {
            "twofold": __version__,
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "attention": attention.kernel_name(),
        },
    }
