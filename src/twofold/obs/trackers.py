"""A run's metrics sent to Weights & Biases and to trackio, when they are asked for.

Owns: the calls into these packages, which are imported only here and only then, and RUN/tracker_id,
by which a resumed run finds its own again. Does not own: the metrics (the record has them; what is
sent can be lost).

The project is `run.name`, the run is named after its folder. What is written and sent is up to the
packages and their own variables (WANDB_MODE=offline, TRACKIO_DIR, ...).
"""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from typing import Any

from twofold.config import Config, RunConfig, to_dict


def packages(config: RunConfig) -> dict[str, Any]:
    """The packages that are asked for, imported, by name. ValueError when one is not there."""
    wanted = [name for name, on in (("wandb", config.wandb), ("trackio", config.trackio)) if on]
    return {name: _imported(name) for name in wanted}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"run.{name} = true needs a package that cannot be imported ({error}): "
            f"pip install {name}, or leave run.{name} out"
        ) from None


class Trackers:
    """The run as each of the packages keeps it. Goes on in the same one when it is resumed."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """ValueError when a package does not let the run begin (not logged in, say)."""
        found = packages(config.run)
        self._runs = []
        if not found:
            return
        known = run_dir / "tracker_id"
        resume = "allow" if known.is_file() else "never"
        if resume == "never":
            known.write_text(secrets.token_hex(4))
        name = run_dir.resolve().name
        identity = f"{name}-{known.read_text()}"
        # trackio knows a run by its name
        named = {
            "wandb": {"id": identity, "name": name, "dir": str(run_dir)},
            "trackio": {"name": identity},
        }
        for package, module in found.items():
            try:
                run = module.init(
                    project=config.run.name,
                    config=to_dict(config),
                    resume=resume,
                    **named[package],
                )
            except Exception as error:  # theirs are of many types
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(f"run.{package} = true: {package} says: {reason}") from None
            self._runs.append(run)

    def scalars(self, version: int, metrics: dict[str, float]) -> None:
        """Sends the metrics of `version`."""
        for run in self._runs:
            run.log(metrics, step=version)

    def close(self) -> None:
        for run in self._runs:
            run.finish()
