"""The model behind bench/published.py: calibration on a published step, and one simulated run.

Owns: lengths, efficiencies solved from [step], the run of a setting, the one fitted number, the
best split. Does not own: the assumptions (published_assumptions.toml), what is compared and printed
(published).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any, NamedTuple

from twofold.sched.placement import Placement
from twofold.sched.spec import SchedulerSpec
from twofold.sim.cluster import Cluster, Layout, SampleTokens, costs, memory, missing
from twofold.sim.cost import Costs
from twofold.sim.shape import Shape
from twofold.sim.window import Outcome, simulate
from twofold.sim.workload import GroupWork

ASSUMPTIONS = Path(__file__).with_name("published_assumptions.toml")
PROMPT_PAD_TOKENS = 1024  # [step]: prompts are padded to 1k
Table = dict[str, Any]


def assumptions() -> Table:
    return tomllib.loads(ASSUMPTIONS.read_text())


def changed_by(given: Table, change: Mapping[str, Mapping[str, Any]]) -> Table:
    return {**given, **{name: given[name] | dict(values) for name, values in change.items()}}


# ---------------------------------------------------------------- lengths


@dataclass(frozen=True)
class Lengths:
    """Completions: log-normal with `sigma`, cut at `max_tokens`, of mean `mean_tokens`; all equal
    if sigma is 0. Rewards: exponential with mean `reward_s`, or each exactly that."""

    group_size: int
    prompt_tokens: int
    mean_tokens: float
    max_tokens: int
    sigma: float
    reward_s: float
    seed: int = 0
    exponential: bool = True
    alike: int = 1  # groups whose last reward is the one of a simulated group
    n_groups: int | None = None

    @lru_cache(maxsize=100_000)  # noqa: B019  # a script: the runs ask for the same groups
    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        mu, cap = log_median(self.mean_tokens, self.max_tokens, self.sigma), self.max_tokens
        lengths = tuple(
            min(cap, max(1, round(random.lognormvariate(mu, self.sigma))))
            for _ in range(self.group_size)
        )
        reward_s = self.reward_s
        if self.exponential:  # the largest of n draws is below x with (1 - exp(-x / mean))^n
            reward_s *= -math.log(max(1 - random.random() ** (1 / self.alike), 1e-16))
        return GroupWork(self.prompt_tokens, lengths, self.group_size, reward_s, varies=True)


@lru_cache
def quantiles(mu: float, sigma: float, cap: int, n: int = 1000) -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(min(cap, math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / n))) for i in range(n))


@lru_cache
def log_median(mean: float, cap: int, sigma: float) -> float:
    """The log of the median with which lengths cut at `cap` have this mean (bisection)."""
    if sigma == 0:
        return math.log(mean)
    low, high = 0.0, math.log(cap) + 4 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        values = quantiles(middle, sigma, cap)
        low, high = (middle, high) if sum(values) / len(values) < mean else (low, middle)
    return low


# ---------------------------------------------------------------- calibration on the published step


def calibrate(given: Table) -> Cluster:
    """The cluster with the efficiencies at which [step]'s parts come out: decode (what is left of
    the rollout without the host's share), prefill (the reference's scoring), train (the update)."""
    step = given["step"]
    base = replace(Cluster.from_table(given["cluster"]), cards_per_supernode=step["cards"])
    overhead_s = host_s(given)

    def with_share(value: float) -> Cluster:
        efficiency = replace(
            base.efficiency, decode=value, prefill=value, train=value, step_overhead_s=overhead_s
        )
        return replace(base, efficiency=efficiency)

    def solve(part: Callable[[Costs], float], wanted_s: float) -> float:
        low, high = 1e-3, 1.0  # a larger share is faster
        for _ in range(60):
            middle = math.sqrt(low * high)
            seconds = part(step_costs(given, with_share(middle), "step"))
            low, high = (middle, high) if seconds > wanted_s else (low, middle)
        return low

    n_tokens = trained_tokens(given, "step")
    found = replace(
        base.efficiency,
        decode=solve(lambda c: rollout_s(given, c), step["rollout_s"]),
        prefill=solve(lambda c: c.score(n_tokens), step["reference_s"]),
        train=solve(lambda c: c.train(n_tokens), step["update_s"]),
        step_overhead_s=overhead_s,
    )
    return replace(Cluster.from_table(given["cluster"]), efficiency=found)


def host_s(given: Table) -> float:
    """Of a decode step."""
    step = given["step"]
    return float(step["overhead_share"] * step["rollout_s"] / step["max_tokens"])


def step_costs(given: Table, cluster: Cluster, which: str) -> Costs:
    """Of [step] or [second]; a padded token is computed like any other."""
    step, one = given["step"], given["step"] | given[which]
    layout = Layout(
        cards_per_replica=one["cards_per_replica"],
        train_cards=step["cards"],
        slots=running(one),
        swap_optimizer=True,
        reference=True,
        recomputed=step["recomputed"],
    )
    tokens = SampleTokens(one["prompt_tokens"], one["mean_tokens"], step["max_tokens"])
    shape, n = Shape.from_table(given["shapes"]["step"]), one["cards_per_replica"]
    found = decode_split(given, costs(cluster, shape, layout, tokens, running(one)), n, tokens)
    padding = one["groups"] * one["group_size"] * one["padded_tokens"]
    padding /= trained_tokens(given, which)
    return pad(found, padding)


def pad(found: Costs, factor: float) -> Costs:
    return replace(
        found,
        train_token_s=found.train_token_s * factor,
        score_token_s=found.score_token_s * factor,
    )


def running(one: Table) -> int:
    """Samples of a replica: all of the batch at once."""
    replicas = one["cards"] // one["cards_per_replica"]
    return int(one["groups"] * one["group_size"] // replicas)


def trained_tokens(given: Table, which: str) -> int:
    """As the simulator counts them: a group's prompt once."""
    one = given["step"] | given[which]
    group = one["prompt_tokens"] + one["group_size"] * one["mean_tokens"]
    return round(float(one["groups"] * group))


def rollout_s(given: Table, found: Costs) -> float:
    """Of [step] in closed form: the longest sample takes as many decode steps as it has tokens."""
    step, sigma = given["step"], given["workload"]["sigma"]
    mu = log_median(step["mean_tokens"], step["max_tokens"], sigma)
    lengths, n = quantiles(mu, sigma, step["max_tokens"]), running(step)
    context = sum(v * (step["prompt_tokens"] + v / 2) for v in lengths) / len(lengths)
    prompts = n / step["group_size"] * step["prompt_tokens"]
    return found.quantum(
        step["max_tokens"], round(n * step["mean_tokens"]), round(n * context), round(prompts)
    )


def predict_step(given: Table, cluster: Cluster, which: str) -> dict[str, float]:
    """Seconds of the parts of [step] or [second], simulated, synchronous, on 128 cards."""
    step, one = given["step"], given["step"] | given[which]
    found = step_costs(given, replace(cluster, cards_per_supernode=step["cards"]), which)
    found = replace(found, **switching(given))
    workload = Lengths(
        one["group_size"],
        one["prompt_tokens"],
        one["mean_tokens"],
        step["max_tokens"],
        0.0 if which == "second" else given["workload"]["sigma"],  # forced lengths
        step["reward_s"],
        exponential=False,
    )
    spec = SchedulerSpec(
        steps=0,
        groups_per_step=one["groups"],
        group_size=one["group_size"],
        max_staleness=0,
        max_running_samples=running(one),
        quantum_decode_steps=given["runs"]["quantum_decode_steps"],
        needs_reference=True,
        placement=of_replicas(step["cards"], 0, one["cards_per_replica"]),
    )
    result = simulate(spec, workload, found, n_steps=1)
    total = result.seconds_per_step
    part = {kind: share * total for kind, share in result.busy.items()}
    return {
        "rollout": part["Generate"],
        "reference": part["Score"],
        "reward": sum(result.idle.values()) * total,
        "update": part["Train"],
        "reshard": part["Publish"],
        "offload": part["Switch"],
        "total": total,
    }


def switching(given: Table) -> dict[str, float]:
    """[step]'s own seconds: reshard is the publish, offload is spread over the four switches."""
    edge_s = given["step"]["offload_s"] / 4
    return {
        "publish_s": given["step"]["reshard_s"],
        "to_train_s": edge_s,
        "to_generate_s": edge_s,
        "discard_s": 0.0,
    }


# ---------------------------------------------------------------- one run


class Setting(NamedTuple):
    """One run on `supernodes` supernodes, each cluster's share of cards split the same way. What is
    simulated for what: one sample for `thin` alike, one replica for `fold` alike."""

    generate_only: int = 0  # cards of a supernode
    staleness: int = 0
    supernodes: int = 1
    batch: int = 1  # times groups_per_step
    thin: int = 1
    fold: int = 1
    quantum: int = 0  # decode steps; 0: as assumed
    planned_steps: int = 8  # [runs].steps: with those before and after the measured ones
    host: bool = True  # events take host time
    start_s: float = 0.0  # from the first to the last card's start of each step's training

    @property
    def measured_steps(self) -> int:
        """Whole cycles: started together, the batches of S + 1 steps are ready together and are
        trained one after another, so long and short steps take turns."""
        cycle = self.staleness + 1
        return cycle * max(1, -(-(self.planned_steps - 2 * cycle) // cycle))


class Found(NamedTuple):
    tokens_per_s: float  # prompt and completion of every sample, as the sources count
    outcome: Outcome
    link_s: float  # of a step, on the links between supernodes


def run(given: Table, cluster: Cluster, slowdown: float, setting: Setting) -> Found | None:
    """None when it does not fit the cards' memory."""
    work, runs, thin, fold = given["workload"], given["runs"], setting.thin, setting.fold
    cluster = replace(cluster, supernodes=setting.supernodes)
    n, generate_only = runs["cards_per_replica"], setting.generate_only * setting.supernodes
    layout = run_layout(given, cluster.cards - generate_only, bool(generate_only))
    tokens = SampleTokens(work["prompt_tokens"], work["mean_tokens"], work["max_tokens"])
    shape = Shape.from_table(given["shapes"]["target"])
    if missing(cluster, memory(shape, layout, tokens)):
        return None
    groups = work["groups_per_step"] * setting.batch
    replicas = (generate_only or cluster.cards) // n
    at_once = min(runs["slots_per_replica"], groups * work["group_size"] / replicas)
    plain = decode_split(given, costs(cluster, shape, layout, tokens, at_once), n, tokens)
    found = in_thin_samples(slowed(plain, slowdown), thin, fold)
    found = replace(
        found,
        **switching(given),
        event_s=event_s(given, setting, groups, replicas),
        train_s=found.train_s + setting.start_s,
    )
    if generate_only:  # the same bytes go to each replica, by the same software
        found = replace(found, publish_s=0.0, fetch_s=found.publish_s)
    if work["padded"]:
        sample = work["prompt_tokens"] / work["group_size"] + work["mean_tokens"]
        found = pad(found, (PROMPT_PAD_TOKENS + work["max_tokens"]) / sample)
    spec = SchedulerSpec(
        steps=0,
        groups_per_step=groups // (thin * fold),
        group_size=work["group_size"],
        max_staleness=setting.staleness,
        max_running_samples=runs["slots_per_replica"] // thin,
        quantum_decode_steps=setting.quantum or runs["quantum_decode_steps"],
        needs_reference=work["reference"],
        placement=of_replicas(cluster.cards // fold, generate_only // fold, n),
    )
    # Without staleness a batch waits for its last reward. With it the last ones come while the
    # batch before is trained, and what is waited for is a middle one: thinning does not move that.
    lengths = run_lengths(given, 1 if setting.staleness else thin)
    outcome = simulate(spec, lengths, found, runs["seed"], setting.measured_steps)
    n_tokens = (work["prompt_tokens"] + work["mean_tokens"]) * groups * work["group_size"]
    return Found(n_tokens / outcome.seconds_per_step, outcome, link_s(cluster, shape, layout))


def of_replicas(cards: int, generate_only: int, n: int) -> Placement:
    """A card here stands for the `n` cards of a replica, which act together anyway: the same
    schedule and the same shares of time, in half the time."""
    train_only = cards - generate_only if generate_only else 0
    return Placement(cards // n, generate_only=generate_only // n, train_only=train_only // n)


def run_layout(given: Table, training: int, separated: bool) -> Layout:
    runs = given["runs"]
    return Layout(
        cards_per_replica=runs["cards_per_replica"],
        train_cards=training,
        slots=runs["slots_per_replica"],
        shared=not separated,
        swap_optimizer=runs["swap_optimizer"],
        reference=given["workload"]["reference"],
        recomputed=given["step"]["recomputed"],
        micro_batch_tokens=given["step"]["micro_batch_tokens"],
    )


def run_lengths(given: Table, alike: int) -> Lengths:
    work = given["workload"]
    return Lengths(
        work["group_size"],
        work["prompt_tokens"],
        work["mean_tokens"],
        work["max_tokens"],
        work["sigma"],
        work["reward_s"],
        given["runs"]["seed"],
        work.get("exponential", True),
        alike,
    )


PER_TOKEN_OF_A_REPLICA = ("decode_token_s", "decode_context_s", "prefill_token_s")
PER_TOKEN_OF_A_BATCH = ("score_token_s", "train_token_s")


def slowed(found: Costs, slowdown: float) -> Costs:
    """All work on cards `slowdown` times slower."""
    names = ("decode_step_s", "train_s", *PER_TOKEN_OF_A_REPLICA, *PER_TOKEN_OF_A_BATCH)
    return replace(found, **{name: getattr(found, name) * slowdown for name in names})


def in_thin_samples(found: Costs, thin: int, fold: int) -> Costs:
    """A simulated token stands for `thin` of its replica, and for `thin` x `fold` of the batch."""
    times = dict.fromkeys(PER_TOKEN_OF_A_REPLICA, thin)
    times |= dict.fromkeys(PER_TOKEN_OF_A_BATCH, thin * fold)
    return replace(found, **{name: getattr(found, name) * n for name, n in times.items()})


def event_s(given: Table, setting: Setting, groups: int, replicas: int) -> float:
    """Host seconds of a simulated event, such that a step's events (a reward for each group, the
    quanta) take the time of the real ones."""
    if not setting.host:
        return 0.0
    longest, runs = given["workload"]["max_tokens"], given["runs"]
    simulated_quantum = setting.quantum or runs["quantum_decode_steps"]
    real = groups + replicas * longest / runs["quantum_decode_steps"]
    simulated = groups / (setting.thin * setting.fold)
    simulated += replicas / setting.fold * longest / simulated_quantum
    return float(runs["event_s"] * real / simulated)


def link_s(cluster: Cluster, shape: Shape, layout: Layout) -> float:
    """What a step's update takes longer for the links between supernodes: the all-reduce of fp32
    gradients, 2 (s-1)/s x 4 bytes x parameters / cards of a supernode / link."""
    tokens = SampleTokens(1, 1, 1)
    fast = replace(cluster, links=replace(cluster.links, between_bytes_per_s=1e18))
    with_links, without = (costs(c, shape, layout, tokens, 1).train_s for c in (cluster, fast))
    return with_links - without


# ---------------------------------------------------------------- the three runs


class Three(NamedTuple):
    splits: dict[int, Found]  # by cards that only generate
    fusion: Found
    stalesync: Found

    @property
    def split(self) -> int:
        return best_of(self.splits)

    @property
    def separated(self) -> Found:
        return self.splits[self.split]


def best_of(splits: Mapping[int, Found]) -> int:
    return max(splits, key=lambda n: splits[n].tokens_per_s)


def try_splits(
    given: Table, cluster: Cluster, slowdown: float, setting: Setting, near: int = 0
) -> dict[int, Found]:
    """Every split of [runs] that fits the memory and whole replicas. With `near` uphill from that
    one, until the best has no untried neighbour (tokens/s has one maximum over the splits)."""
    n, most = given["runs"]["cards_per_replica"], cluster.cards_per_supernode
    splits = [split for split in given["runs"]["splits"] if split < most and split % n == 0]
    found: dict[int, Found | None] = {}

    def try_all(some: list[int]) -> None:
        for split in some:
            if split not in found:
                one = setting._replace(generate_only=split)
                found[split] = run(given, cluster, slowdown, one)

    best = splits.index(near) if near in splits else 0
    tried = -1
    while near and len(found) > tried:
        tried = len(found)
        try_all(splits[max(0, best - 1) : best + 2])
        best = splits.index(best_of(those_that_fit(found)))
    if not near:
        try_all(splits)
    return those_that_fit(found)


def those_that_fit(found: Mapping[int, Found | None]) -> dict[int, Found]:
    return {split: result for split, result in found.items() if result is not None}


def fit_slowdown(given: Table, cluster: Cluster, setting: Setting, exact: bool) -> float:
    """The one fitted number: with it the best separated split makes the quoted tokens/s. As
    `setting`, to find the split and come near; if `exact`, then with every sample."""
    target, slowdown = given["targets"]["separated"], 1.0
    split = 0
    for _ in range(2):
        splits = try_splits(given, cluster, slowdown, setting, near=split)
        split = best_of(splits)
        slowdown *= splits[split].tokens_per_s / target
    if exact:
        one = setting._replace(generate_only=split, thin=1)
        slowdown *= must(given, cluster, slowdown, one).tokens_per_s / target
    return slowdown


def three_runs(
    given: Table, cluster: Cluster, slowdown: float, setting: Setting, exact: bool, near: int = 0
) -> Three:
    """As `setting`; if `exact`, the best split and the shared runs with every sample. `near`: see
    `try_splits`."""
    splits = try_splits(given, cluster, slowdown, setting, near)
    if exact:
        setting = setting._replace(thin=1)
        best = best_of(splits)
        splits[best] = must(given, cluster, slowdown, setting._replace(generate_only=best))
    fusion = must(given, cluster, slowdown, setting)
    stale = setting._replace(staleness=given["runs"]["staleness"])
    return Three(splits, fusion, must(given, cluster, slowdown, stale))


def must(given: Table, cluster: Cluster, slowdown: float, setting: Setting) -> Found:
    found = run(given, cluster, slowdown, setting)
    assert found is not None, f"{setting} does not fit the memory"
    return found


# ---------------------------------------------------------------- what the sources bound

SERVED = ((1943 * 0.050, 0.050), (538 * 0.015, 0.015))
"""Samples a card and seconds of a decode step: 1,943 tokens/s a card at 50 ms and 538 at 15 ms
(quoted [cm384], abstract; other software, int8 weights)."""


def share_by_samples(samples_per_card: float) -> float:
    """The part of a decode step that grows with the samples, by a line through SERVED."""
    (n1, s1), (n2, s2) = SERVED
    slope = (s1 - s2) / (n1 - n2)
    return slope * samples_per_card / (s2 + slope * (samples_per_card - n2))


def decode_split(given: Table, found: Costs, n: int, tokens: SampleTokens) -> Costs:
    """Only if [step].served_like: a full decode step of [step] takes as long, but the part of it
    that grows with the samples is that of [cm384]; else as the roofline has it."""
    if not given["step"].get("served_like"):
        return found
    step = given["step"]
    full = running(step) / step["cards_per_replica"]  # samples a card
    overhead_s = host_s(given)
    context = tokens.prompt_tokens + tokens.mean_tokens / 2
    samples = full * n
    total_s = found.decode_step_s - overhead_s
    total_s += samples * (found.decode_token_s + context * found.decode_context_s)
    share = share_by_samples(full)
    return replace(
        found,
        decode_step_s=overhead_s + (1 - share) * total_s,
        decode_token_s=share * total_s / samples,
        decode_context_s=0.0,
    )
