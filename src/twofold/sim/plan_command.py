"""The command `twofold plan`: from options and files to the text that it prints.

Owns: bringing the parts together for each of the two questions (this machine, a cluster), and what
is said about where figures come from. Does not own: the searches (`here`, `plan`), their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from twofold.config import Config
from twofold.sim import here, plan, plan_words, timeline
from twofold.sim.calibrate import Calibration
from twofold.sim.cluster import Cluster, SampleTokens
from twofold.sim.plan import Job
from twofold.sim.plan_file import PlanFile
from twofold.sim.ranking import Progress, choose
from twofold.sim.run import choose_work
from twofold.sim.shape import Shape
from twofold.sim.workload import Recorded, Synthetic, Work, Workload

PREFIX = "simulated | "
_SAMPLED_GROUPS = 200  # that tell how long prompts and completions of a workload are


def plan_here(
    config: Config,
    calibration: Calibration,
    synthetic: Synthetic | None,
    tries: Mapping[str, Sequence[int]],
    most: int,
    trace: Path | None,
    progress: Progress | None = None,
) -> str:
    """This machine. ValueError as `here.plan_here`, and when `trace` cannot be written."""
    if trace is not None:
        timeline.check_writable(trace)
    found = here.variations(config, tries)
    rows = here.plan_here(found.configs, calibration, synthetic, progress)
    machine = ", ".join(f"{name} {value}" for name, value in calibration.machine.items())
    lines = [
        f"this machine, one card: costs fitted to {len(calibration.runs)} real runs ({machine})",
        f"work: {_work_words(choose_work(config, calibration, synthetic))}",
        f"{len(found.configs)} candidates, {config.train.steps} steps each, evaluations left out",
        "",
        here.table(rows, config, found, most),
    ]
    if trace is not None:
        here.write_timeline(trace, choose(rows), calibration, synthetic)
        lines.append(f"timeline of the best: {trace} (open it at ui.perfetto.dev)")
    return prefixed("\n".join(lines))


def plan_cluster(
    config: Config,
    file: PlanFile,
    shape: Shape,
    calibration: Calibration | None,
    synthetic: Synthetic | None,
    most: int,
    trace: Path | None,
    progress: Progress | None = None,
) -> str:
    """A cluster. Of a calibration only the groups are used: its seconds are those of another
    machine. ValueError as `plan.plan`, and when `trace` cannot be written."""
    if trace is not None:
        timeline.check_writable(trace)
    work = choose_work(config, calibration, synthetic)
    job = job_of(config, work)
    found = plan.plan(file.cluster, shape, job, file.search, progress)
    lines = [
        f"{_cluster_words(file.cluster)}; costs from its figures, not measured",
        f"model: {shape.name}, {shape.total_parameters / 1e9:.3g}e9 parameters, "
        f"{shape.active_parameters / 1e9:.3g}e9 a token",
        f"work: {_work_words(work)}; a step has {job.groups_per_step} groups of {job.group_size}",
        f"{len(found.rows)} candidates that fit, at least {file.search.n_steps} steps each from "
        f"the middle of a run; {len(found.refused)} that do not fit",
        "",
        plan_words.table(found, most),
    ]
    if trace is not None:
        plan.write_timeline(trace, file.cluster, shape, job, found.best, file.search)
        lines.append(f"timeline of the best: {trace} (open it at ui.perfetto.dev)")
    return prefixed("\n".join(lines))


def prefixed(text: str) -> str:
    """Every line says that it is simulated."""
    return "\n".join(f"{PREFIX}{line}".rstrip() for line in text.splitlines())


def job_of(config: Config, work: Work) -> Job:
    """What these options train, with that work."""
    assert isinstance(work, Workload | Synthetic | Recorded)
    return Job(
        groups_per_step=config.sched.groups_per_step,
        group_size=config.rollout.group_size,
        tokens=_tokens_of(work),
        workload=work,
        reference=config.train.kl_coef > 0,
        updates=config.train.updates_per_batch,
        dynamic_sampling=config.sched.dynamic_sampling,
        max_drops_per_step=config.sched.max_drops_per_step,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def _tokens_of(work: Workload | Synthetic | Recorded) -> SampleTokens:
    """Mean prompt and completion of the groups that the work begins with (recorded: of all), and
    the longest completion that there can be."""
    n = len(work.groups) if isinstance(work, Recorded) else _SAMPLED_GROUPS
    groups = work.groups if isinstance(work, Recorded) else [work.group(i) for i in range(n)]
    most = work.lengths.max_tokens if isinstance(work, Synthetic) else work.max_tokens
    lengths = [min(length, most) for group in groups for length in group.lengths]
    prompts = sum(group.prompt_tokens for group in groups) / n
    return SampleTokens(prompts, sum(lengths) / len(lengths), most)


def _work_words(work: Work) -> str:
    assert isinstance(work, Workload | Synthetic | Recorded)
    tokens = _tokens_of(work)
    source = {
        Recorded: "the groups of the calibration's runs",
        Synthetic: "the workload file",
        Workload: "invented (give --workload FILE, or --calibration FILE for recorded groups)",
    }[type(work)]
    return (
        f"{source}: prompts of {tokens.prompt_tokens:.0f} tokens and completions of "
        f"{tokens.mean_tokens:.0f} on average, {tokens.max_tokens} at most"
    )


def _cluster_words(cluster: Cluster) -> str:
    each = f"{cluster.supernodes} x {cluster.cards_per_supernode} cards"
    return f"cluster: {cluster.name}, {each} of {cluster.card.memory_bytes / 1e9:.0f} GB"
