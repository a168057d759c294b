"""The planner for this machine: which options run the same job fastest on the one card there is.

Owns: the variations of a run's options, simulating each with calibrated costs, the table. Does not
own: the costs (`calibrate`), the choice among results (`ranking`), clusters (`plan`).

What decides learning stays as configured: only options that change when work is done are varied by
themselves; others that the simulator knows can be named (`TRYABLE`). Each candidate is simulated as
a whole run, evaluations left out.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from twofold.config import OPTIONS, Config, check, not_an_option
from twofold.runtime.spec import scheduler_spec
from twofold.sim import timeline
from twofold.sim.calibrate import Calibration, check_config
from twofold.sim.ranking import (
    Progress,
    ages,
    asynchrony,
    causes,
    choose,
    gain,
    left_out,
    ranked,
    waiting,
)
from twofold.sim.run import choose_work
from twofold.sim.window import Entry, Outcome, simulate_whole
from twofold.sim.workload import Synthetic

S, SLOTS, QUANTUM = (
    "sched.max_staleness", "rollout.max_running_samples", "rollout.quantum_decode_steps",
)  # fmt: skip
TRYABLE = {
    S: "",
    SLOTS: "",
    QUANTUM: "",
    "sched.groups_per_step": "batch",
    "train.updates_per_batch": "updates",
}
"""Options that can be tried, with the head of their column; those without one always have one."""


class Here(NamedTuple):
    config: Config
    outcome: Outcome

    @property
    def max_staleness(self) -> int:
        return self.config.sched.max_staleness


class Variations(NamedTuple):
    """`configs`: the first is the configured one. `impossible`: what was left out, and why."""

    configs: list[Config]
    impossible: list[str]
    tried: tuple[str, ...]  # the options that differ


def plan_here(
    configs: Sequence[Config],
    calibration: Calibration,
    synthetic: Synthetic | None = None,
    progress: Progress | None = None,
) -> list[Here]:
    """Simulates each and ranks them, fastest first. Work is the calibration's groups, or
    `synthetic`. ValueError for no configs, those of another model or machine than the calibration,
    and those whose run does not reach its end."""
    if not configs:
        raise ValueError("no configuration to compare: give one at least")
    rows = []
    for n, config in enumerate(configs, 1):
        rows.append(Here(config, _simulated(config, calibration, synthetic)))
        if progress is not None:
            progress(n, len(configs))
    return ranked(rows)


def _simulated(
    config: Config,
    calibration: Calibration,
    synthetic: Synthetic | None,
    entries: list[Entry] | None = None,
) -> Outcome:
    check_config(calibration, config)
    work = choose_work(config, calibration, synthetic)
    spec = scheduler_spec(config)
    return simulate_whole(spec, work, calibration.costs, config.run.seed, entries)


# ---------------------------------------------------------------- what is tried


def variations(config: Config, tries: Mapping[str, Sequence[int]] | None = None) -> Variations:
    """The config and every combination of `tries`, to which S, slots and quantum are added around
    their present values where `tries` does not name them. More slots than samples can be live are
    not tried. ValueError for a name or value that cannot be tried."""
    lists = _around(config) | {name: tuple(values) for name, values in (tries or {}).items()}
    for name in lists:
        _check_tryable(name)
    configs, impossible = [config], list[str]()
    for values in itertools.product(*lists.values()):
        changed = copy.deepcopy(config)
        for name, value in zip(lists, values, strict=True):
            section, _, option = name.partition(".")
            setattr(getattr(changed, section), option, value)
        try:
            check(changed)
        except ValueError as error:
            if str(error) not in impossible:
                impossible.append(str(error))
            continue
        if changed not in configs and not _too_many_slots(changed, lists[SLOTS]):
            configs.append(changed)
    return Variations(configs, impossible, tuple(lists))


def parse_tries(words: Sequence[str]) -> dict[str, list[int]]:
    """["sched.max_staleness=0,1", ...] -> {"sched.max_staleness": [0, 1]}; a name may come again.
    ValueError, one line, for anything else."""
    tries: dict[str, list[int]] = {}
    for word in words:
        name, _, texts = word.partition("=")
        _check_tryable(name)
        for text in texts.split(","):
            if not text.strip().isdecimal():
                raise ValueError(
                    f"--try {word}: {text!r} is not a whole number; write --try {name}=1,2,4"
                )
            tries.setdefault(name, []).append(int(text))
    return tries


def _check_tryable(name: str) -> None:
    if name in TRYABLE:
        return
    if not name:
        raise ValueError("--try names no option; write --try sched.max_staleness=0,1,2")
    if name not in OPTIONS:
        raise not_an_option(name)
    raise ValueError(
        f"--try {name}: the simulated seconds do not depend on it; one of {', '.join(TRYABLE)}"
    )


def _around(config: Config) -> dict[str, tuple[int, ...]]:
    """Half, the same and double; and 0, 1, 2, 4 for S."""
    slots, quantum = config.rollout.max_running_samples, config.rollout.quantum_decode_steps
    return {
        S: tuple(sorted({0, 1, 2, 4, config.sched.max_staleness})),
        SLOTS: _half_to_double(slots),
        QUANTUM: _half_to_double(quantum),
    }


def _half_to_double(n: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, n // 2), n, 2 * n}))


def _too_many_slots(config: Config, slots: Sequence[int]) -> bool:
    """Whether fewer of the tried slots hold all samples that can be live, too."""
    spec = scheduler_spec(config)
    live = (spec.batches_ahead + 1) * spec.groups_per_step * spec.group_size
    return any(live <= other < spec.max_running_samples for other in slots)


# ---------------------------------------------------------------- words


def table(rows: Sequence[Here], configured: Config, found: Variations, most: int = 20) -> str:
    """Ranked rows, the configured one always among them, and what follows from them."""
    best = choose(rows)
    extra = [name for name in found.tried if TRYABLE[name]]
    head = (
        f"  {'S':>3}{'slots':>7}{'quantum':>9}{_cells(TRYABLE[name] for name in extra)}"
        f"{'tokens/s':>10}{'s/step':>9}{'stale':>7}{'busy':>6}  tokens by staleness; idle by cause"
    )
    lines = [head]
    for place, row in enumerate(rows):
        if place < most or row is best or row.config == configured:
            lines.append(_line(row, row is best, row.config == configured, extra))
    if (hidden := len(rows) + 1 - len(lines)) > 0:
        lines.append(f"  {hidden} more are slower (--top {len(rows)} shows all)")
    lines += [f"  not possible: {why}" for why in found.impossible]
    return "\n".join([*lines, "", *conclusion(rows, configured, found.tried)])


def _line(row: Here, best: bool, configured: bool, extra: Sequence[str]) -> str:
    o, r = row.outcome, row.config.rollout
    cells = _cells(str(_value(row.config, name)) for name in extra)
    return (
        f"{'*' if best else ' '} {row.max_staleness:>3}{r.max_running_samples:>7}"
        f"{r.quantum_decode_steps:>9}{cells}{o.tokens_per_s:>10,.1f}{o.seconds_per_step:>9.3g}"
        f"{o.mean_staleness:>7.2f}{sum(o.busy.values()):>6.0%}  {ages(o.staleness)}; "
        f"{causes(o.idle)}{'   <- as configured' if configured else ''}"
    )


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>9}" for text in texts)


def conclusion(rows: Sequence[Here], configured: Config, tried: Sequence[str]) -> list[str]:
    """The best of ranked rows, why, and its options as they stand on a command line."""
    best = choose(rows)
    own = next((row for row in rows if row.config == configured), None)
    words = [
        f"best: S = {best.max_staleness}, {best.outcome.tokens_per_s:,.1f} tokens/s; the card "
        f"waits {waiting(best.outcome)}."
    ]
    if own is best:
        words.append("That is how it is configured.")
    elif own is not None:
        words.append(f"{gain(best, own):+.1%} against the run as configured.")
    words += [left_out(rows, best), asynchrony(rows)]
    return [
        f"why: {' '.join(filter(None, words))}",
        "not asked: how well it learns (staleness, batch), whether its KV cache fits (twofold "
        "train says so before it starts)",
        f"options: {options(best.config, tried)}",
    ]


def options(config: Config, names: Sequence[str]) -> str:
    return " ".join(f"--{name} {_value(config, name)}" for name in names)


def _value(config: Config, name: str) -> int:
    section, _, option = name.partition(".")
    value = getattr(getattr(config, section), option)
    assert isinstance(value, int)
    return value


def write_timeline(
    path: Path, best: Here, calibration: Calibration, synthetic: Synthetic | None = None
) -> None:
    """Of that run, simulated once more. OSError when it cannot be written."""
    entries: list[Entry] = []
    _simulated(best.config, calibration, synthetic, entries)
    timeline.write(path, entries, scheduler_spec(best.config).placement)
