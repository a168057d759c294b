"""The cost model fitted to real runs, and how far off its predictions are.

Owns: `Calibration`: costs, the groups of the runs as work, where both come from; its file; the
prediction of held-out runs. Does not own: reading records (`observe`), fitting (`fit`), the
formulas (`cost`), simulating (`executor`). docs/simulation.md says what it cannot know.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from twofold import __version__
from twofold import events as ev
from twofold.config import Config
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.runtime.spec import scheduler_spec
from twofold.sched.scheduler import Scheduler
from twofold.sched.spec import SchedulerSpec
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.fit import Fit, fit
from twofold.sim.observe import Measured, Observed, measure, observe
from twofold.sim.shape import checked
from twofold.sim.workload import GroupWork, Recorded, Work

FORMAT = 1  # of the file

_QUANTUM = (
    "decode_step_s", "decode_token_s", "prefill_token_s", "quantum_s", "decode_context_s",
)  # fmt: skip
"""In order of preference, where the data cannot tell several apart."""
_ONE_NUMBER = ("publish_s", "fetch_s", "receive_s", "to_generate_s", "to_train_s", "eval_s",
               "checkpoint_s", "discard_s", "event_s")  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """`errors`: per formula, the median of |predicted / measured - 1| over what it was fitted to.
    `notes`: what the runs could not tell. `groups`: see `Recorded`."""

    costs: Costs
    groups: tuple[GroupWork, ...]
    machine: dict[str, str]
    runs: tuple[str, ...]
    errors: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def work(self, config: Config) -> Recorded:
        """The runs' groups, for a run with these options. ValueError when those have another number
        of samples."""
        return recorded(self.groups, config)


class Prediction(NamedTuple):
    """A held-out run. `predicted` is with the groups of the calibration, as a planner would;
    `own_groups` with the run's own, so that it errs in seconds and order only."""

    run: str
    real: Measured
    predicted: Measured
    own_groups: Measured


def calibrate(paths: Sequence[Path]) -> Calibration:
    """Fits costs to the records of real runs (folders, or their record.sqlite). ValueError, one
    line: no run, a damaged or simulated record, no finished step, runs of different machines."""
    if not paths:
        raise ValueError("no run to calibrate from: name one run folder at least")
    runs = [observe(path) for path in paths]
    for run in runs[1:]:
        _check_same(run, runs[0].machine, str(runs[0].folder))
    notes: list[str] = []
    errors: dict[str, float] = {}
    costs = dict.fromkeys((f.name for f in fields(Costs)), 0.0)
    costs |= _quantum_costs(runs, errors, notes)
    for name in ("train", "score"):
        costs |= _affine_costs(name, runs, errors, notes)
    for name in _ONE_NUMBER:
        seconds = [s for run in runs for s in run.seconds.get(name, ())]
        if seconds:
            costs[name] = statistics.median(seconds)
        else:
            notes.append(f"{name}: did not occur, taken as 0")
    if any(run.config.rollout.kv_after_update == "keep" for run in runs):
        notes.append("kv_after_update = keep: simulated as recompute, prefill is overestimated")
    _note_evaluations(runs, notes)
    return Calibration(
        Costs(**costs),
        _merged([run.groups for run in runs]),
        runs[0].machine,
        tuple(str(run.folder) for run in runs),
        errors,
        tuple(notes),
    )


def predict(calibration: Calibration, paths: Sequence[Path]) -> list[Prediction]:
    """Simulates each run with its own options, as many steps as it finished, and compares.
    ValueError as `calibrate`, and for a run that the calibration was fitted to."""
    predictions = []
    for path in paths:
        run = observe(path)
        _check_same(run, calibration.machine, "the calibration")
        if str(run.folder) in calibration.runs:
            raise ValueError(f"{run.folder} is in the calibration: it cannot be held out as well")
        spec, n_steps = run.spec, run.measured.n_steps
        spec = SchedulerSpec(**{**vars(spec), "steps": min(n_steps, spec.steps)})
        # its own groups, in the order and number in which it started them
        own = Recorded(tuple(run.groups), len(run.groups), run.config.rollout.max_new_tokens)
        predictions.append(
            Prediction(
                str(run.folder),
                run.measured,
                simulate(calibration.costs, calibration.work(run.config), spec),
                simulate(calibration.costs, own, spec),
            )
        )
    return predictions


def check_config(calibration: Calibration, config: Config) -> None:
    """ValueError when a run with these options would be of another model, number format or number
    of threads than those the costs were fitted to. "auto" and 0 threads are what the machine makes
    of them, as they were when it was calibrated."""
    asked = {
        "model": ("model.name", config.model.name),
        "dtype": ("model.dtype", config.model.dtype if config.model.dtype != "auto" else None),
        "threads": ("run.threads", str(config.run.threads) if config.run.threads else None),
    }
    for name, (option, value) in asked.items():
        fitted = calibration.machine.get(name, value)
        if value is not None and fitted != value:
            raise ValueError(
                f"{option} = {value}: the calibration is of {fitted}; give --{option} {fitted}, or "
                "calibrate from runs with these options"
            )


def simulate(costs: Costs, work: Work, spec: SchedulerSpec) -> Measured:
    """A run on the virtual clock. ValueError when it ends without a finished step."""
    executor, history = SimExecutor(work, spec, costs=costs), _History()
    outcome = drive(Scheduler(spec), executor, history, ev.RunStarted())
    return measure(history.events, executor.staleness, f"the simulated run ({outcome})")


def recorded(groups: Sequence[GroupWork], config: Config) -> Recorded:
    """These groups as the work of a run with these options."""
    size = config.rollout.group_size
    if groups and len(groups[0].lengths) != size:
        raise ValueError(
            f"rollout.group_size = {size}, but the recorded groups have {len(groups[0].lengths)} "
            "samples: calibrate from runs with this size, or give a workload"
        )
    spec = scheduler_spec(config)
    n_total = spec.steps * spec.groups_per_step
    return Recorded(tuple(groups), n_total, config.rollout.max_new_tokens)


class _History:
    """A recorder that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        self.events.append((now_s, event))


# ---------------------------------------------------------------- fitting


def _quantum_costs(
    runs: Sequence[Observed], errors: dict[str, float], notes: list[str]
) -> dict[str, float]:
    quanta = [q for run in runs for q in run.quanta if q.seconds > 0]
    for run in runs:
        if run.n_lost:
            total = run.n_lost + len(run.quanta)
            notes.append(
                f"{run.folder}: who ran in {run.n_lost} of {total} quanta cannot be told "
                "(preemption, or a command that failed); they are left out"
            )
    if not quanta:
        raise ValueError(f"{runs[0].folder}: no decode quantum can be used: give another run")
    rows = [(q.steps, q.tokens, q.prefill_tokens, 1, q.context_tokens) for q in quanta]
    found = fit(rows, [q.seconds for q in quanta])
    errors["quantum"] = found.error
    return _named(_QUANTUM, found, notes)


def _affine_costs(
    name: str, runs: Sequence[Observed], errors: dict[str, float], notes: list[str]
) -> dict[str, float]:
    """Of Train or Score: per token, and per command."""
    done = [pair for run in runs for pair in (run.trained if name == "train" else run.scored)]
    pairs = [(tokens, seconds) for tokens, seconds in done if tokens and seconds > 0]
    if not pairs:
        notes.append(f"{name}_s, {name}_token_s: did not occur, taken as 0")
        return {}
    found = fit([(tokens, 1) for tokens, _ in pairs], [seconds for _, seconds in pairs])
    errors[name] = found.error
    return _named((f"{name}_token_s", f"{name}_s"), found, notes)


def _named(names: Sequence[str], found: Fit, notes: list[str]) -> dict[str, float]:
    for place in found.inseparable:
        notes.append(f"{names[place]}: cannot be told from the others in these runs, taken as 0")
    return dict(zip(names, found.coefficients, strict=True))


def _note_evaluations(runs: Sequence[Observed], notes: list[str]) -> None:
    seconds = [s for run in runs for s in run.seconds.get("eval_s", ())]
    if seconds and max(seconds) > 2 * min(seconds):
        notes.append(
            f"eval_s: took {min(seconds):.3g} to {max(seconds):.3g} s, one number cannot say both"
        )


def _merged(runs: Sequence[Sequence[GroupWork]]) -> tuple[GroupWork, ...]:
    """The groups of all runs, by how far its run was when each started."""
    placed = [
        ((i + 0.5) / len(groups), number, group)
        for number, groups in enumerate(runs)
        for i, group in enumerate(groups)
    ]
    return tuple(group for _, _, group in sorted(placed, key=lambda entry: entry[:2]))


def _check_same(run: Observed, machine: Mapping[str, str], whose: str) -> None:
    for name, value in machine.items():
        if run.machine[name] != value:
            raise ValueError(
                f"{run.folder}: {name} is {run.machine[name]}, of {whose} it is {value}; "
                "calibrate each machine and model on its own"
            )


# ---------------------------------------------------------------- the file


def save(calibration: Calibration, path: Path) -> None:
    """As TOML, one group a line. OSError when it cannot be written."""
    head = {
        "format": FORMAT,
        "twofold": __version__,
        "runs": list(calibration.runs),
        "notes": list(calibration.notes),
        "machine": calibration.machine,
        "errors": calibration.errors,
        "costs": vars(calibration.costs),
    }
    head_text, tables = tomli_w.dumps(head).split("\n[machine]\n", 1)
    lines = [
        "    {" + ", ".join(f"{name} = {_toml(value)}" for name, value in vars(work).items()) + "},"
        for work in calibration.groups
    ]
    groups = "\n".join(["groups = [", *lines, "]"])
    title = "# Fitted by `twofold calibrate` to the runs named here: docs/simulation.md"
    # keys that belong to no table come before the first table
    path.write_text(f"{title}\n{head_text}{groups}\n\n[machine]\n{tables}", "utf-8")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def load(path: Path) -> Calibration:
    """What `save` wrote. ValueError, in one line that names the file, for anything else."""
    try:
        return _from_dict(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{path} is not a calibration: {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a calibration: {error}") from None


def _from_dict(values: Mapping[str, Any]) -> Calibration:
    if values["format"] != FORMAT:
        raise ValueError(
            f"format = {values['format']!r}, this Twofold reads {FORMAT}: calibrate anew"
        )
    kinds = {"costs": dict, "machine": dict, "errors": dict, "groups": list, "runs": list,
             "notes": list}  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            what = "a table" if kind is dict else "a list"
            raise ValueError(f"{name} = {values[name]!r}: {what} is needed")
    if not values["groups"]:
        raise ValueError("groups = []: one group at least is needed; calibrate anew")
    groups = tuple(_group(n, group) for n, group in enumerate(values["groups"]))
    size = len(groups[0].lengths)
    for n, group in enumerate(groups):
        if len(group.lengths) != size:
            raise ValueError(
                f"groups[{n}].lengths has {len(group.lengths)} samples, groups[0] has {size}: all "
                "groups of a calibration have the same number"
            )
    return Calibration(
        Costs(**checked(values["costs"], fields(Costs), "costs")),
        groups,
        _all_of(str, "a text", values["machine"], "machine"),
        tuple(map(str, values["runs"])),
        _all_of(float, "a number", values["errors"], "errors"),
        tuple(map(str, values["notes"])),
    )


def _group(n: int, table: Any) -> GroupWork:
    """ValueError for what no group can be."""
    where = f"groups[{n}]"
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} = {table!r}: a table is needed")
    own = [f for f in fields(GroupWork) if f.name != "lengths"]
    values = checked({k: v for k, v in table.items() if k != "lengths"}, own, where)
    lengths = table.get("lengths")
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(type(length) is int and length >= 1 for length in lengths)
    ):
        raise ValueError(f"{where}.lengths = {lengths!r}: a list of tokens, 1 or more, is needed")
    least = {"prompt_tokens": 0, "n_valid": 0, "reward_s": 0, "pass_rate": 0}
    most = {"n_valid": len(lengths), "pass_rate": 1}
    for name, low in least.items():
        high = most.get(name, math.inf)
        if not (math.isfinite(values.get(name, low)) and low <= values.get(name, low) <= high):
            to = f" to {high}" if name in most else " or more"
            raise ValueError(f"{where}.{name} = {values[name]}: give {low}{to}")
    return GroupWork(lengths=tuple(lengths), **values)


def _all_of(kind: type, what: str, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, value in table.items():
        if type(value) is not kind:
            raise ValueError(f"{where}.{name} = {value!r}: {what} is needed")
    return dict(table)


# ---------------------------------------------------------------- what people read


def report(calibration: Calibration, predictions: Sequence[Prediction] = ()) -> str:
    """A text table of the costs, what could not be told and, if given, how far predictions of
    held-out runs are off."""
    machine = ", ".join(f"{name} {value}" for name, value in calibration.machine.items())
    lines = [
        f"fitted to {len(calibration.runs)} runs, {len(calibration.groups)} groups; {machine}",
        "",
    ]
    lines += [f"  {name:18} {value:.4g}" for name, value in vars(calibration.costs).items()]
    lines += ["", "median error of each formula over what it was fitted to:"]
    lines += [f"  {name:18} {error:.1%}" for name, error in calibration.errors.items()]
    lines += ["", *(f"note: {note}" for note in calibration.notes)]
    if predictions:
        lines += ["", *_prediction_lines(predictions)]
    return "\n".join(lines)


_FIGURES = {
    "step_s": "seconds per step, mean",
    "tokens_per_s": "tokens per second",
    "staleness": "mean staleness",
}


def _prediction_lines(predictions: Sequence[Prediction]) -> list[str]:
    """`own groups`: simulated with the run's own groups instead of the calibration's."""
    lines = [f"{'held-out run':30} {'real':>9} {'simulated':>19} {'with its own groups':>21}"]
    for run in predictions:
        lines.append(run.run)
        for name, title in _FIGURES.items():
            real = float(getattr(run.real, name))
            cells = [_cell(getattr(made, name), real) for made in (run.predicted, run.own_groups)]
            lines.append(f"  {title:28} {real:9.4g} {cells[0]:>19} {cells[1]:>21}")
    for name, title in _FIGURES.items():
        sizes = []
        for place in ("predicted", "own_groups"):
            errors = [_error(getattr(getattr(run, place), name), getattr(run.real, name))
                      for run in predictions]  # fmt: skip
            sizes.append(f"{statistics.median(map(abs, errors)):.1%}")
        lines.append(f"  median error, {title:25} {sizes[0]:>19} {sizes[1]:>21}")
    return lines


def _error(simulated: float, real: float) -> float:
    if real == 0:
        return 0.0 if simulated == 0 else math.inf
    return simulated / real - 1.0


def _cell(simulated: float, real: float) -> str:
    return f"{simulated:.4g} ({_error(simulated, real):+.1%})"
