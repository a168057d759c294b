"""What a run shows while it goes: a live display in a terminal, plain lines elsewhere.

Owns: how metrics and phases look. Does not own: the metrics themselves (the record has them), or
when something is reported (the run).
"""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

Metrics = dict[str, float]


class Column(NamedTuple):
    """A number of a step: its title, its width in the live table, the metric, how it is written."""

    title: str
    width: int
    metric: str
    spec: str


COLUMNS = (
    Column("reward", 6, "reward/mean", ".3f"),
    Column("pass", 4, "pass_rate", ".0%"),
    Column("length", 6, "length/mean", ".1f"),
    Column("tok/s", 5, "tokens_per_s", ".0f"),
    Column("stale", 5, "staleness/mean", ".2f"),
    Column("old", 3, "staleness/max", ".0f"),
    Column("kl", 7, "kl", ".4f"),
    Column("entropy", 7, "entropy", ".3f"),
    Column("clip", 5, "clip_fraction", ".1%"),
    Column("gap", 7, "logprob_gap/max", ".1e"),
    Column("s", 5, "time/step_s", ".1f"),
)
PHASES = ("generate", "train", "score", "switch", "publish", "eval", "checkpoint", "wait")
_HEADER_EVERY = 20  # steps: about a screen
_ETA_STEPS = 5  # the latest steps, whose mean time the rest is expected to take
_REFRESH_S = 0.2  # a quantum may be shorter; nobody reads faster


class Progress:
    """Shows a run on `stream` (default: standard output): a live display if that is a terminal,
    else one line per message, step and evaluation. `close` may be called more than once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        if isinstance(stream, TextIOWrapper):  # an ASCII terminal gets "?" for what it lacks
            stream.reconfigure(errors="replace")
        self._console = Console(file=stream, highlight=False, markup=False)
        self._live: Live | None = None
        self._lost = False  # what is written here arrives nowhere
        self._drawn_at = 0.0
        self._phase = self._quantum = self._shares = ""
        self._version = self._steps = 0
        self._rows = 0
        self._step_times_s: list[float] = []
        if self._console.is_terminal:
            # no thread of its own: it would compete with the training for a core
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def message(self, text: str) -> None:
        """One line: something that was chosen or that happened."""
        self._print(text)

    def phase(self, name: str) -> None:
        """What the card does from now on. Shown live only."""
        self._phase, self._quantum = name, ""
        self._draw(force=True)

    def quantum(self, unfinished: int, tokens_per_s: float) -> None:
        """How generation goes. Shown live only."""
        self._quantum = f", {unfinished} samples unfinished, {tokens_per_s:.0f} tokens/s"
        self._draw()

    def step(self, version: int, steps: int, metrics: Metrics) -> None:
        """A training step is done: `version` of `steps`. Missing metrics are shown as "-"."""
        self._version, self._steps = version, steps
        self._shares = time_shares(metrics)
        if "time/step_s" in metrics:
            step_s = metrics["time/step_s"] - metrics.get("time/eval", 0.0)  # evaluations are rare
            self._step_times_s = [*self._step_times_s, step_s][-_ETA_STEPS:]
        if self._live is None:
            self._print(step_line(version, steps, metrics, eta=self._eta()))
        else:
            if self._rows % _HEADER_EVERY == 0:
                self._print("   step " + " ".join(c.title.rjust(c.width) for c in COLUMNS), "bold")
            self._print(step_row(version, steps, metrics))
        self._rows += 1

    def evaluation(self, version: int, metrics: Metrics) -> None:
        """A held-out evaluation of `version` is done."""
        self._print(evaluation_line(version, metrics), "bold")

    def close(self) -> None:
        """Ends the live display; what comes later is printed as plain lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _eta(self) -> str:
        if not self._step_times_s:
            return "-"
        step_s = sum(self._step_times_s) / len(self._step_times_s)
        return duration(step_s * (self._steps - self._version))

    def _print(self, text: str, style: str = "") -> None:
        if self._lost:
            return
        try:
            self._console.print(Text(text, style=style), soft_wrap=True)
            self._draw(force=True)
        except OSError:  # nobody reads any more, or the disk of the log is full: the run goes on
            self._lost, self._live = True, None

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if self._live is None or not (force or now - self._drawn_at >= _REFRESH_S):
            return
        self._drawn_at = now
        lines = []
        if self._steps:
            eta, shares = self._eta(), self._shares or "-"
            lines.append(f"step {self._version} of {self._steps}, ETA {eta}, last step: {shares}")
        if self._phase:
            lines.append(f"now: {self._phase}{self._quantum}")
        text = Text("\n".join(lines), style="cyan", no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)


def step_line(version: int, steps: int, metrics: Metrics, eta: str) -> str:
    """A step as one line of names and numbers, for logs."""
    numbers = "  ".join(f"{c.title} {_number(metrics, c)}" for c in COLUMNS)
    shares = time_shares(metrics) or "-"
    return f"step {version}/{steps}  {numbers}{_losses(metrics)}  ETA {eta}  | {shares}"


def step_row(version: int, steps: int, metrics: Metrics) -> str:
    """A step as one row below the titles of the columns; at most 80 characters wide, or longer
    when something was lost."""
    numbers = " ".join(_number(metrics, c).rjust(c.width) for c in COLUMNS)
    return f"{f'{version}/{steps}':>7} {numbers}{_losses(metrics)}"


def _losses(metrics: Metrics) -> str:
    """What did not come through in this step; empty when all did."""
    failed, dropped = metrics.get("samples/failed", 0.0), metrics.get("groups/dropped", 0.0)
    text = f"  {failed:.0f} rewards failed" if failed else ""
    if metrics.get("tokens/trained") == 0:
        text += "  nothing to train: equal rewards in every group"
    return text + (f"  {dropped:.0f} groups dropped" if dropped else "")


def evaluation_line(version: int, metrics: Metrics) -> str:
    """An evaluation as one line."""
    stderr = metrics.get("eval/pass_rate_stderr")
    margin = "" if stderr is None else f" ± {stderr:.3f}"
    length = metrics.get("eval/length")
    n_failed = metrics.get("eval/failed", 0.0) + metrics.get("eval/greedy_failed", 0.0)
    failed = f", {n_failed:.0f} rewards failed" if n_failed else ""
    return (
        f"held-out at version {version}: "
        f"pass rate {_rate(metrics, 'eval/pass_rate')}{margin} at temperature 1, "
        f"greedy {_rate(metrics, 'eval/greedy_pass_rate')}, "
        f"length {'-' if length is None else f'{length:.1f}'}{failed}"
    )


def time_shares(metrics: Metrics) -> str:
    """ "generate 61% train 30%": each phase's share of all the time there is a phase for; phases
    below half a percent are left out."""
    times = {name: metrics.get(f"time/{name}", 0.0) for name in PHASES}
    total = sum(times.values())
    shares = {name: spent / total for name, spent in times.items()} if total > 0 else {}
    return " ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def duration(seconds: float) -> str:
    """42 -> "42s", 190 -> "3m10s", 7500 -> "2h05m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _number(metrics: Metrics, column: Column) -> str:
    value = metrics.get(column.metric)
    return "-" if value is None else format(value, column.spec)


def _rate(metrics: Metrics, name: str) -> str:
    value = metrics.get(name)
    return "-" if value is None else f"{value:.3f}"
