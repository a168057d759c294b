"""The planner: which layout of a run is the fastest on a cluster, and why.

Owns: the candidates, simulating each with the real scheduler, measuring a simulation (tokens a
second, staleness, where the cards' time went), the ranking and its words, a timeline for Perfetto.
Does not own: seconds and bytes (`cluster`), the rule (`sched`), lengths (`workload`).

A candidate is measured between two updates, after the first ones and before the last, so that
neither the empty start nor the end of a run, where nothing new starts, counts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from twofold import events as ev
from twofold.events import Command, Event
from twofold.runtime.loop import drive
from twofold.sched.idle import Idle
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler
from twofold.sched.spec import SchedulerSpec
from twofold.sim.cluster import Cluster, Layout, SampleTokens, costs, memory, missing
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.shape import Shape
from twofold.sim.workload import Workload
from twofold.types import Phase

WORTHWHILE = 0.02  # a gain below this is no reason to train on stale tokens

Entry = tuple[float, Event, Sequence[Command]]
"""When an event came, the event, the commands it caused."""


# ---------------------------------------------------------------- one simulation


class Outcome(NamedTuple):
    """Of a simulated run, between two updates. Shares of the time of all cards: `busy` by kind of
    command, `idle` by cause (`sched.idle.Cause`); they sum to 1. `staleness`: shares of the trained
    tokens. Tokens are sampled tokens that were trained; prompts do not count."""

    tokens_per_s: float
    seconds_per_step: float
    staleness: dict[int, float]
    busy: dict[str, float]
    idle: dict[str, float]

    @property
    def mean_staleness(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


class _Meter:
    """Meets `runtime.loop.Recorder`: adds up what happens from one version to another."""

    def __init__(self, scheduler: Scheduler, executor: SimExecutor, first: int, last: int) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.first, self.last = first, last
        self.start_s = self.end_s = math.nan
        self.busy: defaultdict[str, float] = defaultdict(float)  # card-seconds
        self.idle: defaultdict[str, float] = defaultdict(float)  # card-seconds
        self.trained: Counter[int] = Counter()
        self._issued: dict[int, tuple[float, Command]] = {}
        self._causes: list[tuple[str, int]] = []  # that hold since the last event, with cards
        self._last_s = 0.0

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        inside = math.isnan(self.end_s) and not math.isnan(self.start_s)
        if inside:
            for cause, n_cards in self._causes:
                self.idle[cause] += (now_s - self._last_s) * n_cards
        if isinstance(event, ev.Terminal):
            issued_s, command = self._issued.pop(event.command)
            if inside:
                self._count(command, issued_s, now_s)
        if isinstance(event, ev.Published):
            self._published(event.version, now_s)
        self._issued.update((command.seq, (now_s, command)) for command in commands)
        self._last_s = now_s
        if math.isnan(self.end_s):
            units = self.scheduler.units
            self._causes = [
                (str(cause), len(units[index].unit.cards))
                for index, cause in Idle(self.scheduler).causes().items()
            ]

    def _published(self, version: int, now_s: float) -> None:
        if version == self.first:
            self.start_s = now_s
            self.trained = self.executor.staleness.copy()
        elif version == self.last:
            for issued_s, command in self._issued.values():
                self._count(command, issued_s, now_s)
            self.end_s = now_s
            self.trained = self.executor.staleness - self.trained

    def _count(self, command: Command, issued_s: float, now_s: float) -> None:
        self.busy[command.kind] += (now_s - max(issued_s, self.start_s)) * len(command.cards)


def simulate(
    spec: SchedulerSpec, workload: Workload, seconds: Costs, seed: int = 0, n_steps: int = 3
) -> Outcome:
    """Runs the real scheduler on a virtual clock and measures `n_steps` steps in the middle of it;
    `spec.steps` is replaced. RuntimeError with the run's outcome if it ends otherwise than done."""
    lead = spec.batches_ahead + 1  # steps until the stream is full, and until it has drained
    spec = replace(spec, steps=n_steps + 2 * lead, evaluate=False, checkpoint_every=0)
    scheduler, u = Scheduler(spec), spec.updates_per_batch
    executor = SimExecutor(workload, spec, costs=seconds, seed=seed)
    meter = _Meter(scheduler, executor, u * lead, u * (lead + n_steps))
    outcome = drive(scheduler, executor, meter, ev.RunStarted())
    if outcome != "done":
        raise RuntimeError(f"the simulated run ended: {outcome}")
    window_s = meter.end_s - meter.start_s
    n_tokens, card_s = meter.trained.total(), window_s * spec.placement.cards
    return Outcome(
        tokens_per_s=n_tokens / window_s,
        seconds_per_step=window_s / n_steps,
        staleness={age: n / n_tokens for age, n in sorted(meter.trained.items())},
        busy=_shares(meter.busy, card_s),
        idle=_shares(meter.idle, card_s),
    )


def _shares(seconds: Mapping[str, float], of_s: float) -> dict[str, float]:
    """The largest first."""
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: s / of_s for name, s in largest if s > 0}


# ---------------------------------------------------------------- the search


@dataclass(frozen=True)
class Job:
    """What is trained: `groups_per_step` prompts x `group_size` samples a step. `tokens` describes
    what `workload` draws, for the seconds and bytes."""

    groups_per_step: int
    group_size: int
    tokens: SampleTokens
    workload: Workload
    reference: bool = False
    swap_optimizer: bool = False
    same_layout: bool = False  # shared cards read one storage for both jobs

    def __post_init__(self) -> None:
        if self.workload.group_size != self.group_size:
            raise ValueError(
                f"group_size = {self.group_size}: the workload has groups of "
                f"{self.workload.group_size}; make them equal"
            )


@dataclass(frozen=True)
class Search:
    """What is tried. Empty `cards_per_replica`: the powers of two on which the weights fit, the
    three smallest. `splits`: shares of the cards that only generate, in separated placements.
    `quanta`: decode steps; empty: 1/16 and 1/4 of the longest completion. `group_shapes`: (prompts,
    samples) a step; empty: the job's."""

    staleness: tuple[int, ...] = (0, 1, 2)
    cards_per_replica: tuple[int, ...] = ()
    splits: tuple[float, ...] = (0.25, 0.5, 0.75)
    quanta: tuple[int, ...] = ()
    group_shapes: tuple[tuple[int, int], ...] = ()
    n_steps: int = 3
    seed: int = 0


class Candidate(NamedTuple):
    """One way to run the job."""

    placement: Placement
    staleness: int
    quantum: int
    groups_per_step: int
    group_size: int

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


class Refused(NamedTuple):
    candidate: Candidate
    missing: dict[Phase, float]  # bytes of a card


class Plan(NamedTuple):
    """`rows`: fastest first. `best`: what to run, which is the fastest synchronous one where
    asynchrony gains less than `WORTHWHILE`. `why`: that in words."""

    rows: list[Row]
    refused: list[Refused]
    best: Row
    why: str


def plan(cluster: Cluster, shape: Shape, job: Job, search: Search | None = None) -> Plan:
    """Simulates every candidate that fits. ValueError when none does, saying by how much."""
    search = search or Search()
    rows: list[Row] = []
    refused: list[Refused] = []
    for candidate in candidates(cluster, shape, job, search):
        layout = layout_of(cluster, shape, job, candidate)
        needs = memory(shape, layout, job.tokens)
        if lacks := missing(cluster, needs):
            refused.append(Refused(candidate, lacks))
            continue
        rows.append(Row(candidate, _run(cluster, shape, job, candidate, layout, search), needs))
    if not rows:
        raise ValueError(_nothing_fits(refused))
    rows.sort(key=lambda row: -row.outcome.tokens_per_s)
    best = _best(rows)
    return Plan(rows, refused, best, _why(rows, best))


def candidates(cluster: Cluster, shape: Shape, job: Job, search: Search) -> list[Candidate]:
    """In a fixed order. ValueError when the cluster can hold no replica at all."""
    longest = job.tokens.max_tokens
    quanta = search.quanta or tuple(sorted({max(1, longest // 16), max(1, longest // 4)}))
    shapes = search.group_shapes or ((job.groups_per_step, job.group_size),)
    replicas = search.cards_per_replica or _replicas(cluster, shape)
    placements: dict[Placement, None] = {}
    for n in replicas:
        placements.update((p, None) for p in _placements(cluster.cards, n, job, search))
    if not placements:
        raise ValueError(
            f"cards_per_replica = {', '.join(map(str, replicas))}: none divides the "
            f"{cluster.cards} cards"
        )
    return [
        Candidate(placement, staleness, quantum, p, g)
        for placement in placements
        for staleness in search.staleness
        for quantum in quanta
        for p, g in shapes
    ]


def layout_of(cluster: Cluster, shape: Shape, job: Job, candidate: Candidate) -> Layout:
    """With as many slots as the memory holds, but no more samples than can be live."""
    placement = candidate.placement
    layout = Layout(
        cards_per_replica=placement.cards_per_replica,
        train_cards=placement.both + placement.train_only,
        slots=1,
        shared=placement.both > 0,
        same_layout=job.same_layout,
        swap_optimizer=job.swap_optimizer,
        reference=job.reference and not placement.score_only,
    )
    live = (candidate.staleness + 1) * candidate.groups_per_step * candidate.group_size
    wanted = -(-live // n_replicas(placement))
    one = memory(shape, layout, job.tokens)[Phase.GENERATE]
    each = memory(shape, replace(layout, slots=2), job.tokens)[Phase.GENERATE] - one
    room = cluster.card.memory_bytes * cluster.card.usable_share - one
    return replace(layout, slots=max(1, min(wanted, 1 + math.floor(room / each))))


def n_replicas(placement: Placement) -> int:
    return (placement.both + placement.generate_only) // placement.cards_per_replica


def _run(
    cluster: Cluster, shape: Shape, job: Job, candidate: Candidate, layout: Layout, search: Search
) -> Outcome:
    placement = candidate.placement
    batch = candidate.groups_per_step * candidate.group_size
    running = min(layout.slots, -(-batch // n_replicas(placement)))
    seconds = costs(cluster, shape, layout, job.tokens, running)
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
        needs_reference=job.reference,
        placement=placement,
    )
    workload = replace(job.workload, group_size=candidate.group_size)
    return simulate(spec, workload, seconds, search.seed, search.n_steps)


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


# ---------------------------------------------------------------- words


def _best(rows: Sequence[Row]) -> Row:
    """`rows` are sorted. Of several that are as fast, the one with the least staleness."""
    synchronous = next((row for row in rows if row.candidate.staleness == 0), None)
    if synchronous is None:
        return rows[0]
    gain = rows[0].outcome.tokens_per_s / synchronous.outcome.tokens_per_s - 1
    return synchronous if gain < WORTHWHILE else rows[0]


def _why(rows: Sequence[Row], best: Row) -> str:
    """What the best one does better than the best of another placement, and what staleness buys."""
    name, speed = best.candidate.placement.name, best.outcome.tokens_per_s
    words = [f"{_describe(best)}: {speed:,.0f} tokens/s."]
    others = (row for row in rows if row.candidate.placement.name != name)
    other = next(others, None)
    if other is not None:
        ahead = speed / other.outcome.tokens_per_s - 1
        waits = sum(other.outcome.idle.values())
        more = "ahead of" if ahead >= 0 else "behind"
        words.append(
            f"{abs(ahead):.0%} {more} the best {other.candidate.name}, whose cards wait "
            f"{waits:.0%} of the time{_most(other.outcome.idle)}; here "
            f"{sum(best.outcome.idle.values()):.0%}{_most(best.outcome.idle)}."
        )
    words.append(_asynchrony(rows))
    return " ".join(word for word in words if word)


def _asynchrony(rows: Sequence[Row]) -> str:
    synchronous = next((row for row in rows if row.candidate.staleness == 0), None)
    stale = next((row for row in rows if row.candidate.staleness > 0), None)
    if synchronous is None or stale is None:
        return ""
    gain = stale.outcome.tokens_per_s / synchronous.outcome.tokens_per_s - 1
    if gain < WORTHWHILE:
        return (
            f"Asynchrony does not help here: the best with S > 0 gains {gain:+.1%} over the best "
            "with S = 0. Run with S = 0."
        )
    return (
        f"Asynchrony gains {gain:.0%}: S = {stale.candidate.staleness} against S = 0, which waits "
        f"{sum(synchronous.outcome.idle.values()):.0%}{_most(synchronous.outcome.idle)}; its "
        f"trained tokens are {stale.outcome.mean_staleness:.2f} versions old on average."
    )


def _most(idle: Mapping[str, float]) -> str:
    cause = max(idle, key=lambda name: idle[name], default="")
    return f" (most for {cause})" if idle.get(cause, 0.0) >= 0.01 else ""


def _describe(row: Row) -> str:
    c = row.candidate
    return (
        f"{c.name}, S = {c.staleness}, {c.placement.cards_per_replica} cards a replica, quantum "
        f"{c.quantum}"
    )


def _nothing_fits(refused: Sequence[Refused]) -> str:
    least = min(refused, key=lambda r: max(r.missing.values()))
    phase, lacks = max(least.missing.items(), key=lambda item: item[1])
    c = least.candidate
    return (
        f"nothing fits: {c.name} with {c.placement.cards_per_replica} cards a replica comes "
        f"closest and lacks {lacks / 1e9:.1f} GB a card in {phase}; use more cards or "
        "swap_optimizer"
    )


HEAD = (
    f"{'placement':<24}{'replica':>8}{'S':>3}{'quantum':>8}{'prompts':>8}{'tokens/s':>10}"
    f"{'s/step':>9}{'stale':>6}{'busy':>6}  peak GB: generate, train, score; idle by cause"
)


def table(found: Plan, most: int = 20) -> str:
    """The `most` fastest rows, what was refused, why the best is the best. Simulated figures."""
    lines = [HEAD, *(_line(row, row is found.best) for row in found.rows[:most])]
    if len(found.rows) > most:
        lines.append(f"... and {len(found.rows) - most} slower ones")
    lacking: dict[tuple[str, int], Refused] = {}
    for refused in found.refused:
        lacking.setdefault(
            (refused.candidate.name, refused.candidate.placement.cards_per_replica), refused
        )
    for (name, n), refused in lacking.items():
        lacks = ", ".join(f"{gap / 1e9:.1f} GB in {p}" for p, gap in refused.missing.items())
        lines.append(f"does not fit: {name}, {n} cards a replica: a card lacks {lacks}")
    return "\n".join([*lines, f"simulated. {found.why}"])


def _line(row: Row, best: bool) -> str:
    c, o = row.candidate, row.outcome
    peaks = ", ".join(f"{n_bytes / 1e9:.0f}" for n_bytes in row.memory.values())
    idle = ", ".join(f"{cause} {share:.0%}" for cause, share in o.idle.items() if share >= 0.005)
    return (
        f"{'* ' if best else '  '}{c.name:<22}{c.placement.cards_per_replica:>8}{c.staleness:>3}"
        f"{c.quantum:>8}{c.groups_per_step:>8}{o.tokens_per_s:>10,.0f}{o.seconds_per_step:>9.1f}"
        f"{o.mean_staleness:>6.2f}{sum(o.busy.values()):>6.0%}  {peaks}; {idle or 'none'}"
    )


# ---------------------------------------------------------------- timeline


@dataclass
class History:
    """Meets `runtime.loop.Recorder`: a simulated run's entries, in memory."""

    entries: list[Entry] = field(default_factory=list)

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        self.entries.append((now_s, event, commands))


def timeline(entries: Iterable[Entry], placement: Placement) -> dict[str, Any]:
    """Chrome's trace format (JSON object form), which Perfetto opens: a track for each unit with
    its commands, one for the work beside the cards (rewards, fetches), a mark for each version. For
    a record, its events with the commands that each caused."""
    units = placement.units()
    unit_of = {card: i for i, unit in enumerate(units) for card in unit.cards}
    events: list[dict[str, Any]] = [_track(i, _unit_name(unit.cards, unit)) for i, unit in
                                    enumerate(units)]  # fmt: skip
    host = len(units)
    events.append(_track(host, "rewards and fetches"))
    issued: dict[int, tuple[float, Command]] = {}
    for now_s, event, commands in entries:
        if isinstance(event, ev.Terminal) and event.command in issued:
            start_s, command = issued.pop(event.command)
            tracks = sorted({unit_of[card] for card in command.cards})
            if tracks:
                events += [_slice(track, command, event, start_s, now_s) for track in tracks]
            else:
                events += _beside(host, command, event, start_s, now_s)
        if isinstance(event, ev.Published):
            events.append({"name": f"version {event.version}", "ph": "i", "s": "g", "pid": 0,
                           "tid": host, "ts": now_s * 1e6})  # fmt: skip
        issued.update((command.seq, (now_s, command)) for command in commands)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(index: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": {"name": name}}


def _unit_name(cards: Sequence[int], unit: Any) -> str:
    jobs = [name for name in ("generates", "trains", "scores") if getattr(unit, name)]
    which = f"card {cards[0]}" if len(cards) == 1 else f"cards {cards[0]}-{cards[-1]}"
    return f"{which} ({', '.join(jobs)})"


def _slice(
    track: int, command: Command, event: Event, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "name": command.kind, "ph": "X", "pid": 0, "tid": track, "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6, "args": _arguments(command, event),
    }  # fmt: skip


def _beside(
    track: int, command: Command, event: Event, start_s: float, end_s: float
) -> list[dict[str, Any]]:
    """As an asynchronous pair: these overlap, which slices of one track must not."""
    common = {"name": command.kind, "cat": "host", "id": command.seq, "pid": 0, "tid": track}
    return [
        {**common, "ph": "b", "ts": start_s * 1e6, "args": _arguments(command, event)},
        {**common, "ph": "e", "ts": end_s * 1e6},
    ]


def _arguments(command: Command, event: Event) -> dict[str, Any]:
    """What a reader wants to see of a command: its numbers, and how it ended."""
    arguments: dict[str, Any] = {"seq": command.seq, "ended": event.kind}
    match command, event:
        case ev.Generate(), ev.Generated():
            arguments |= {"version": command.version, "admitted": len(command.admit),
                          "finished": len(event.finished), "tokens": event.n_tokens,
                          "decode_steps": event.decode_steps}  # fmt: skip
        case ev.Train() | ev.Score(), _:
            arguments |= {"groups": len(command.group_ids)}
        case ev.Reward() | ev.Discard(), _:
            arguments |= {"group": command.group_id}
        case ev.Switch(), _:
            arguments |= {"to": str(command.after)}
        case ev.Publish() | ev.Fetch() | ev.Receive(), _:
            arguments |= {"version": command.version}
    return arguments
