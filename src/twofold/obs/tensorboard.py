"""A run's metrics as TensorBoard files.

Owns: the files in RUN/tensorboard. Does not own: the metrics (the record has them; these files can
be lost).
"""

from __future__ import annotations

from pathlib import Path


class TensorBoard:
    """Writes scalars below `run_dir`. Goes on in the same folder when a run is resumed."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer  # slow to import, and not every run wants it

        self._writer = Writer(str(run_dir / "tensorboard"))

    def scalars(self, version: int, metrics: dict[str, float]) -> None:
        """Adds one point per metric at step `version`, on disk when this returns."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
