"""Does the simulator predict real runs, and does the planner choose the best one?

    python bench/calibration.py [--repeats 3] [--steps 6] [--out runs/calibration]

Runs variations of `examples/quickstart.toml` for real, in turn, each as often as `--repeats` says
with a seed of its own, on one thread: some to calibrate from, others to predict. All do the same
kind of work and differ in how it is scheduled: the learning rate is next to nothing, and rewards
differ within every group, so that each is trained. Small batches keep it at a minute a run. Runs
that are there already (same --out) are not repeated. Then:

1. `twofold calibrate` from the first kind, predictions of the others beside the medians and the
   spread of the real repeats: seconds a step, mean staleness. `own groups`: simulated with what
   each run sampled itself, so that only seconds and order can be wrong.
2. Among the twelve that do the same job, the planner's choice against the best real one.

The last line is one JSON object. Everything is real unless it says simulated.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
from collections.abc import Sequence
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from twofold.config import Config, load_config
from twofold.runtime.spec import scheduler_spec
from twofold.sim import calibrate, here, ranking
from twofold.sim.observe import Measured, observe
from twofold.threads import bind_threads, usable_cpus

ROOT = Path(__file__).parent.parent
NOTHING = 1e-12  # a learning rate
DRAWS = 20


class Setting(NamedTuple):
    staleness: int = 1
    running: int = 16  # rollout.max_running_samples
    quantum: int = 12  # rollout.quantum_decode_steps
    groups: int = 2  # sched.groups_per_step
    longest: int = 24  # rollout.max_new_tokens

    @property
    def name(self) -> str:
        return "s{}-r{}-q{}-p{}-l{}".format(*self)


FITTED = [Setting(1, 16, 12), Setting(1, 8, 4, groups=4), Setting(0, 16, 4)]
SAME_JOB = [Setting(*values) for values in product((0, 1, 2), (8, 16), (4, 12))]
OTHERS = [Setting(4), Setting(1, groups=3), Setting(0, groups=4), Setting(1, longest=12)]
FIRST_SEED = {"fitted": 100, "predicted": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration"))
    arguments = parser.parse_args()
    # one thread on one core: what else runs here takes another
    os.sched_setaffinity(0, {max(usable_cpus())})
    print(bind_threads(1), flush=True)
    out, repeats = arguments.out, range(arguments.repeats)
    warm_up = options(Setting(), 0, out, 2)  # the first steps of a process are slower
    warm_up.run.dir = str(out / "warm-up")
    (out / "warm-up/done").unlink(missing_ok=True)
    run(warm_up)
    for repeat in repeats:
        for kind, settings in (("fitted", FITTED), ("predicted", [*SAME_JOB, *OTHERS])):
            for setting in rotated(settings, repeat):
                run(options(setting, FIRST_SEED[kind] + repeat, out, arguments.steps))
    report(out, repeats, arguments.steps)


def rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    """Begun elsewhere in each repeat, so that a slow minute does not always meet the same one."""
    by = by * len(settings) // 3 % len(settings)
    return [*settings[by:], *settings[:by]]


# ---------------------------------------------------------------- real runs


def uneven(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """A reward that differs within every group, so that every sample is trained."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def options(setting: Setting, seed: int, out: Path, steps: int) -> Config:
    given = {
        "sched.max_staleness": setting.staleness,
        "sched.groups_per_step": setting.groups,
        "rollout.max_running_samples": setting.running,
        "rollout.quantum_decode_steps": setting.quantum,
        "rollout.max_new_tokens": setting.longest,
        "rollout.group_size": 4,
        "train.steps": steps,
        "reward.function": f"{ROOT}/bench/calibration.py:uneven",
        "train.learning_rate": NOTHING,
        "task.held_out": 1,
        "run.eval_samples": 1,
        "run.checkpoint_every": 0,
        "run.save_model": "false",
        "run.tensorboard": "false",
        "run.threads": 1,
        "run.seed": seed,
        "run.dir": out / f"{setting.name}-seed{seed}",
    }
    words = [f"--{name}={value}" for name, value in given.items()]
    return load_config(str(ROOT / "examples/quickstart.toml"), words)


def run(config: Config) -> None:
    """Skipped if it is there; what a cut one left is removed. Its checkpoint is not kept."""
    from twofold.obs.progress import Progress
    from twofold.runtime.run import train

    folder = Path(config.run.dir)
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with Progress(StringIO()) as progress:
        train(config, progress=progress)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "done").touch()
    gc.collect()
    print(f"{folder.name}: {real(folder).step_s:.3g} s a step", flush=True)


def real(folder: Path) -> Measured:
    return observe(folder).measured


# ---------------------------------------------------------------- predictions


class Line(NamedTuple):
    setting: Setting
    step_s: list[float]  # real, of the repeats
    staleness: list[float]  # real
    simulated: Measured
    own: list[Measured]  # simulated with the groups of each repeat itself

    @property
    def real_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def real_staleness(self) -> float:
        """Their mean, as the simulated one is the mean over many orders."""
        return statistics.fmean(self.staleness)

    @property
    def error(self) -> float:
        return self.simulated.step_s / self.real_s - 1

    @property
    def own_error(self) -> float:
        return statistics.median(own.step_s for own in self.own) / self.real_s - 1

    @property
    def own_staleness(self) -> float:
        """The largest difference of a run with its own groups."""
        pairs = zip(self.own, self.staleness, strict=True)
        return max((own.staleness - real for own, real in pairs), key=abs)

    @property
    def spread(self) -> float:
        """Half of the range of the repeats, as a share of their median."""
        return (max(self.step_s) - min(self.step_s)) / 2 / self.real_s


def report(out: Path, repeats: Sequence[int], steps: int) -> None:
    def folders(settings: Sequence[Setting], kind: str) -> list[Path]:
        seeds = [FIRST_SEED[kind] + repeat for repeat in repeats]
        return [out / f"{setting.name}-seed{seed}" for setting in settings for seed in seeds]

    fitted = calibrate.calibrate(folders(FITTED, "fitted"))
    print(calibrate.report(fitted) + "\n")
    lines = []
    for setting in [*SAME_JOB, *OTHERS]:
        made = calibrate.predict(fitted, folders([setting], "predicted"))
        lines.append(
            Line(
                setting,
                [prediction.real.step_s for prediction in made],
                [prediction.real.staleness for prediction in made],
                simulated(fitted, options(setting, 0, out, steps)),
                [prediction.own_groups for prediction in made],
            )
        )
    print_lines(lines)
    choice = print_choice(lines[: len(SAME_JOB)], choose(fitted, out, steps))
    print(json.dumps(summary(lines, choice, steps, len(repeats))))


HEAD = (
    f"{'S running quantum groups longest':<33}{'s/step':>8}{'spread':>8}{'simulated':>11}"
    f"{'error':>8}{'own groups':>11}  {'staleness':>10}{'simulated':>10}{'error':>7}"
    f"{'own groups':>11}"
)


def simulated(fitted: calibrate.Calibration, config: Config) -> Measured:
    """Of a run with these options, the mean over `DRAWS` orders of the calibration's groups: a run
    of a dozen groups depends on who comes first."""
    made = []
    for seed in range(DRAWS):
        groups = random.Random(seed).sample(fitted.groups, len(fitted.groups))
        work = calibrate.recorded(groups, config)
        made.append(calibrate.simulate(fitted.costs, work, scheduler_spec(config)))
    return Measured(*map(statistics.fmean, zip(*made, strict=True)))


def print_lines(lines: Sequence[Line]) -> None:
    """The first figures of a line are real, of the repeats: the median of the seconds, `spread`
    half their range, the mean of the staleness."""
    print(HEAD)
    for line in lines:
        s = line.setting
        name = f"{s.staleness} {s.running:>7} {s.quantum:>7} {s.groups:>6} {s.longest:>7}"
        print(
            f"{name:<33}{line.real_s:>8.3g}{line.spread:>8.1%}{line.simulated.step_s:>11.3g}"
            f"{line.error:>+8.1%}{line.own_error:>+11.1%}  {line.real_staleness:>10.3f}"
            f"{line.simulated.staleness:>10.3f}"
            f"{line.simulated.staleness - line.real_staleness:>+7.3f}{line.own_staleness:>+11.4f}"
        )


def choose(fitted: calibrate.Calibration, out: Path, steps: int) -> Setting:
    """What the planner takes among the twelve."""
    configs = {setting: options(setting, 0, out, steps) for setting in SAME_JOB}
    best = ranking.choose(here.plan_here(list(configs.values()), fitted))
    return next(setting for setting, config in configs.items() if config is best.config)


def print_choice(lines: Sequence[Line], choice: Setting) -> dict[str, Any]:
    """Lost is what the planner's choice costs against the best real one."""
    chosen = next(line for line in lines if line.setting == choice)
    best = min(lines, key=lambda line: line.real_s)
    spread = max(chosen.spread, best.spread)
    lost = chosen.real_s / best.real_s - 1
    slowest = max(line.real_s for line in lines)
    print(
        f"\nthe planner takes {chosen.setting.name}: {chosen.real_s:.3g} s a step; the best of the "
        f"{len(lines)} measured is {best.setting.name}: {best.real_s:.3g} s (spread {spread:.1%}), "
        f"the slowest {slowest:.3g} s; lost {lost:.1%}"
    )
    return {"chosen": chosen.setting.name, "best": best.setting.name, "lost": round(lost, 4),
            "spread": round(spread, 4)}  # fmt: skip


def summary(
    lines: Sequence[Line], choice: dict[str, Any], steps: int, repeats: int
) -> dict[str, Any]:
    return {
        "steps": steps,
        "repeats": repeats,
        "largest_step_error": round(max(abs(line.error) for line in lines), 4),
        "median_step_error": round(statistics.median(abs(line.error) for line in lines), 4),
        "largest_own_groups_error": round(max(abs(line.own_error) for line in lines), 4),
        "largest_staleness_error": round(
            max(abs(line.simulated.staleness - line.real_staleness) for line in lines), 4
        ),
        "largest_own_groups_staleness_error": round(
            max(abs(line.own_staleness) for line in lines), 4
        ),
        "choice": choice,
    }


if __name__ == "__main__":
    main()
