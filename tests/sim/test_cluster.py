"""Seconds and bytes of a cluster, against figures worked out by hand for a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twofold.sim.cluster import (
    Card,
    Cluster,
    Efficiency,
    Layout,
    Links,
    SampleTokens,
    costs,
    memory,
    missing,
)
from twofold.sim.shape import Shape
from twofold.types import Phase

# 1e9 parameters of 2 bytes, 10 layers of width 1000, 20 kB of cache a token
SHAPE = Shape("toy", 1e9, 1e9, layers=10, width=1000, kv_bytes_per_token=20e3, attention_width=1000)
# 100 TFLOP/s, 1 TB/s, all of it reached, so that nothing but the formulas is seen
CLUSTER = Cluster(
    "toy", 8, Card(100e9, 100e12, 1e12, usable_share=1.0), Links(100e9, 10e9, 20e9, latency_s=1e-5),
    efficiency=Efficiency(train=1.0, prefill=1.0, decode=1.0),
)  # fmt: skip
WORK = SampleTokens(prompt_tokens=100, mean_tokens=300, max_tokens=900)
ALONE = Layout(cards_per_replica=1, train_cards=8, slots=10, recomputed=0.0)
# forward, of a token that attends to 200: 2 x 1e9 + 4 x 10 x 1000 x 200
FORWARD_FLOP = 2.008e9


def test_decoding_few_samples_is_bound_by_memory() -> None:
    found = costs(CLUSTER, SHAPE, ALONE, WORK, running=10)
    assert found.decode_step_s == pytest.approx(2e9 / 1e12)  # the weights, read once
    assert found.decode_context_s == pytest.approx(20e3 / 1e12)  # a token's cache
    assert found.decode_token_s == 0.0  # 10 tokens are 0.2 ms of arithmetic, the weights are 2 ms


def test_decoding_many_samples_is_bound_by_arithmetic() -> None:
    found = costs(CLUSTER, SHAPE, ALONE, WORK, running=10_000)
    step_s = found.quantum(1, 10_000, 10_000 * 250, 0)  # each attends to 100 + 300 / 2 tokens
    flop = 2e9 + 4 * 10 * 1000 * 250
    assert step_s == pytest.approx(max(10_000 * flop / 100e12, 2e-3 + 10_000 * 250 * 20e3 / 1e12))
    assert found.decode_token_s > 0


def test_prefill_and_training_are_arithmetic() -> None:
    found = costs(CLUSTER, SHAPE, ALONE, WORK, running=10)
    assert found.prefill_token_s == pytest.approx(FORWARD_FLOP / 100e12)
    assert found.train_token_s == pytest.approx(3 * FORWARD_FLOP / 8 / 100e12)
    again = costs(CLUSTER, SHAPE, replace(ALONE, recomputed=1.0), WORK, running=10)
    assert again.train_token_s == pytest.approx(4 * FORWARD_FLOP / 8 / 100e12)


def test_an_update_reads_and_writes_the_optimizer_where_it_is() -> None:
    on_card = costs(CLUSTER, SHAPE, ALONE, WORK, 10).train_s
    assert on_card == pytest.approx(2 * 12e9 / 8 / 1e12)
    on_host = costs(CLUSTER, SHAPE, replace(ALONE, swap_optimizer=True), WORK, 10).train_s
    assert on_host == pytest.approx(2 * 12e9 / 8 / 20e9)
    two = replace(CLUSTER, supernodes=2)
    across = costs(two, SHAPE, replace(ALONE, train_cards=16), WORK, 10).train_s
    ring_s = 2 * (2 - 1) / 2 * (4e9 / 8) / 10e9
    assert across == pytest.approx(2 * 12e9 / 16 / 1e12 + ring_s)


def test_cards_of_a_replica_pay_for_talking() -> None:
    found = costs(CLUSTER, SHAPE, replace(ALONE, cards_per_replica=4), WORK, 10)
    moved = 10 * 2 * 2 * (3 / 4) * 1000 * 2  # two all-reduces a layer, 16-bit
    assert found.prefill_token_s == pytest.approx(FORWARD_FLOP / 4 / 100e12 + moved / 100e9)
    assert found.decode_step_s == pytest.approx(2e9 / 4 / 1e12 + 2 * 10 * 1e-5)


def test_weights_travel_to_cards_that_only_generate() -> None:
    apart = costs(CLUSTER, SHAPE, replace(ALONE, train_cards=4, shared=False), WORK, 10)
    assert (apart.fetch_s, apart.publish_s, apart.to_train_s) == (pytest.approx(0.02), 0.0, 0.0)
    one_storage = costs(CLUSTER, SHAPE, replace(ALONE, same_layout=True), WORK, 10)
    assert one_storage.publish_s == one_storage.to_train_s == 0.0
    assert costs(CLUSTER, SHAPE, ALONE, WORK, 10).publish_s == pytest.approx(0.02)


def test_memory_of_shared_cards() -> None:
    layout = replace(ALONE, cards_per_replica=2, micro_batch_tokens=1000)
    needs = memory(SHAPE, layout, WORK)
    cache = 10 * (100 + 900) * 20e3  # every sample as long as it may be
    optimizer = 12e9 / 8
    assert needs[Phase.GENERATE] == pytest.approx((2e9 + cache) / 2 + optimizer)
    assert needs[Phase.TRAIN] == pytest.approx((2e9 + 4e9) / 8 + optimizer + 34 * 1000 * 1000 * 10)
    assert Phase.SCORE not in needs


def test_what_memory_options_free() -> None:
    layout = replace(ALONE, micro_batch_tokens=1000)
    plain, swapped, again = (
        memory(SHAPE, replace(layout, **changes), WORK)  # type: ignore[arg-type]
        for changes in ({}, {"swap_optimizer": True}, {"recomputed": 1.0})
    )
    for phase in (Phase.GENERATE, Phase.TRAIN):
        assert plain[phase] - swapped[phase] == pytest.approx(12e9 / 8)
    assert plain[Phase.TRAIN] - again[Phase.TRAIN] == pytest.approx(34 * 1000 * 1000 * 9)


def test_memory_of_separated_cards_and_of_a_reference() -> None:
    needs = memory(SHAPE, replace(ALONE, train_cards=4, shared=False, reference=True), WORK)
    assert needs[Phase.GENERATE] == pytest.approx(2e9 + 10 * 1000 * 20e3)  # no optimizer
    assert needs[Phase.SCORE] == pytest.approx(2e9 / 4 + 2e9 / 4 + 12e9 / 4)


def test_what_is_missing_is_told_in_bytes_of_what_may_be_used() -> None:
    tight = replace(CLUSTER, card=replace(CLUSTER.card, memory_bytes=10e9, usable_share=0.5))
    needs = {Phase.GENERATE: 4.9e9, Phase.TRAIN: 7e9}
    assert missing(tight, needs) == {Phase.TRAIN: pytest.approx(2e9)}


def test_experts_that_no_token_chose_are_not_read() -> None:
    experts = replace(SHAPE, active_parameters=0.2e9, experts=10, experts_per_token=1)
    # 0.8e9 idle of 10 experts: all experts hold 0.8 / 0.9 of 1e9
    assert experts.expert_parameters == pytest.approx(0.8e9 / 0.9)
    assert experts.bytes_read(1) == pytest.approx(0.2e9 * 2)
    assert experts.bytes_read(1000) == pytest.approx(1e9 * 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (replace(ALONE, cards_per_replica=9), "cards_per_replica = 9: the cluster has 8 cards"),
        (replace(ALONE, train_cards=16), "train_cards = 16: the cluster has 8 cards"),
    ],
)
def test_more_cards_than_there_are(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        costs(CLUSTER, SHAPE, layout, WORK, 10)
