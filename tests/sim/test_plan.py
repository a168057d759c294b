"""The planner on clusters where the answer is known: who must win, where asynchrony cannot help,
what does not fit and by how much.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from twofold.sim import plan_words
from twofold.sim.cluster import Card, Cluster, Efficiency, Links, SampleTokens
from twofold.sim.plan import (
    Job,
    Plan,
    Search,
    candidates,
    plan,
    with_memory_options,
    write_timeline,
)
from twofold.sim.ranking import WORTHWHILE, choose, left_out
from twofold.sim.shape import Shape
from twofold.sim.window import Outcome, simulate
from twofold.sim.workload import GroupWork, Recorded, Workload
from twofold.types import Phase

SHAPE = Shape("toy", 1e9, 1e9, layers=10, width=1000, kv_bytes_per_token=20e3, attention_width=1000)
CLUSTER = Cluster(
    "toy", 4, Card(40e9, 100e12, 1e12, usable_share=1.0), Links(100e9, 10e9, 20e9, latency_s=0.0),
    efficiency=Efficiency(train=1.0, prefill=1.0, decode=1.0),
)  # fmt: skip
ARITHMETIC = replace(CLUSTER, card=replace(CLUSTER.card, matmul_flop_per_s=1e12))
TOKENS = SampleTokens(8, 100, 200)
SEARCH = Search(staleness=(0, 1), cards_per_replica=(1,), quanta=(25,), splits=(0.5,))


def job(max_tokens: int = 200, long_tail: float = 0.1, **changes: Any) -> Job:
    work = Workload(3, 4, max_tokens, long_tail, reward_s=1e-4)
    tokens = SampleTokens(8, max_tokens / 2, max_tokens)
    return Job(groups_per_step=8, group_size=4, tokens=tokens, workload=work, **changes)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(CLUSTER, SHAPE, job(), SEARCH)


def fastest(found: Plan, placement: str) -> float:
    names = (row for row in found.rows if row.candidate.placement.name == placement)
    return next(names).outcome.tokens_per_s


# ---------------------------------------------------------------- who wins, and the words


def test_separated_cards_lose_where_half_of_them_has_a_quarter_of_the_work() -> None:
    """Where arithmetic is all, training is three times generation: on half of the cards it takes
    1.5 times as long as both jobs take on all."""
    result = plan(ARITHMETIC, SHAPE, job(), SEARCH)
    ahead = fastest(result, "fully_shared") / fastest(result, "separated")
    assert 1.2 < ahead < 1.5  # all wait for the one with the longest completions
    assert result.best.candidate.placement.name == "fully_shared"
    assert "ahead of the best separated 2+2" in plan_words.why(result)


def test_asynchrony_that_cannot_help_is_said_not_to() -> None:
    """Every completion has the same length, so nothing waits for a long tail; cards that do both
    jobs wait for no other card; and a fuller decode batch is no faster where arithmetic is all."""
    shared = replace(SEARCH, splits=())
    result = plan(ARITHMETIC, SHAPE, job(long_tail=1.0), shared)
    assert {row.max_staleness for row in result.rows} == {0, 1}
    assert result.best.max_staleness == 0
    words = plan_words.why(result)
    assert "Asynchrony does not help here" in words and "Run with S = 0." in words


def test_asynchrony_that_helps_is_said_to(found: Plan) -> None:
    separated = [row for row in found.rows if row.candidate.placement.name == "separated"]
    stale, synchronous = separated
    assert (stale.max_staleness, synchronous.max_staleness) == (1, 0)
    assert stale.outcome.tokens_per_s > 1.1 * synchronous.outcome.tokens_per_s
    assert "Asynchrony gains" in plan_words.why(found)


def test_the_best_is_the_least_stale_of_those_nearly_as_fast_as_the_first(found: Plan) -> None:
    speeds = [row.outcome.tokens_per_s for row in found.rows]
    assert speeds == sorted(speeds, reverse=True)
    near = [row for row in found.rows if speeds[0] / row.outcome.tokens_per_s - 1 < WORTHWHILE]
    assert found.best in near
    assert found.best.max_staleness == min(row.max_staleness for row in near)


def row(tokens_per_s: float, staleness: int) -> Any:
    class Row:
        max_staleness = staleness
        outcome = Outcome(tokens_per_s, 1.0, {staleness: 1.0}, {}, {})

    return Row()


def test_the_choice_among_rows() -> None:
    near = [row(101.0, 2), row(100.5, 1), row(100.0, 0)]
    assert choose(near) is near[2]
    far = [row(110.0, 2), row(109.0, 1), row(108.5, 1), row(100.0, 0)]
    assert choose(far) is far[1], "0.9 % are no reason for staler tokens"
    assert "S = 2, gains +0.9%" in left_out(far, far[1])
    assert choose(far[1:]) is far[1] and left_out(far[1:], far[1]) == ""
    assert choose([row(110.0, 2), row(100.0, 1)]).max_staleness == 2


def test_shares_of_the_time_and_of_the_tokens_sum_to_1(found: Plan) -> None:
    for each in found.rows:
        o = each.outcome
        assert sum(o.busy.values()) + sum(o.idle.values()) == pytest.approx(1.0)
        assert sum(o.staleness.values()) == pytest.approx(1.0)
        assert max(o.staleness) <= each.max_staleness


def test_the_same_question_has_the_same_answer(found: Plan) -> None:
    assert plan_words.table(plan(CLUSTER, SHAPE, job(), SEARCH)) == plan_words.table(found)


def test_the_table_has_every_row_or_says_how_many_more(found: Plan) -> None:
    assert len(found.rows) == 4
    short = plan_words.table(found, most=1)
    assert "2 more are slower (--top 4" in short or "3 more are slower (--top 4" in short
    whole = plan_words.table(found).splitlines()
    assert sum("optimizer on the card" in line for line in whole) == 4 + 1  # and the best's memory
    assert sum(line.startswith("* ") for line in whole) == 1


# ---------------------------------------------------------------- what fits


def test_nothing_fits_and_by_how_much() -> None:
    small = replace(CLUSTER, card=replace(CLUSTER.card, memory_bytes=1e9))
    with pytest.raises(ValueError) as refused:
        plan(small, SHAPE, job(micro_batch_tokens=1), replace(SEARCH, cards_per_replica=(4,)))
    # training: weights and gradients, (2 + 4) / 4 GB, with the optimizer on the host
    assert "nothing fits: fully_shared with 4 cards a replica" in str(refused.value)
    assert "lacks 0.5 GB a card in train, optimizer on the host, 100% recomputed" in str(
        refused.value
    )


def test_what_does_not_fit_is_told_beside_what_does() -> None:
    """Cards that only generate hold 2 GB of weights each when they are a replica alone, cards with
    both jobs share gradients among four; two that train need (2 + 4) / 2 GB."""
    medium = replace(CLUSTER, card=replace(CLUSTER.card, memory_bytes=2.7e9))
    result = plan(medium, SHAPE, job(micro_batch_tokens=1), SEARCH)
    assert {r.candidate.placement.name for r in result.rows} == {"fully_shared"}
    assert {r.candidate.placement.name for r in result.refused} == {"separated"}
    (line,) = plan_words.refusals(result)
    assert line.startswith("does not fit: separated 2+2, 1 card a replica: a card lacks 0.3 GB")
    assert line in plan_words.table(result)


def test_memory_options_are_used_as_far_as_they_must() -> None:
    """On 4 cards training takes 1.5 GB, the optimizer 3 GB, activations 3.4 MB a layer and a
    thousand tokens."""
    work = job(micro_batch_tokens=10_000)  # 3.4 GB of activations, 0.34 GB when recomputed
    (candidate,) = candidates(CLUSTER, SHAPE, work, replace(SEARCH, staleness=(0,), splits=()))

    def chosen(gigabytes: float) -> list[tuple[float, bool]]:
        cluster = replace(CLUSTER, card=replace(CLUSTER.card, memory_bytes=gigabytes * 1e9))
        made = with_memory_options(cluster, SHAPE, work, candidate, SEARCH)
        assert isinstance(made, list)
        return [(c.recomputed, c.swap_optimizer) for c in made]

    assert chosen(8.0) == [(0.0, False)]  # 1.5 + 3 + 3.4 in training; 2 + 3 and the cache else
    assert chosen(7.0) == [(0.5, False)]
    assert chosen(5.01) == [(1.0, False), (0.0, True)]  # no room for the cache: the swap may pay
    assert chosen(4.0) == [(0.5, True)]


# ---------------------------------------------------------------- work, options, time


def test_recorded_groups_are_all_met() -> None:
    """They are stretched over the simulated steps, few as these are."""
    groups = tuple(GroupWork(8, (n, n), n_valid=2, reward_s=0.0, varies=True) for n in range(1, 41))
    work = Recorded(groups, n_total=4000, max_tokens=200)
    recorded = Job(4, 2, TOKENS, work)
    result = plan(CLUSTER, SHAPE, recorded, replace(SEARCH, staleness=(0,), splits=(), n_steps=8))
    o = result.best.outcome
    # the middle 8 of 10 steps; as they were recorded, at n_total = 4000, all would have 1 token
    assert 15 < o.tokens_per_s * o.seconds_per_step / 8 < 26
    with pytest.raises(ValueError, match="group_size = 4: the recorded groups have 2 samples"):
        Job(4, 4, TOKENS, work)


def test_updates_of_a_batch_bound_the_staleness_that_is_tried() -> None:
    two = job(updates=2)
    assert {c.staleness for c in candidates(CLUSTER, SHAPE, two, SEARCH)} == {1}
    result = plan(CLUSTER, SHAPE, two, replace(SEARCH, splits=()))
    assert result.best.outcome.mean_staleness == pytest.approx(0.5, abs=0.6)
    with pytest.raises(ValueError, match="search 2 or more"):
        candidates(CLUSTER, SHAPE, job(updates=3), SEARCH)


def test_progress_is_told_for_every_candidate() -> None:
    told: list[tuple[int, int]] = []
    plan(CLUSTER, SHAPE, job(), replace(SEARCH, staleness=(0,)), lambda *n: told.append(n))
    assert told == [(1, 2), (2, 2)]


def test_a_run_that_cannot_reach_its_end_is_refused() -> None:
    bad = replace(job(), workload=Workload(3, 4, bad_group=1.0))
    with pytest.raises(ValueError, match="ended before its last step: failed: 33 groups dropped"):
        plan(CLUSTER, SHAPE, bad, SEARCH)
    ending = replace(job(), workload=Workload(3, 4, n_groups=9))
    with pytest.raises(ValueError, match="n_groups = 9: the workload ends before"):
        plan(CLUSTER, SHAPE, ending, SEARCH)


# ---------------------------------------------------------------- timeline


def test_the_timeline_is_one_that_a_viewer_opens(found: Plan, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    separated = next(r for r in found.rows if r.candidate.placement.name == "separated")
    write_timeline(path, CLUSTER, SHAPE, job(), separated, SEARCH)
    events = json.loads(path.read_text())["traceEvents"]
    slices: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named.keys() >= slices.keys() and len(named) == 3 + 1  # a trainer, two replicas, rewards
    assert len(slices) == 3
    for track in slices.values():
        ordered = sorted(track)
        for (_, end), (start, _) in pairwise(ordered):
            assert start >= end - 1e-3, "two things at once"  # microseconds
    marks = [event["name"] for event in events if event["ph"] == "i"]
    lead = separated.max_staleness + 1
    n_steps = -(-SEARCH.n_steps // lead) * lead + 2 * lead  # whole cycles are measured
    assert marks == [f"version {n}" for n in range(1, n_steps + 1)]
    begun = sorted(event["id"] for event in events if event["ph"] == "b")
    assert begun and begun == sorted(event["id"] for event in events if event["ph"] == "e")


def test_memory_is_told_by_phase(found: Plan) -> None:
    assert set(found.best.memory) == {Phase.GENERATE, Phase.TRAIN}
    assert "memory of the best, GB a card: generate" in plan_words.table(found)


def test_the_names_that_others_import() -> None:
    from twofold.sim import plan as module

    assert module.simulate is simulate and module.Outcome is Outcome
