"""A cluster of cards as figures, and what work on it costs.

Owns: the description of a cluster (TOML), the seconds that follow from it and a model's shape
(`costs`, a roofline), the bytes that each phase needs on a card (`memory`). Does not own: the
model's arithmetic (`shape`), what is made of the seconds (`executor`), the best layout (`plan`).

A roofline is what a machine allows. How much of it is reached is `Efficiency`: measured shares, or
assumed ones; a run's record is always the better source (`calibrate`). docs/planner.md has the
formulas. All rates are one way and per card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from twofold.sim.cost import Costs
from twofold.sim.shape import Shape, checked, nearest
from twofold.types import Phase

# Bytes saved a token = this x width x layers (Korthikanti et al. 2022, eq. 1, without the attention
# scores, which no present kernel stores).
ACTIVATION_FACTOR = 34

MOST_CARDS = 100_000  # of a cluster; a slip of the pen, beyond


@dataclass(frozen=True)
class Card:
    memory_bytes: float
    matmul_flop_per_s: float
    bandwidth_bytes_per_s: float
    usable_share: float = 0.9  # of the memory; the rest is the runtime's and fragments

    def __post_init__(self) -> None:
        _positive(self, "cluster.card")
        _at_most_one(self, "cluster.card", "usable_share")


@dataclass(frozen=True)
class Links:
    """Bytes a second, one way, of one card: to any card of its supernode, to a card of another
    supernode, to the host. `latency_s`: of one collective operation."""

    supernode_bytes_per_s: float
    between_bytes_per_s: float
    host_bytes_per_s: float
    latency_s: float = 10e-6

    def __post_init__(self) -> None:
        _positive(self, "cluster.links", least={"latency_s": 0.0})


@dataclass(frozen=True)
class Efficiency:
    """Shares of the card's figures that real work reaches, and host seconds of a decode step."""

    train: float = 0.35
    prefill: float = 0.5
    decode: float = 0.6
    step_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "cluster.efficiency", least={"step_overhead_s": 0.0})
        for name in ("train", "prefill", "decode"):
            _at_most_one(self, "cluster.efficiency", name)


@dataclass(frozen=True)
class Cluster:
    """`supernodes` x `cards_per_supernode` equal cards. A machine of 8 cards is one supernode."""

    name: str
    cards_per_supernode: int
    card: Card
    links: Links
    supernodes: int = 1
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        for name in ("supernodes", "cards_per_supernode"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"cluster.{name} = {value}: it must be at least 1")
        if self.cards > MOST_CARDS:
            raise ValueError(
                f"cluster.supernodes x cards_per_supernode = {self.cards}: at most {MOST_CARDS} "
                "cards can be simulated"
            )

    @property
    def cards(self) -> int:
        return self.supernodes * self.cards_per_supernode

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "cluster") -> Cluster:
        """From a parsed TOML table with the tables card, links and, if given, efficiency.
        ValueError, one line, for what is unknown (with the nearest name), missing or impossible."""
        parts: dict[str, Callable[..., Any]] = {
            "card": Card,
            "links": Links,
            "efficiency": Efficiency,
        }
        own = [f for f in fields(cls) if f.name not in parts]
        known = {"card": fields(Card), "links": fields(Links), "efficiency": fields(Efficiency)}
        for name in table:
            if name not in parts and name not in {f.name for f in own}:
                near = nearest(name, [f.name for f in fields(cls)])
                raise ValueError(f"{where}.{name} is unknown{near}")
        values = checked({k: v for k, v in table.items() if k not in parts}, own, where)
        for name, part in parts.items():
            inner = table.get(name, {} if name == "efficiency" else None)
            if not isinstance(inner, Mapping):
                raise ValueError(f"{where}.{name} is {inner!r}: a table is needed")
            values[name] = part(**checked(inner, known[name], f"{where}.{name}"))
        return cls(**values)


@dataclass(frozen=True)
class Layout:
    """How a run is laid out: `cards_per_replica` generate together, `train_cards` train together
    (and score), a replica decodes up to `slots` samples at once.

    `shared`: the cards that generate are those that train. `same_layout`: then both uses read one
    storage and publishing moves nothing; otherwise the weights are dealt out anew each time.
    `swap_optimizer`: its state is on the host but for the update. `micro_batch_tokens`: of a card
    that trains, whose activations it holds.
    """

    cards_per_replica: int
    train_cards: int
    slots: int
    shared: bool = True
    same_layout: bool = False
    swap_optimizer: bool = False
    reference: bool = False
    recomputed: float = 1.0  # share of the forward pass that is done again in the backward pass
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("cards_per_replica", "train_cards", "slots", "micro_batch_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {value}: it must be at least 1")


@dataclass(frozen=True)
class SampleTokens:
    """Tokens of the typical sample, and of the longest."""

    prompt_tokens: float
    mean_tokens: float  # of a completion
    max_tokens: int

    def __post_init__(self) -> None:
        _positive(self, "work", least={"prompt_tokens": 0.0})
        if self.mean_tokens > self.max_tokens:
            raise ValueError(
                f"work.mean_tokens = {self.mean_tokens:g}: it can be max_tokens "
                f"({self.max_tokens}) at most"
            )


# ---------------------------------------------------------------- seconds


def costs(
    cluster: Cluster, shape: Shape, layout: Layout, work: SampleTokens, running: float
) -> Costs:
    """Seconds of one replica and of all that train. `running`: samples that a replica decodes at
    once, most of the time; there the decode step is exact, elsewhere see `_decode`.

    What a rate does not cover (evaluation, checkpoints, host work) is 0: replace it with a measured
    one. ValueError for more cards than the cluster has.
    """
    n, m = layout.cards_per_replica, layout.train_cards
    for name, value in (("cards_per_replica", n), ("train_cards", m)):
        if value > cluster.cards:
            raise ValueError(f"{name} = {value}: the cluster has {cluster.cards} cards")
    step_s, token_s, context_s = _decode(cluster, shape, n, work, running)
    compute = cluster.card.matmul_flop_per_s
    middle = (work.prompt_tokens + work.mean_tokens) / 2  # a token's mean context
    forward = shape.forward_flops(middle)
    share = cluster.efficiency
    switch_s = _switch_s(cluster, shape, layout)
    moved_s = shape.weight_bytes / n / _link(cluster, n)
    if not layout.shared:
        moved_s = shape.weight_bytes / n / _between(cluster)
    return Costs(
        decode_step_s=step_s,
        decode_token_s=token_s,
        decode_context_s=context_s,
        prefill_token_s=forward / (n * compute * share.prefill) + _communicate(cluster, shape, n),
        score_s=0.0,
        score_token_s=forward / (m * compute * share.prefill),
        train_s=_update_s(cluster, shape, layout),
        train_token_s=shape.training_flops(middle, layout.recomputed) / (m * compute * share.train),
        publish_s=0.0 if layout.same_layout or not layout.shared else moved_s,
        fetch_s=moved_s,
        receive_s=2 * shape.weight_bytes / n / cluster.card.bandwidth_bytes_per_s,
        to_generate_s=switch_s,
        to_train_s=switch_s,
        eval_s=0.0,
        checkpoint_s=0.0,
        discard_s=0.0,
    )


def _decode(
    cluster: Cluster, shape: Shape, n: int, work: SampleTokens, running: float
) -> tuple[float, float, float]:
    """Seconds of a decode step, of a token in it, and of a token of its context.

    With B samples of context c a step takes max(weights + B c kv bytes, B flops) + communication:
    memory or arithmetic, the slower one (the roofline; Williams et al. 2009). The cost model is
    linear, so what arithmetic takes beyond memory at B = `running` is spread over the tokens: exact
    there and where memory binds, a little too slow in between. An expert is read as often as
    `running` samples read it, which is too often in the tail.
    """
    share, card = cluster.efficiency.decode, cluster.card
    bandwidth = n * card.bandwidth_bytes_per_s * share
    context = work.prompt_tokens + work.mean_tokens / 2
    weights_s = shape.bytes_read(running) / bandwidth
    context_s = shape.kv_bytes_per_token / bandwidth
    memory_s = weights_s + running * context * context_s
    compute_s = running * shape.forward_flops(context) / (n * card.matmul_flop_per_s * share)
    excess_s = max(0.0, compute_s - memory_s) / running
    token_s = excess_s + _communicate(cluster, shape, n) / share
    collectives = 2 * shape.layers if n > 1 else 0
    overhead_s = cluster.efficiency.step_overhead_s
    return weights_s + collectives * cluster.links.latency_s + overhead_s, token_s, context_s


def _communicate(cluster: Cluster, shape: Shape, n: int) -> float:
    """Seconds a token, in 16-bit activations. Dense: two all-reduces a layer of 2 (n-1)/n of the
    width, on every card (tensor parallel). Experts: each token is sent to the k cards of its
    experts and back, from the card that has it, one of n (expert parallel)."""
    others = (n - 1) / n
    if shape.experts == 1:
        moved = shape.layers * 2 * 2 * others * shape.width * 2.0
    else:
        moved = shape.layers * 2 * shape.experts_per_token * others * shape.width * 2 / n
    return moved / _link(cluster, n)


def _update_s(cluster: Cluster, shape: Shape, layout: Layout) -> float:
    """A batch's seconds that do not depend on its tokens: the optimizer reads and writes its state
    (over the host link if it is swapped), and the gradients of each supernode are added to those of
    the others: a card sends 2 (s-1)/s of its share (ring all-reduce; Patarasuk and Yuan 2009)."""
    m = layout.train_cards
    link = cluster.links.host_bytes_per_s if layout.swap_optimizer else None
    seconds = 2 * shape.optimizer_bytes / m / (link or cluster.card.bandwidth_bytes_per_s)
    s = -(-m // cluster.cards_per_supernode)
    if s > 1:
        mine = shape.gradient_bytes / cluster.cards_per_supernode
        seconds += 2 * (s - 1) / s * mine / cluster.links.between_bytes_per_s
    return seconds


def _switch_s(cluster: Cluster, shape: Shape, layout: Layout) -> float:
    """Of one edge between phases. A step of shared cards has as many edges as phases; together they
    bring the weights of each of its uses (but one storage) from the host and back."""
    if not layout.shared:
        return 0.0
    m = layout.train_cards
    moved = 0.0 if layout.same_layout else shape.weight_bytes / m
    moved += shape.weight_bytes / m if layout.reference else 0.0
    edges = 4 if layout.reference else 3
    return 2 * moved / cluster.links.host_bytes_per_s / edges


def _link(cluster: Cluster, n: int) -> float:
    """The slowest link among n cards."""
    inside = n <= cluster.cards_per_supernode
    return cluster.links.supernode_bytes_per_s if inside else cluster.links.between_bytes_per_s


def _between(cluster: Cluster) -> float:
    """The slowest link on the way from the cards that train to a replica."""
    return _link(cluster, cluster.cards)


# ---------------------------------------------------------------- bytes


def memory(shape: Shape, layout: Layout, work: SampleTokens) -> dict[Phase, float]:
    """Bytes that the busiest card holds in each phase, all samples as long as they may be.

    Shared cards hold in each phase the weights and cache that it uses; an optimizer that is not
    swapped stays. Otherwise GENERATE is of the cards that generate, the others of those that train.
    """
    n, m = layout.cards_per_replica, layout.train_cards
    kv = layout.slots * (work.prompt_tokens + work.max_tokens) * shape.kv_bytes_per_token
    resident = 0.0 if layout.swap_optimizer else shape.optimizer_bytes / m
    kept = resident if layout.shared else 0.0
    activations = float(ACTIVATION_FACTOR * shape.width * layout.micro_batch_tokens)
    activations *= max(1.0, shape.layers * (1 - layout.recomputed))
    needs = {
        Phase.GENERATE: (shape.weight_bytes + kv) / n + kept,
        Phase.TRAIN: (shape.weight_bytes + shape.gradient_bytes) / m + resident + activations,
    }
    if layout.reference:
        # on cards of one job the policy and the optimizer stay where they are
        policy = 0.0 if layout.shared else shape.weight_bytes / m
        needs[Phase.SCORE] = shape.weight_bytes / m + policy + resident
    return needs


def missing(cluster: Cluster, needs: Mapping[Phase, float]) -> dict[Phase, float]:
    """Bytes by which phases do not fit a card; empty when all do."""
    has = cluster.card.memory_bytes * cluster.card.usable_share
    return {phase: need - has for phase, need in needs.items() if need > has}


# ---------------------------------------------------------------- checks


def _positive(part: Any, where: str, least: Mapping[str, float] | None = None) -> None:
    for part_field in fields(part):
        value, name = getattr(part, part_field.name), part_field.name
        low = (least or {}).get(name)
        if not math.isfinite(value) or value < 0 or (low is None and value == 0):
            need = "above 0" if low is None else f"at least {low:g}"
            raise ValueError(f"{where}.{name} = {value:g}: it must be finite and {need}")


def _at_most_one(part: Any, where: str, name: str) -> None:
    if (value := getattr(part, name)) > 1:
        raise ValueError(f"{where}.{name} = {value:g}: it is a share, 1 at most")
