"""Twofold: RL post-training of language models in which every card generates and trains.

Owns: what `import twofold` offers, without loading torch until something runs. Does not own: any of
the work (`runtime.run`).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twofold.config import Config
    from twofold.runtime.run import RunResult

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "resume", "train"]


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    reward: Callable[..., Any] | Sequence[Callable[..., Any] | str] | None = None,
) -> RunResult:
    """Post-trains a model and returns how it ended (`outcome`), the run folder and the version.

    `config`: a Config, {section: {option: value}}, or the path of a TOML file. `reward`: a function
    `reward(prompts, completions, **columns)` that returns one number per completion (the signature
    of TRL's reward functions), or several, with names of built-ins among them if wanted, whose sum
    weighted by `reward.weights` counts; None: what the config names. Raises ValueError for options
    that are wrong.

    Threads are bound to cores (see `threads`), unless torch is already loaded.
    """
    from twofold import config as options

    if isinstance(config, str | os.PathLike):
        config = options.load_config(config)
    elif not isinstance(config, options.Config):
        config = options.from_dict(config)
    options.check(config)
    line = _bind(config.run.threads)
    from twofold.obs.progress import Progress
    from twofold.runtime import run

    progress = Progress()
    progress.message(line)
    return run.train(config, reward, progress)


def resume(
    run_dir: str | os.PathLike[str],
    reward: Callable[..., Any] | Sequence[Callable[..., Any] | str] | None = None,
) -> RunResult:
    """Goes on with a run that was stopped or killed, from what its folder holds, with the options
    it was started with. `reward` is needed if the run was started with one. Raises ValueError when
    there is nothing to resume."""
    from pathlib import Path

    from twofold.obs.record import run_config

    line = _bind(run_config(Path(run_dir)).run.threads)
    from twofold.obs.progress import Progress
    from twofold.runtime import run

    progress = Progress()
    progress.message(line)
    return run.resume(os.fspath(run_dir), reward, progress)


def _bind(n: int) -> str:
    from twofold import threads

    if "torch" in sys.modules and not threads.bound():
        return "threads  left as they are: torch was loaded before twofold could bind them to cores"
    return threads.bind_threads(n)


def __getattr__(name: str) -> Any:
    if name == "Config":
        from twofold.config import Config

        return Config
    raise AttributeError(f"module 'twofold' has no attribute {name!r}")
