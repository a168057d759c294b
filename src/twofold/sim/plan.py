"""The planner for clusters: which layout of a run is the fastest, what fits and what does not.

Owns: the candidates (placement, split, staleness, quantum, batch shape, memory options), simulating
each with the real scheduler. Does not own: seconds and bytes (`cluster`), one simulation
(`window`), the choice among results (`ranking`), the words (`plan_words`), one real card (`here`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from twofold.sched.placement import Placement
from twofold.sched.spec import SchedulerSpec
from twofold.sim import timeline
from twofold.sim.cluster import Cluster, Layout, SampleTokens, costs, memory, missing
from twofold.sim.cost import Costs
from twofold.sim.ranking import Progress, choose, ranked
from twofold.sim.shape import Shape
from twofold.sim.window import Entry
from twofold.sim.window import Outcome as Outcome
from twofold.sim.window import simulate as simulate
from twofold.sim.workload import Recorded, Synthetic, Work, Workload
from twofold.types import Phase

# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Job:
    """What is trained: `groups_per_step` prompts x `group_size` samples a step, as `updates` of the
    optimizer. `tokens` describes what `workload` draws, for the seconds and bytes. ValueError for
    what does not go together."""

    groups_per_step: int
    group_size: int
    tokens: SampleTokens
    workload: Workload | Synthetic | Recorded
    reference: bool = False
    updates: int = 1
    dynamic_sampling: bool = False
    max_drops_per_step: int = 32
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        work_of_size(self.workload, self.group_size)


@dataclass(frozen=True)
class Search:
    """What is tried. Empty `cards_per_replica`: the powers of two on which the weights fit, the
    three smallest. `splits`: shares of the cards that only generate, in separated placements.
    `quanta`: decode steps; empty: 1/16 and 1/4 of the longest completion. `group_shapes`: (prompts,
    samples) a step; empty: the job's.

    `recompute`: shares of the forward pass that may be done again to save activations; of those
    that fit, the smallest. `swap_optimizer`: the second is tried where the first does not fit, or
    leaves no room for the samples in flight. `same_layout`: shared cards read one storage for both
    jobs (assumed, not searched). ValueError for what cannot be.
    """

    staleness: tuple[int, ...] = (0, 1, 2)
    cards_per_replica: tuple[int, ...] = ()
    splits: tuple[float, ...] = (0.25, 0.5, 0.75)
    quanta: tuple[int, ...] = ()
    group_shapes: tuple[tuple[int, int], ...] = ()
    recompute: tuple[float, ...] = (0.0, 0.5, 1.0)
    swap_optimizer: tuple[bool, ...] = (False, True)
    same_layout: bool = False
    n_steps: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"staleness": 0, "cards_per_replica": 1, "quanta": 1}
        for name, low in least.items():
            for value in getattr(self, name):
                if value < low:
                    raise ValueError(f"search.{name} = {value}: give {low} or more")
        for shape in self.group_shapes:
            if len(shape) != 2 or min(shape) < 1:
                raise ValueError(f"search.group_shapes = {list(shape)}: give [prompts, samples]")
        for name, most in (("splits", "between 0 and 1"), ("recompute", "from 0 to 1")):
            for value in getattr(self, name):
                if not 0 <= value <= 1 or (name == "splits" and value in (0, 1)):
                    raise ValueError(f"search.{name} = {value:g}: give a share {most}")
        for name in ("staleness", "recompute", "swap_optimizer"):
            if not getattr(self, name):
                raise ValueError(f"search.{name} = []: give one value at least")
        if self.n_steps < 1:
            raise ValueError(f"search.n_steps = {self.n_steps}: give 1 or more")


class Candidate(NamedTuple):
    """One way to run the job."""

    placement: Placement
    staleness: int
    quantum: int
    groups_per_step: int
    group_size: int
    recomputed: float = 0.0
    swap_optimizer: bool = False

    @property
    def name(self) -> str:
        p = self.placement
        split = ""
        if p.generate_only:
            split = f" {p.generate_only}+{p.train_only}"
        elif p.score_only:
            split = f" {p.both}+{p.score_only}"
        return f"{p.name}{split}"


class Row(NamedTuple):
    candidate: Candidate
    outcome: Outcome
    memory: dict[Phase, float]  # bytes of the busiest card
    slots: int  # a replica

    @property
    def max_staleness(self) -> int:
        return self.candidate.staleness


class Refused(NamedTuple):
    """With the memory options that take the least."""

    candidate: Candidate
    missing: dict[Phase, float]  # bytes of a card


class Plan(NamedTuple):
    """`rows`: fastest first, `best` by `ranking.choose`."""

    rows: list[Row]
    refused: list[Refused]
    best: Row


def plan(
    cluster: Cluster,
    shape: Shape,
    job: Job,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Simulates every candidate that fits. ValueError when none does, saying by how much."""
    search = search or Search()
    fitting: list[Candidate] = []
    refused: list[Refused] = []
    for candidate in candidates(cluster, shape, job, search):
        found = with_memory_options(cluster, shape, job, candidate, search)
        if isinstance(found, Refused):
            refused.append(found)
        else:
            fitting += found
    if not fitting:
        raise ValueError(_nothing_fits(refused))
    rows: list[Row] = []
    for n, candidate in enumerate(fitting, 1):
        layout = layout_of(cluster, shape, job, candidate, search)
        spec, workload, seconds = _inputs(cluster, shape, job, candidate, layout)
        outcome = simulate(spec, workload, seconds, search.seed, search.n_steps)
        rows.append(Row(candidate, outcome, memory(shape, layout, job.tokens), layout.slots))
        if progress is not None:
            progress(n, len(fitting))
    rows = ranked(rows)
    return Plan(rows, refused, choose(rows))


def write_timeline(
    path: Path, cluster: Cluster, shape: Shape, job: Job, best: Row, search: Search
) -> None:
    """Of that run, simulated once more. OSError when it cannot be written."""
    layout = layout_of(cluster, shape, job, best.candidate, search)
    spec, workload, seconds = _inputs(cluster, shape, job, best.candidate, layout)
    entries: list[Entry] = []
    simulate(spec, workload, seconds, search.seed, search.n_steps, entries)
    timeline.write(path, entries, spec.placement)


# ---------------------------------------------------------------- candidates


def candidates(cluster: Cluster, shape: Shape, job: Job, search: Search) -> list[Candidate]:
    """In a fixed order, without memory options. ValueError when there is none."""
    longest = job.tokens.max_tokens
    quanta = search.quanta or tuple(sorted({max(1, longest // 16), max(1, longest // 4)}))
    shapes = search.group_shapes or ((job.groups_per_step, job.group_size),)
    replicas = search.cards_per_replica or _replicas(cluster, shape)
    staleness = [s for s in search.staleness if s + 1 >= job.updates]
    if not staleness:
        raise ValueError(
            f"train.updates_per_batch = {job.updates}: none of the searched staleness "
            f"({', '.join(map(str, search.staleness))}) allows it; search {job.updates - 1} or more"
        )
    placements: dict[Placement, None] = {}
    for n in replicas:
        placements.update((p, None) for p in _placements(cluster.cards, n, job, search))
    if not placements:
        raise ValueError(
            f"search.cards_per_replica = {', '.join(map(str, replicas))}: none divides the "
            f"{cluster.cards} cards; give one that does"
        )
    return [
        Candidate(placement, s, quantum, p, g)
        for placement in placements
        for s in staleness
        for quantum in quanta
        for p, g in shapes
    ]


def with_memory_options(
    cluster: Cluster, shape: Shape, job: Job, candidate: Candidate, search: Search
) -> list[Candidate] | Refused:
    """The candidate with the memory options that are worth simulating: without a swapped optimizer
    if that fits, and with one if it does not or leaves too little room for the cache; each with the
    smallest share of recomputation that fits."""
    found: list[Candidate] = []
    lacks: dict[Phase, float] = {}
    for swap in sorted(search.swap_optimizer):
        for share in sorted(search.recompute):
            tried = candidate._replace(recomputed=share, swap_optimizer=swap)
            layout = layout_of(cluster, shape, job, tried, search)
            lacks = missing(cluster, memory(shape, layout, job.tokens))
            if not lacks:
                found.append(tried)
                break
        if found and layout.slots == _wanted_slots(candidate):
            break
    return found or Refused(tried, lacks)


def layout_of(
    cluster: Cluster, shape: Shape, job: Job, candidate: Candidate, search: Search
) -> Layout:
    """With as many slots as the memory holds, but no more samples than can be live."""
    placement = candidate.placement
    layout = Layout(
        cards_per_replica=placement.cards_per_replica,
        train_cards=placement.both + placement.train_only,
        slots=1,
        shared=placement.both > 0,
        same_layout=search.same_layout and placement.both > 0,
        swap_optimizer=candidate.swap_optimizer,
        reference=job.reference and not placement.score_only,
        recomputed=candidate.recomputed,
        micro_batch_tokens=job.micro_batch_tokens,
    )
    one = memory(shape, layout, job.tokens)[Phase.GENERATE]
    each = memory(shape, replace(layout, slots=2), job.tokens)[Phase.GENERATE] - one
    room = cluster.card.memory_bytes * cluster.card.usable_share - one
    return replace(layout, slots=max(1, min(_wanted_slots(candidate), 1 + math.floor(room / each))))


def _wanted_slots(candidate: Candidate) -> int:
    """Of a replica, for all samples that can be live."""
    live = (candidate.staleness + 1) * candidate.groups_per_step * candidate.group_size
    return -(-live // n_replicas(candidate.placement))


def n_replicas(placement: Placement) -> int:
    return (placement.both + placement.generate_only) // placement.cards_per_replica


def _inputs(
    cluster: Cluster, shape: Shape, job: Job, candidate: Candidate, layout: Layout
) -> tuple[SchedulerSpec, Work, Costs]:
    """What a simulation of it takes."""
    placement = candidate.placement
    batch = candidate.groups_per_step * candidate.group_size
    running = min(layout.slots, -(-batch // n_replicas(placement)))
    seconds = costs(cluster, shape, layout, job.tokens, running)
    seconds = replace(seconds, train_s=job.updates * seconds.train_s)
    if placement.score_only:
        slower = layout.train_cards / placement.score_only
        seconds = replace(seconds, score_token_s=seconds.score_token_s * slower)
    spec = SchedulerSpec(
        steps=0,
        groups_per_step=candidate.groups_per_step,
        group_size=candidate.group_size,
        max_staleness=candidate.staleness,
        max_running_samples=layout.slots,
        quantum_decode_steps=candidate.quantum,
        max_drops_per_step=job.max_drops_per_step,
        updates_per_batch=job.updates,
        dynamic_sampling=job.dynamic_sampling,
        needs_reference=job.reference,
        placement=placement,
    )
    return spec, work_of_size(job.workload, candidate.group_size), seconds


def work_of_size(work: Workload | Synthetic | Recorded, group_size: int) -> Work:
    """The same work in groups of that many samples. ValueError for recorded groups of another
    size."""
    if not isinstance(work, Recorded):
        return replace(work, group_size=group_size)
    has = len(work.groups[0].lengths)
    if has != group_size:
        raise ValueError(
            f"group_size = {group_size}: the recorded groups have {has} samples; make them equal, "
            "or give a workload"
        )
    return work


def _replicas(cluster: Cluster, shape: Shape) -> tuple[int, ...]:
    """Powers of two that divide the cards, from the smallest that can hold the weights."""
    has = cluster.card.memory_bytes * cluster.card.usable_share
    powers = [2**k for k in range(cluster.cards.bit_length()) if cluster.cards % 2**k == 0]
    fitting = [n for n in powers if shape.weight_bytes / n < has]
    return tuple(fitting[:3] or powers[-1:])


def _placements(n_cards: int, n: int, job: Job, search: Search) -> Iterable[Placement]:
    """Those of `n` cards a replica: all cards with both jobs; with a reference, an eighth of them
    that only score; separated."""
    if n_cards % n:
        return
    yield Placement(n_cards, cards_per_replica=n)
    scoring = max(1, round(n_cards / 8 / n)) * n
    if job.reference and scoring < n_cards:
        yield Placement(n_cards, score_only=scoring, cards_per_replica=n)
    for share in search.splits:
        generating = round(share * n_cards / n) * n
        if 0 < generating < n_cards:
            yield Placement(
                n_cards,
                generate_only=generating,
                train_only=n_cards - generating,
                cards_per_replica=n,
            )


def _nothing_fits(refused: Sequence[Refused]) -> str:
    least = min(refused, key=lambda r: max(r.missing.values()))
    phase, lacks = max(least.missing.items(), key=lambda item: item[1])
    c = least.candidate
    return (
        f"nothing fits: {c.name} with {c.placement.cards_per_replica} cards a replica comes "
        f"closest and lacks {lacks / 1e9:.1f} GB a card in {phase}, {memory_options(c)}; use more "
        "cards, or cards with more memory"
    )


def memory_options(candidate: Candidate) -> str:
    where = "on the host" if candidate.swap_optimizer else "on the card"
    return f"optimizer {where}, {candidate.recomputed:.0%} recomputed"
