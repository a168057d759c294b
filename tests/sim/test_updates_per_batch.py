"""Several updates a batch, and groups that are replaced because their rewards are all equal."""

from __future__ import annotations

import pytest
from hand import Hand, names

from twofold import events as ev
from twofold.sched.scheduler import SchedulerSpec
from twofold.types import Phase


def spec(**changes: int) -> SchedulerSpec:
    sizes = {"steps": 3, "groups_per_step": 1, "group_size": 2, "max_running_samples": 4}
    return SchedulerSpec(**{**sizes, "max_staleness": 0, **changes})


@pytest.mark.parametrize(
    ("max_staleness", "updates_per_batch", "batches_ahead"),
    [(0, 1, 0), (3, 1, 3), (1, 2, 0), (2, 2, 0), (3, 2, 1), (5, 2, 2), (3, 4, 0), (7, 4, 1)],
)
def test_the_rule_counts_in_batches(
    max_staleness: int, updates_per_batch: int, batches_ahead: int
) -> None:
    made = spec(max_staleness=max_staleness, updates_per_batch=updates_per_batch)
    assert made.batches_ahead == batches_ahead
    # the last update of the latest batch is within S, and that of the one after would not be
    latest = batches_ahead * updates_per_batch + updates_per_batch - 1
    assert latest <= max_staleness < latest + updates_per_batch


def test_more_updates_than_the_staleness_allows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^updates_per_batch is 3: .* it may be 2 at most$"):
        spec(max_staleness=1, updates_per_batch=3)


def test_two_updates_under_staleness_1_are_synchronous() -> None:
    hand = Hand(steps=2, max_staleness=1, updates_per_batch=2, eval_every=1, checkpoint_every=1)
    hand.start()
    for step in range(2):
        assert hand.admitted == [(step, 2 * step, 2 * step)], "nothing is ahead"
        assert names(hand.generated((step, 0))) == ["Reward"]
        hand.rewarded(step)
        hand.switched(Phase.TRAIN)
        train = hand.doing(ev.Train)
        assert train.version == 2 * step
        hand(ev.Trained(command=train.seq, version=2 * step + 2))
        hand.published()
        hand(ev.Checkpointed(command=hand.doing(ev.Checkpoint).seq, version=2 * step + 2))
        if step == 0:
            hand.switched(Phase.GENERATE)
    assert hand.scheduler.outcome == "done"
    assert (hand.scheduler.version, hand.scheduler.steps_made) == (4, 2)


def test_two_updates_under_staleness_3_let_one_batch_run_ahead() -> None:
    hand = Hand(max_staleness=3, updates_per_batch=2)
    hand.start()
    assert hand.admitted == [(0, 0, 2), (1, 0, 2)], "the last update of version 2 to 4 finds age 3"
    hand.generated((1, 0))
    hand.rewarded(1)
    hand.generated()
    hand.switched(Phase.TRAIN)
    hand(ev.Trained(command=hand.doing(ev.Train).seq, version=2))
    hand.published()
    hand.switched(Phase.GENERATE)
    assert hand.admitted == [(2, 2, 4)]
    hand.generated((2, 0))
    hand.rewarded(2)
    assert names(hand.generated()) == ["Generate"], "2 is ready, but 0 is due"


def test_a_trained_event_must_bring_all_updates() -> None:
    hand = Hand(max_staleness=1, updates_per_batch=2)
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0)
    hand.switched(Phase.TRAIN)
    with pytest.raises(AssertionError):
        hand(ev.Trained(command=hand.doing(ev.Train).seq, version=1))


def rewarded(hand: Hand, gid: int, varies: bool, n_valid: int = 2) -> None:
    hand.generated((gid, 0), (gid, 1))
    seq = hand.doing(ev.Reward).seq
    hand(ev.Rewarded(command=seq, group_id=gid, n_valid=n_valid, varies=varies, cause="boom"))


def test_a_group_without_variance_is_replaced() -> None:
    hand = Hand(group_size=2, dynamic_sampling=True)
    hand.start()
    rewarded(hand, 0, varies=False)
    discard = hand.doing(ev.Discard)
    assert (discard.group_id, discard.reason) == (0, "its rewards are all equal")
    hand(ev.Discarded(command=discard.seq, group_id=0))
    rewarded(hand, 1, varies=True)
    hand.switched(Phase.TRAIN)
    assert hand.doing(ev.Train).group_ids == (1,)


def test_without_dynamic_sampling_it_is_trained() -> None:
    hand = Hand(group_size=2)
    hand.start()
    rewarded(hand, 0, varies=False)
    hand.switched(Phase.TRAIN)
    assert hand.doing(ev.Train).group_ids == (0,)


def test_a_solved_task_stops_with_its_weights_and_says_why() -> None:
    hand = Hand(group_size=2, dynamic_sampling=True, max_drops_per_step=2)
    hand.start()
    rewarded(hand, 0, varies=True)
    hand.switched(Phase.TRAIN)
    hand.trained(0)
    hand.published()
    hand.switched(Phase.GENERATE)
    for gid in (1, 2, 3):
        assert not hand.scheduler.finished
        rewarded(hand, gid, varies=False)
    saved = hand.doing(ev.Checkpoint)
    hand(ev.Checkpointed(command=saved.seq, version=1))
    assert hand.scheduler.outcome == (
        "stopped: 3 groups dropped in step 2, the last (group 3) because its rewards are all equal"
    )


def test_failed_rewards_count_towards_the_same_limit() -> None:
    hand = Hand(group_size=2, dynamic_sampling=True, max_drops_per_step=1)
    hand.start()
    rewarded(hand, 0, varies=False)
    rewarded(hand, 1, varies=True, n_valid=1)
    assert hand.scheduler.outcome == (
        "failed: 2 groups dropped in step 1, the last (group 1) because 1 of 2 samples have a "
        "reward: boom"
    )


def test_dynamic_sampling_needs_something_to_compare() -> None:
    with pytest.raises(ValueError, match="dynamic_sampling compares"):
        Hand(group_size=1, dynamic_sampling=True)
