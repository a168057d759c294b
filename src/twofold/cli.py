"""The command `twofold`: what can be asked for, and what the shell gets back.

Owns: commands, their arguments, help texts, exit codes. Does not own: options of a run (`config`)
or any of the work (`runtime.run`, `obs.samples`, `check`), which is imported only when it is
needed, after the threads are bound.

Exit codes: 0 done, 1 failed, 2 bad input (both with one line on standard error), 130 stopped by
Ctrl-C, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twofold import __version__, config
from twofold.threads import bind_threads

if TYPE_CHECKING:
    from twofold.runtime.run import RunResult
    from twofold.sim.shape import Shape

_ABOUT = """\
RL post-training of language models in which every card does two jobs: it generates
rollouts and it trains, on one copy of the weights.

  twofold check                                 what this machine has and what will be used
  twofold train examples/quickstart.toml        post-train; --train.steps 50 changes an option
  twofold resume runs/quickstart-1              go on after Ctrl-C, a crash or a power cut
  twofold samples runs/quickstart-1             look at completions
  twofold eval runs/quickstart-1@40             held-out evaluation of a checkpoint
  twofold generate runs/quickstart-1/model 'What is 2 + 3?'
  twofold log runs/quickstart-1                 everything that happened, as JSON lines
  twofold calibrate runs/quickstart-1           what work costs on this machine, from real runs
  twofold sim examples/quickstart.toml          the same run on a virtual clock, in a second
  twofold plan examples/quickstart.toml         which options are the fastest, here or on a cluster
"""
_TRAIN = """\
Post-trains a model as CONFIG.toml says. Any option can be given here too, as --section.option
VALUE, and wins over the file. Relative paths are relative to the current directory. Ctrl-C ends
the run cleanly; `twofold resume` takes it up again."""
_CALIBRATE = """\
Fits the simulator's cost model (seconds of a decode step, a prefilled token, a trained token, ...)
to the records of real runs of one model on one machine, which may still be going on, and says how
well it fits. What the runs could not tell is named. With --held-out the fitted model predicts other
runs, with their own options, and each prediction stands beside what really happened: give runs with
other options (another sched.max_staleness, say) than those it was fitted to."""
_SIM = """\
Simulates the run that CONFIG.toml describes, with the real scheduler on a virtual clock: seconds a
step, tokens per second, staleness, where the time goes. No model is loaded. Without --calibration
the costs are invented, and only show in which order things happen. Any option can be given here
too, as --section.option VALUE. docs/simulation.md says how far to trust it."""
_PLAN = """\
Simulates many ways to run the job that CONFIG.toml describes and ranks them. With --calibration
alone: on this machine, options around the configured ones (or those that --try lists). With
--cluster: placements, splits, staleness and memory options on the cards that FILE describes, as
examples/clusters/h100_node.toml does; what does not fit is named, and by how much. Any option can
be given here too, as --section.option VALUE. docs/planner.md says what it cannot know."""
_EPILOG = "TWOFOLD_TRACEBACK=1 shows where an error came from."
_OVERRIDE = re.compile(r"--\w+\.[^\s]+")
_HELP_COLUMN = 34


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        words, overrides = _split(list(given))
        parser = _parser()
        arguments, unknown = parser.parse_known_args(words)
        takes_options = arguments.run in (_train, _eval, _sim, _plan)
        if unknown and takes_options and unknown[0].startswith("--"):
            raise config.not_an_option(unknown[0].removeprefix("--").partition("=")[0])
        if overrides and not takes_options:
            unknown = [*overrides, *unknown]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        arguments.overrides = overrides
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except ValueError as error:
        if os.environ.get("TWOFOLD_TRACEBACK"):
            raise
        print(f"twofold: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `twofold log RUN | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, FloatingPointError, sqlite3.DatabaseError) as error:
        if os.environ.get("TWOFOLD_TRACEBACK"):
            raise
        print(f"twofold: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        of_a_run = given[:1] in (["train"], ["resume"])
        hint = "; a run goes on with: twofold resume RUN" if of_a_run else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return 130


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """(the other words, the --section.option words with their values)."""
    others: list[str] = []
    overrides: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            return [*others, word, *words], overrides
        if not _OVERRIDE.fullmatch(word.partition("=")[0]):
            others.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return others, overrides


# ---------------------------------------------------------------- commands


def _train(arguments: argparse.Namespace) -> int:
    options = config.load_config(arguments.config, arguments.overrides)
    threads = bind_threads(options.run.threads)
    from twofold.obs.progress import Progress
    from twofold.runtime import run

    with Progress() as progress:
        progress.message(threads)
        result = run.train(options, progress=progress)
    return _end(result)


def _resume(arguments: argparse.Namespace) -> int:
    from twofold.obs.record import run_config

    threads = bind_threads(run_config(Path(arguments.folder)).run.threads)
    from twofold.obs.progress import Progress
    from twofold.runtime import run

    with Progress() as progress:
        progress.message(threads)
        result = run.resume(arguments.folder, progress=progress)
    return _end(result)


def _end(result: RunResult) -> int:
    """Says how a run ended; the exit code."""
    print(f"{result.outcome} at step {result.version}: {result.run_dir}")
    if result.outcome.startswith("stopped"):
        print(f"to go on: twofold resume {result.run_dir}")
    return {"done": 0, "stopped: Ctrl-C": 130, "stopped: SIGTERM": 143}.get(result.outcome, 1)


def _eval(arguments: argparse.Namespace) -> int:
    options = _eval_options(arguments)
    threads = bind_threads(options.run.threads)
    from twofold.obs.progress import Progress
    from twofold.runtime import ask

    samples = options.run.eval_samples if arguments.samples is None else arguments.samples
    with Progress() as progress:
        progress.message(threads)
        metrics = ask.evaluate(
            arguments.target, options, 0 if arguments.greedy else samples, progress
        )
    for name, value in metrics.items():
        print(f"{name:24} {value:.4f}")
    return 0


def _eval_options(arguments: argparse.Namespace) -> config.Config:
    """Options come from --config, else from the run that is evaluated, else from the defaults."""
    overrides = list(arguments.overrides)
    if arguments.task:
        overrides = ["--task.name", arguments.task, *overrides]
    run_config = Path(re.sub(r"@\d+$", "", arguments.target)) / "config.toml"
    path = arguments.config or (run_config if run_config.is_file() else None)
    return config.load_config(path, overrides)


def _generate(arguments: argparse.Namespace) -> int:
    bind_threads(0)
    from twofold.obs.samples import visible
    from twofold.runtime import ask

    texts = ask.generate(
        arguments.model,
        arguments.prompt,
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.seed,
        arguments.samples,
    )
    for i, text in enumerate(texts):
        if len(texts) > 1:
            print(f"--- sample {i}")
        print(visible(text))
    return 0


def _samples(arguments: argparse.Namespace) -> int:
    from twofold.obs.record import Record
    from twofold.obs.samples import print_samples

    with Record.open(Path(arguments.folder), read_only=True) as record:
        print_samples(record, arguments.step, arguments.n, arguments.sort)
    return 0


def _log(arguments: argparse.Namespace) -> int:
    from twofold.obs.record import Record
    from twofold.obs.samples import log_lines

    with Record.open(Path(arguments.folder), read_only=True) as record:
        for line in log_lines(record):
            print(line)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from twofold.sim import calibrate

    calibration = calibrate.calibrate([Path(run) for run in arguments.folders])
    predictions = calibrate.predict(calibration, [Path(run) for run in arguments.held_out])
    print(calibrate.report(calibration, predictions))
    if arguments.out:
        calibrate.save(calibration, Path(arguments.out))
        print(f"\nwritten: {arguments.out}")
    return 0


def _sim(arguments: argparse.Namespace) -> int:
    options = config.load_config(arguments.config, arguments.overrides)
    from twofold.obs.meters import report
    from twofold.obs.record import Record
    from twofold.sim import calibrate, workload
    from twofold.sim.cost import Costs
    from twofold.sim.run import choose_work, run

    fitted = calibrate.load(Path(arguments.calibration)) if arguments.calibration else None
    given = workload.load(Path(arguments.workload)) if arguments.workload else None
    if fitted:
        calibrate.check_config(fitted, options)
    work = choose_work(options, fitted, given)
    print(f"simulated, costs: {arguments.calibration or 'invented (give --calibration FILE)'}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.out or temporary)
        costs = fitted.costs if fitted else Costs()
        result = run(options, costs, work, folder, _Counted("steps"))
        with Record.open(folder, read_only=True) as record:
            print(f"{result.line()}\n\n{report(record)}")
    if arguments.out:
        print(f"\nwritten: {arguments.out} (a record like that of a real run, without tokens)")
    return 0 if result.outcome == "done" else 1


def _plan(arguments: argparse.Namespace) -> int:
    options = config.load_config(arguments.config, arguments.overrides)
    from twofold.sim import calibrate, here, plan_command, plan_file, workload

    tries = here.parse_tries(arguments.tries)
    if arguments.cluster and tries:
        raise ValueError("--try is for this machine; with --cluster FILE its table search says it")
    if not arguments.cluster and not arguments.calibration:
        raise ValueError(
            "plan needs --calibration FILE (this machine, from `twofold calibrate RUN --out FILE`) "
            "or --cluster FILE (such as examples/clusters/h100_node.toml)"
        )
    cluster = plan_file.load(Path(arguments.cluster)) if arguments.cluster else None
    fitted = calibrate.load(Path(arguments.calibration)) if arguments.calibration else None
    given = workload.load(Path(arguments.workload)) if arguments.workload else None
    trace = Path(arguments.timeline) if arguments.timeline else None
    if cluster is not None:
        shape = cluster.shape or _shape_of_model(options)
        text = plan_command.plan_cluster(
            options, cluster, shape, fitted, given, arguments.top, trace, _Counted()
        )
    else:
        assert fitted is not None
        text = plan_command.plan_here(
            options, fitted, given, tries, arguments.top, trace, _Counted()
        )
    print(text)
    return 0


def _shape_of_model(options: config.Config) -> Shape:
    """Of the model that the options name; its weights are not read."""
    bind_threads(1)
    from twofold.model import resolve, weights
    from twofold.sim.shape import Shape

    folder, line = resolve.resolve(options.model.name)
    print(line, file=sys.stderr)
    weight_bytes = 4 if options.model.dtype == "float32" else 2
    return Shape.of_spec(weights.read_spec(folder), options.model.name, weight_bytes)


class _Counted:
    """Says on standard error how many of something are done, every two seconds."""

    def __init__(self, what: str = "candidates") -> None:
        self._what = what
        self._said_s = time.monotonic()

    def __call__(self, n_done: int, n_all: int) -> None:
        if time.monotonic() >= self._said_s + 2.0:
            self._said_s = time.monotonic()
            print(f"simulated {n_done} of {n_all} {self._what}", file=sys.stderr, flush=True)


def _check(arguments: argparse.Namespace) -> int:
    threads = bind_threads(0)
    from twofold.check import report

    for line in [threads, *report()]:
        print(line)
    return 0


# ---------------------------------------------------------------- arguments and help


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="twofold", description=_ABOUT, epilog=_EPILOG, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"twofold {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: object, help: str, description: str = "", epilog: str = ""
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=help,
            description=description or f"{help[0].upper()}{help[1:]}.",
            epilog=epilog,
            formatter_class=form,
            allow_abbrev=False,
        )
        made.set_defaults(run=run)
        return made

    train = command("train", _train, "post-train a model", _TRAIN, options_help())
    train.usage = "twofold train CONFIG.toml [--section.option VALUE ...]"
    train.add_argument("config", metavar="CONFIG.toml", help="see examples/")

    resume = command("resume", _resume, "go on with a run that was stopped or killed")
    resume.add_argument("folder", metavar="RUN", help="its folder, such as runs/quickstart-1")

    evaluate = command("eval", _eval, "held-out pass rate of a model, or of a run's checkpoint")
    evaluate.usage = "twofold eval MODEL|RUN@STEP [--task NAME] [--section.option VALUE ...]"
    evaluate.add_argument("target", metavar="MODEL|RUN@STEP", help="a name, a folder, or runs/x@20")
    evaluate.add_argument("--task", metavar="NAME", help="short for --task.name NAME")
    evaluate.add_argument(
        "--config", metavar="FILE", help="take the options from here (default: from the run)"
    )
    evaluate.add_argument("--samples", type=_count, help="per prompt (default: run.eval_samples)")
    evaluate.add_argument("--greedy", action="store_true", help="greedy decoding only")

    generate = command("generate", _generate, "answer a prompt")
    generate.add_argument("model", metavar="MODEL", help="a name or a folder, as in model.name")
    generate.add_argument("prompt", metavar="PROMPT", help="what the user says")
    generate.add_argument("--max-new-tokens", type=_count, default=128, help="default: 128")
    generate.add_argument(
        "--temperature", type=_temperature, default=1.0, help="0: greedy (default: 1)"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the sampling noise (default: 0)")
    generate.add_argument("--samples", type=_count, default=1, help="how many (default: 1)")

    samples = command("samples", _samples, "look at a run's completions")
    samples.add_argument("folder", metavar="RUN")
    samples.add_argument("--step", type=_count, help="of this training step (default: any)")
    samples.add_argument("-n", type=_count, default=8, help="how many (default: 8)")
    samples.add_argument(
        "--sort",
        choices=("newest", "best", "worst", "longest", "shortest"),
        default="newest",
        help="default: newest",
    )
    log = command("log", _log, "everything that happened in a run, as JSON lines")
    log.add_argument("folder", metavar="RUN")
    calibrate = command(
        "calibrate", _calibrate, "what work costs on this machine, from real runs", _CALIBRATE
    )
    calibrate.add_argument("folders", metavar="RUN", nargs="+", help="fitted to: run folders")
    calibrate.add_argument(
        "--held-out", metavar="RUN", nargs="+", default=[], help="predicted, and compared"
    )
    calibrate.add_argument("--out", metavar="FILE", help="write the calibration here, as TOML")

    sim = command("sim", _sim, "a run on a virtual clock: how it would go", _SIM)
    sim.usage = "twofold sim CONFIG.toml [--calibration FILE] [--section.option VALUE ...]"
    sim.add_argument("config", metavar="CONFIG.toml", help="see examples/")
    sim.add_argument("--calibration", metavar="FILE", help="from twofold calibrate --out FILE")
    sim.add_argument(
        "--workload", metavar="FILE", help="lengths and rewards, instead of the calibration's runs'"
    )
    sim.add_argument("--out", metavar="RUN", help="keep the record, in this new folder")

    plan = command("plan", _plan, "which options or layout are the fastest, and why", _PLAN)
    plan.usage = "twofold plan CONFIG.toml --calibration FILE | --cluster FILE [OPTIONS]"
    plan.add_argument("config", metavar="CONFIG.toml", help="see examples/")
    plan.add_argument(
        "--calibration", metavar="FILE", help="this machine: from twofold calibrate --out FILE"
    )
    plan.add_argument("--cluster", metavar="FILE", help="such as examples/clusters/h100_node.toml")
    plan.add_argument(
        "--workload", metavar="FILE", help="lengths and rewards, instead of the calibration's runs'"
    )
    plan.add_argument(
        "--try",
        dest="tries",
        metavar="OPTION=N,N",
        action="append",
        default=[],
        help="this machine: values to try, such as sched.max_staleness=0,1,2; may come again",
    )
    plan.add_argument(
        "--timeline", metavar="FILE.json", help="the best one's trace, which ui.perfetto.dev opens"
    )
    plan.add_argument("--top", type=_count, default=20, help="rows to show (default: 20)")

    command("check", _check, "what this machine has, and what will be used")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 2^31 - 1")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def options_help() -> str:
    """Every option by section: name, kind or choices, default, help text."""
    width = max(80, min(shutil.get_terminal_size().columns, 120)) - 1
    lines = []
    section = ""
    for option in config.OPTIONS.values():
        if option.name.partition(".")[0] != section:
            section = option.name.partition(".")[0]
            lines += ["", f"[{section}]"]
        choices = f" ({', '.join(option.kind)})" if isinstance(option.kind, tuple) else ""
        wrapped = textwrap.wrap(
            f"{option.help}{choices} [{_shown(option.default)}]",
            width,
            initial_indent=f"  --{option.name}".ljust(_HELP_COLUMN - 1) + " ",
            subsequent_indent=" " * _HELP_COLUMN,
            break_on_hyphens=False,
        )
        lines += wrapped
    return "\n".join(["options of a run [default]:", *lines])


def _shown(value: object) -> str:
    if value in ("", {}, []):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
