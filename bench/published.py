"""Published figures, simulated: `python bench/published.py` (about a minute).

One CloudMatrix-384-like supernode, a 718B mixture of experts: what the real scheduler makes of it on
a virtual clock, separated and synchronous, with RL Fusion, with StaleSync, and on up to 64
supernodes. Every assumption is in bench/published_assumptions.toml with its source; it was written
before the first comparison. One number is fitted, `slowdown`, to the separated 14.0k tokens/s.

1. The shares of the hardware's figures that work reaches are calibrated on the parts of one published
   step (128 cards, 671B), and predict the same source's second step.
2. The separated baseline gets its best split of the cards. With RL Fusion all cards do both jobs;
   StaleSync is the same with a staleness threshold above 0.
3. Which assumption moves which figure, and where scaling loses.

All figures printed are simulated unless they say quoted. The last line is one JSON object.
"""

# ruff: noqa: E501 (its tables are wide)
from __future__ import annotations

import argparse
import json
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
from twofold.sim.plan import Outcome, simulate
from twofold.sim.shape import Shape
from twofold.sim.workload import GroupWork

ASSUMPTIONS = Path(__file__).with_name("published_assumptions.toml")
PROMPT_PAD_TOKENS = 1024  # [step]: prompts are padded to 1k
Table = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="without sensitivity and 64 supernodes"
    )
    arguments = parser.parse_args()
    given = tomllib.loads(ASSUMPTIONS.read_text())
    calibrated = calibrate(given)
    print_calibration(given, calibrated)
    slowdown = fit_slowdown(given, calibrated)
    results = three_runs(given, calibrated, slowdown)
    print_three(given, results, slowdown)
    if not arguments.quick:
        print_sensitivity(given, slowdown)
    linearity = print_scale(given, calibrated, slowdown, arguments.quick)
    print(json.dumps(summary(results, slowdown, linearity)))


# ---------------------------------------------------------------- lengths


@dataclass(frozen=True)
class Lengths:
    """Completions: log-normal with `sigma`, cut at `max_tokens`, of mean `mean_tokens`; all equal if
    sigma is 0. Rewards: exponential with mean `reward_s`, or each exactly that."""

    group_size: int
    prompt_tokens: int
    mean_tokens: float
    max_tokens: int
    sigma: float
    reward_s: float
    seed: int = 0
    exponential: bool = True
    n_groups: int | None = None

    @lru_cache(maxsize=100_000)  # noqa: B019  # a script: the runs ask for the same groups
    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        mu, cap = log_median(self.mean_tokens, self.max_tokens, self.sigma), self.max_tokens
        lengths = tuple(
            min(cap, max(1, round(random.lognormvariate(mu, self.sigma))))
            for _ in range(self.group_size)
        )
        reward_s = random.expovariate(1 / self.reward_s) if self.exponential else self.reward_s
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


def calibrate(given: Table, overhead_share: float | None = None) -> Cluster:
    """The cluster with the efficiencies at which [step]'s parts come out: decode (what is left of
    the rollout without the host's share), prefill (the reference's scoring), train (the update)."""
    step = given["step"]
    share = step["overhead_share"] if overhead_share is None else overhead_share
    base = replace(Cluster.from_table(given["cluster"]), cards_per_supernode=step["cards"])
    overhead_s = share * step["rollout_s"] / step["max_tokens"]

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
    found = costs(cluster, Shape.from_table(given["shapes"]["step"]), layout, tokens, running(one))
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
    return round(one["groups"] * group)


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
    forced = which == "second"
    workload = Lengths(
        one["group_size"], one["prompt_tokens"], one["mean_tokens"], step["max_tokens"],
        0.0 if forced else given["workload"]["sigma"], step["reward_s"], exponential=False,
    )  # fmt: skip
    spec = SchedulerSpec(
        steps=0, groups_per_step=one["groups"], group_size=one["group_size"], max_staleness=0,
        max_running_samples=running(one), needs_reference=True,
        quantum_decode_steps=given["runs"]["quantum_decode_steps"],
        placement=Placement(step["cards"], cards_per_replica=one["cards_per_replica"]),
    )  # fmt: skip
    result = simulate(spec, workload, found, n_steps=1)  # type: ignore[arg-type]
    total = result.seconds_per_step
    part = {kind: share * total for kind, share in result.busy.items()}
    return {
        "rollout": part["Generate"], "reference": part["Score"],
        "reward": sum(result.idle.values()) * total, "update": part["Train"],
        "reshard": part["Publish"], "offload": part["Switch"], "total": total,
    }  # fmt: skip


def switching(given: Table) -> dict[str, float]:
    """[step]'s own seconds: reshard is the publish, offload is spread over the four switches."""
    edge_s = given["step"]["offload_s"] / 4
    return {
        "publish_s": given["step"]["reshard_s"],
        "to_train_s": edge_s,
        "to_generate_s": edge_s,
        "discard_s": 0.0,
    }


def print_calibration(given: Table, cluster: Cluster) -> None:
    share = cluster.efficiency
    print("1. Calibration on a published step (671B, 128 cards; quoted, see [step])")
    print(
        f"   solved: decode {share.decode:.1%} of the roofline with {share.step_overhead_s * 1e3:.0f}"
        f" ms of host a decode step, reference {share.prefill:.1%}, training {share.train:.1%} of "
        "the matmul peak (padded tokens)"
    )
    print(f"   {'seconds':<12}{'quoted':>9}{'simul.':>9}{'error':>8}   second step: "
          f"{'quoted':>8}{'simul.':>9}{'error':>8}")  # fmt: skip
    first, second = (predict_step(given, cluster, which) for which in ("step", "second"))
    for name in first:
        one, two = given["step"][f"{name}_s"], given["second"][f"{name}_s"]
        print(
            f"   {name:<12}{one:>9.1f}{first[name]:>9.1f}{first[name] / one - 1:>+8.1%}"
            f"{'':>16}{two:>8.1f}{second[name]:>9.1f}{second[name] / two - 1:>+8.1%}"
        )
    stated = {k.removeprefix("stated_").removesuffix("_s"): v
              for k, v in given["second"].items() if k.startswith("stated_")}  # fmt: skip
    total = second["total"] + sum(stated.values())
    quoted = given["second"]["total_s"]
    changes = ", ".join(f"{name} {seconds:+.0f} s" for name, seconds in stated.items())
    print(
        "   The second step also ran faster software than the first. With what the source says that "
        f"was worth ({changes}; quoted, not in the prediction): {total:.1f} s, "
        f"{total / quoted - 1:+.1%}\n"
    )


# ---------------------------------------------------------------- the three runs


class Setting(NamedTuple):
    """One run on `supernodes` supernodes. `thin`: one simulated group stands for so many."""

    generate_only: int = 0
    staleness: int = 0
    supernodes: int = 1
    thin: int = 1
    n_steps: int = 3
    host: bool = True  # events take host time
    between: bool = True  # the links between supernodes take time


class Found(NamedTuple):
    tokens_per_s: float  # prompt and completion of every sample, as the sources count
    outcome: Outcome


def run(given: Table, cluster: Cluster, slowdown: float, setting: Setting) -> Found | None:
    """None when it does not fit the cards' memory."""
    work, runs, step = given["workload"], given["runs"], given["step"]
    cluster = replace(cluster, supernodes=setting.supernodes)
    n = runs["cards_per_replica"]
    generate_only = setting.generate_only * setting.supernodes
    training = cluster.cards - generate_only
    placement = Placement(
        cluster.cards,
        generate_only=generate_only,
        train_only=training if generate_only else 0,
        cards_per_replica=n,
    )
    layout = Layout(
        cards_per_replica=n, train_cards=training, slots=runs["slots_per_replica"],
        shared=not generate_only, swap_optimizer=runs["swap_optimizer"],
        reference=work["reference"], recomputed=step["recomputed"],
        micro_batch_tokens=step["micro_batch_tokens"],
    )  # fmt: skip
    tokens = SampleTokens(work["prompt_tokens"], work["mean_tokens"], work["max_tokens"])
    shape = Shape.from_table(given["shapes"]["target"])
    if missing(cluster, memory(shape, layout, tokens)):
        return None
    groups = work["groups_per_step"] * setting.supernodes
    replicas = (generate_only or cluster.cards) // n
    at_once = min(runs["slots_per_replica"], groups * work["group_size"] / replicas)
    found = slowed(costs(cluster, shape, layout, tokens, at_once), slowdown, setting)
    found = replace(found, **switching(given), event_s=event_s(given, setting, replicas))
    if generate_only:  # the same bytes go to each replica, by the same software
        found = replace(found, publish_s=0.0, fetch_s=found.publish_s)
    if work["padded"]:
        sample = work["prompt_tokens"] / work["group_size"] + work["mean_tokens"]
        found = pad(found, (PROMPT_PAD_TOKENS + work["max_tokens"]) / sample)
    spec = SchedulerSpec(
        steps=0, groups_per_step=groups // setting.thin, group_size=work["group_size"],
        max_staleness=setting.staleness, needs_reference=work["reference"], placement=placement,
        max_running_samples=runs["slots_per_replica"] // setting.thin,
        quantum_decode_steps=runs["quantum_decode_steps"],
    )  # fmt: skip
    workload = Lengths(
        work["group_size"], work["prompt_tokens"], work["mean_tokens"], work["max_tokens"],
        work["sigma"], work["reward_s"], runs["seed"], work.get("exponential", True),
    )  # fmt: skip
    outcome = simulate(spec, workload, found, runs["seed"], setting.n_steps)  # type: ignore[arg-type]
    sample_tokens = work["prompt_tokens"] + work["mean_tokens"]
    total = sample_tokens * groups * work["group_size"] / outcome.seconds_per_step
    return Found(total, outcome)


def slowed(found: Costs, slowdown: float, setting: Setting) -> Costs:
    """All work on cards `slowdown` times slower; what depends on tokens, `thin` times the tokens."""
    scaled = {name: getattr(found, name) * slowdown for name in ("decode_step_s", "train_s")}
    for name in ("decode_token_s", "decode_context_s", "prefill_token_s", "score_token_s",
                 "train_token_s"):  # fmt: skip
        scaled[name] = getattr(found, name) * slowdown * setting.thin
    return replace(found, **scaled)


def event_s(given: Table, setting: Setting, replicas: int) -> float:
    """Thinned, each event stands for as many as keep the host's total: a reward a group, and the
    quanta, which are not thinned."""
    if not setting.host:
        return 0.0
    groups = given["workload"]["groups_per_step"] * setting.supernodes
    quanta = replicas * given["workload"]["max_tokens"] / given["runs"]["quantum_decode_steps"]
    more = (groups + quanta) / (groups / setting.thin + quanta)
    return float(given["runs"]["event_s"] * more)


def best_split(
    given: Table, cluster: Cluster, slowdown: float, setting: Setting
) -> dict[int, Found]:
    """By cards that only generate; those that fit."""
    found = {
        split: run(given, cluster, slowdown, setting._replace(generate_only=split))
        for split in given["runs"]["splits"]
        if split < cluster.cards_per_supernode and split % given["runs"]["cards_per_replica"] == 0
    }
    return {split: result for split, result in found.items() if result is not None}


def fit_slowdown(given: Table, cluster: Cluster) -> float:
    """The one fitted number: with it the best separated split makes the quoted tokens/s."""
    setting, slowdown = Setting(n_steps=1), 1.0
    for _ in range(4):
        splits = best_split(given, cluster, slowdown, setting)
        speed = max(found.tokens_per_s for found in splits.values())
        slowdown *= speed / given["targets"]["separated"]
    return slowdown


class Three(NamedTuple):
    splits: dict[int, Found]
    fusion: Found
    stalesync: Found

    @property
    def split(self) -> int:
        return max(self.splits, key=lambda n: self.splits[n].tokens_per_s)

    @property
    def separated(self) -> Found:
        return self.splits[self.split]


def three_runs(
    given: Table, cluster: Cluster, slowdown: float, setting: Setting | None = None
) -> Three:
    setting = setting or Setting()
    fusion = run(given, cluster, slowdown, setting)
    stale = run(given, cluster, slowdown, setting._replace(staleness=given["runs"]["staleness"]))
    splits = best_split(given, cluster, slowdown, setting)
    assert fusion is not None and stale is not None and splits, "does not fit"
    return Three(splits, fusion, stale)


def print_three(given: Table, results: Three, slowdown: float) -> None:
    targets, base = given["targets"], results.separated.tokens_per_s
    print("2. One supernode, 384 cards, 718B (tokens/s of prompts and completions)")
    print(f"   fitted: slowdown {slowdown:.3f} (all work on cards), from the first line\n")
    rows = (("separated, S = 0", "separated", results.separated),
            ("RL Fusion, S = 0", "fusion", results.fusion),
            (f"StaleSync, S = {given['runs']['staleness']}", "stalesync", results.stalesync))  # fmt: skip
    print(f"   {'':<20}{'quoted':>8}{'simul.':>8}{'error':>7}  {'over separated':<24}busy / idle")
    for label, name, found in rows:
        speed, target = found.tokens_per_s, targets[name]
        gains = f"{speed / base - 1:+.1%} (quoted {target / targets['separated'] - 1:+.1%})"
        print(
            f"   {label:<20}{target / 1e3:>7.1f}k{speed / 1e3:>7.1f}k{speed / target - 1:>+7.0%}"
            f"  {gains:<24}{where(found.outcome)}"
        )
    print("\n   separated, by cards that only generate (the best counts):")
    for split, found in results.splits.items():
        mark = "*" if split == results.split else " "
        print(
            f"   {mark} {split:>4} + {384 - split:<4}{found.tokens_per_s / 1e3:>6.1f}k  fusion "
            f"{results.fusion.tokens_per_s / found.tokens_per_s - 1:>+5.0%}, StaleSync "
            f"{results.stalesync.tokens_per_s / found.tokens_per_s - 1:>+5.0%} over it  "
            f"{where(found.outcome)}"
        )
    print(verdict(given, results) + "\n")


def where(outcome: Outcome) -> str:
    parts = {**outcome.busy, **outcome.idle}
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.01)


def verdict(given: Table, results: Three) -> str:
    """Said by the figures: within a tenth of the quoted one, or off and by how much."""
    words = []
    for name, found in (("RL Fusion", results.fusion), ("StaleSync", results.stalesync)):
        target = given["targets"]["fusion" if name == "RL Fusion" else "stalesync"]
        error = found.tokens_per_s / target - 1
        words.append(f"{name} {'agrees' if abs(error) <= 0.1 else 'is off'} ({error:+.0%})")
    return f"\n   With these assumptions: {', '.join(words)}; 14.0k is fitted."


# ---------------------------------------------------------------- sensitivity

CHANGES: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("as assumed", {}),
    ("host share of a decode step 0.4 -> 0.2", {"step": {"overhead_share": 0.2}}),
    ("host share of a decode step 0.4 -> 0.6", {"step": {"overhead_share": 0.6}}),
    ("lengths x 4 (mean 6306, most 12288)",
     {"workload": {"mean_tokens": 6306.4, "max_tokens": 12288}}),
    ("lengths / 4 (mean 394, most 768)",
     {"workload": {"mean_tokens": 394.15, "max_tokens": 768}}),
    ("mean / max 0.51 -> 0.25 (longer tail)", {"workload": {"mean_tokens": 768.0}}),
    ("rewards of 5 s each, none longer", {"workload": {"exponential": False}}),
    ("rewards of 60 s on average", {"workload": {"reward_s": 60.0}}),
    ("training packed, not padded", {"workload": {"padded": False}}),
    ("no reference model", {"workload": {"reference": False}}),
    ("groups a step 512 -> 256", {"workload": {"groups_per_step": 256}}),
    ("groups a step 512 -> 2048", {"workload": {"groups_per_step": 2048}}),
    ("cards a replica 64 -> 32", {"runs": {"cards_per_replica": 32, "slots_per_replica": 2048}}),
    ("cards a replica 64 -> 128", {"runs": {"cards_per_replica": 128, "slots_per_replica": 8192}}),
    ("quantum 128 -> 32 decode steps", {"runs": {"quantum_decode_steps": 32}}),
    ("quantum 128 -> 512 decode steps", {"runs": {"quantum_decode_steps": 512}}),
    ("staleness 1 -> 2", {"runs": {"staleness": 2}}),
    ("staleness 1 -> 4", {"runs": {"staleness": 4}}),
    ("slots a replica 4096 -> 1024", {"runs": {"slots_per_replica": 1024}}),
    ("reshard 11.5 -> 1 s", {"step": {"reshard_s": 1.0}}),
]  # fmt: skip
THIN = 4


def print_sensitivity(given: Table, slowdown: float) -> None:
    """One assumption at a time, the slowdown kept; thinned, so a little off the table above."""
    print("3. Sensitivity: one assumption changed, the slowdown kept (thinned by 4)")
    print(f"   {'':<44}{'separated':>10}{'fusion':>9}{'StaleSync':>11}{'fus/sep':>9}{'stale/sep':>10}"
          f"{'stale/fus':>10}")  # fmt: skip
    for label, change in CHANGES:
        changed = changed_by(given, change)
        cluster = calibrate(changed)
        found = three_runs(changed, cluster, slowdown, Setting(thin=THIN, n_steps=2))
        speeds = [f.tokens_per_s for f in (found.separated, found.fusion, found.stalesync)]
        separated, fusion, stale = speeds
        print(
            f"   {label:<44}{separated / 1e3:>9.1f}k{fusion / 1e3:>8.1f}k{stale / 1e3:>10.1f}k"
            f"{fusion / separated:>9.2f}{stale / separated:>10.2f}{stale / fusion:>10.2f}"
        )
    print()


def changed_by(given: Table, change: Mapping[str, Mapping[str, Any]]) -> Table:
    return {**given, **{name: given[name] | dict(values) for name, values in change.items()}}


# ---------------------------------------------------------------- several supernodes


def print_scale(given: Table, cluster: Cluster, slowdown: float, quick: bool) -> float:
    """Returns the linearity on four supernodes."""
    scale = given["scale"]
    print(f"4. StaleSync on several supernodes (work a card is kept; thinned by {scale['thin']})")
    print(f"   {'supernodes':>10}{'tokens/s':>10}{'linear':>8}   lost to: host work, links between "
          "supernodes, waiting; idle")  # fmt: skip
    base = linearity_4 = math.nan
    for supernodes in scale["supernodes"][: 3 if quick else None]:
        setting = Setting(
            staleness=given["runs"]["staleness"], supernodes=supernodes, thin=scale["thin"],
            n_steps=max(1, scale["steps"] - 2 * (given["runs"]["staleness"] + 1)),
        )  # fmt: skip
        speed, outcome = speed_of(given, cluster, slowdown, setting)
        base = speed if supernodes == 1 else base
        linear = speed / supernodes / base
        linearity_4 = linear if supernodes == 4 else linearity_4
        lost = ""
        if supernodes > 1:
            without = [
                speed_of(given, cluster, slowdown, setting._replace(**{name: False}))[0] / speed - 1
                for name in ("host", "between")
            ]
            rest = 1 - linear - sum(without)
            lost = f"{without[0]:.1%}, {without[1]:.1%}, {rest:.1%}; "
        idle = ", ".join(f"{name} {share:.1%}" for name, share in outcome.idle.items())
        print(f"   {supernodes:>10}{speed / 1e3:>9.1f}k{linear:>8.1%}   {lost}{idle}")
    quoted = given["targets"]["stalesync_4"] / given["targets"]["stalesync"] / 4
    print(
        f"   quoted: {quoted:.0%} on four. Not in this model: cards that differ in speed, congestion, "
        "imbalance of experts that grows with the batch, failures.\n"
    )
    return linearity_4


def speed_of(
    given: Table, cluster: Cluster, slowdown: float, setting: Setting
) -> tuple[float, Outcome]:
    if not setting.between:
        cluster = replace(cluster, links=replace(cluster.links, between_bytes_per_s=1e18))
    found = run(given, cluster, slowdown, setting)
    assert found is not None, "does not fit"
    return found


def summary(results: Three, slowdown: float, linearity_4: float) -> Table:
    separated = results.separated.tokens_per_s
    return {
        "separated": round(separated),
        "fusion": round(results.fusion.tokens_per_s),
        "stalesync": round(results.stalesync.tokens_per_s),
        "fusion_over_separated": round(results.fusion.tokens_per_s / separated, 4),
        "stalesync_over_separated": round(results.stalesync.tokens_per_s / separated, 4),
        "linearity_4": round(linearity_4, 4),
        "fitted_slowdown": round(slowdown, 4),
        "label": "simulated",
    }


if __name__ == "__main__":
    main()
