"""The commands that use a model without training it: evaluate, generate.

Owns: what MODEL, RUN and RUN@STEP name, and putting the parts together. Does not own: training runs
(`runtime/run`), how completions are made and counted (`step`).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from twofold.config import Config
from twofold.model import resolve, weights
from twofold.model.transformer import Transformer
from twofold.obs.progress import Progress
from twofold.obs.record import Record, run_config
from twofold.runtime import checkpoint
from twofold.runtime.device import choose_device, with_dtype
from twofold.runtime.rewards import Rewards
from twofold.runtime.run import reward_pool, stop_signals
from twofold.step import evaluate as evaluation
from twofold.step.evaluate import EvalSet
from twofold.step.generate import Generator
from twofold.step.optimizer import load_weights
from twofold.step.prompts import decode_completion, encode_prompt
from twofold.step.sampling import Sampling
from twofold.step.stops import StopStrings
from twofold.tasks.load import load_task
from twofold.types import Group, Prompt, Sample, SampleId


def evaluate(
    target: str, config: Config, samples: int, progress: Progress | None = None
) -> dict[str, float]:
    """Held-out pass rates of a model, a run, or a run's version (RUN@STEP) on `config.task`;
    `samples` completions a prompt at temperature 1, 0 for greedy alone."""
    progress = progress or Progress()
    task = load_task(config.task)
    if not task.held_out:
        raise ValueError("task.held_out = 0: there is nothing to evaluate on")
    _refuse_unknown_reward(target, config)
    model, tokenizer_folder, version, chosen = _load_target(target, config)
    progress.message(chosen)
    progress.message(f"reward   {', '.join(config.reward.named or [task.reward])}")
    tokenizer = weights.load_tokenizer(tokenizer_folder)
    system_prompt, stop = config.task.system_prompt, config.rollout.stop
    ids = [encode_prompt(prompt, tokenizer, system_prompt) for prompt in task.held_out]
    with reward_pool(config, None, task) as pool:
        pool.check(task.columns)
        rewards = Rewards(pool)
        with stop_signals(rewards.stop, progress):
            metrics = evaluation.evaluate(
                model,
                tokenizer,
                EvalSet(task.held_out, ids),
                rewards.judge,
                Sampling(
                    max_new_tokens=config.rollout.max_new_tokens,
                    stop_ids=weights.stop_ids(tokenizer_folder),
                    stop_strings=StopStrings(tokenizer, stop) if stop else None,
                ),
                version=version,
                n_samples=samples,
                seed=config.run.seed,
                max_running_samples=config.rollout.max_running_samples,
                kv_block_tokens=config.rollout.kv_block_tokens,
                stopped=rewards.stopped,
            )
    if metrics is None:
        raise KeyboardInterrupt
    return metrics


def generate(
    model: str, prompt: str, max_new_tokens: int, temperature: float, seed: int, n: int
) -> list[str]:
    """`n` answers to one user message; temperature 0 is greedy."""
    loaded, folder, version, _ = _load_target(model, Config())
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


def _split_target(target: str) -> tuple[Path, str]:
    """RUN@STEP as (folder, step); step is "" when none is named."""
    name, _, step = target.rpartition("@") if re.search(r"@\d+$", target) else (target, "", "")
    return Path(name), step


def _is_run(folder: Path) -> bool:
    return (folder / "record.sqlite").is_file()


def _refuse_unknown_reward(target: str, config: Config) -> None:
    """A run that was trained with a Python function is not judged by another one unasked."""
    run_dir, _ = _split_target(target)
    if not _is_run(run_dir) or config.reward.named:
        return
    with Record.open(run_dir, read_only=True) as record:
        reward = record.meta()["reward"]
    if reward:
        raise ValueError(
            f"{run_dir}: its reward was the Python function {reward}; say which one judges now, "
            "with --reward.function"
        )


def _load_target(target: str, config: Config) -> tuple[Transformer, Path, int, str]:
    """The model that MODEL, RUN or RUN@STEP names, the folder of its tokenizer, its version, and a
    line that says what was chosen. A RUN without a step is its trained model, or its newest
    checkpoint."""
    device = choose_device(config)
    run_dir, step = _split_target(target)
    if not _is_run(run_dir):
        folder, chosen = resolve.resolve(target)
        return (
            weights.load_model(folder, getattr(torch, with_dtype(config).model.dtype), device),
            folder,
            0,
            chosen,
        )
    options = run_config(run_dir)
    dtype = getattr(torch, options.model.dtype)
    trained = run_dir / "model"
    if not step and (trained / "config.json").is_file():
        model = weights.load_model(trained, dtype, device)
        return model, trained, options.train.steps, f"model    {trained}"
    folder, chosen = resolve.resolve(options.model.name)
    model = weights.load_model(folder, dtype, device)
    if step == "0":
        return model, folder, 0, chosen
    version, tensors = checkpoint.find(run_dir / "checkpoints", int(step) if step else None)
    load_weights(model, tensors)
    return model, folder, version, f"model    checkpoint of version {version} of {run_dir}"
