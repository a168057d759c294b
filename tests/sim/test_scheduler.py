"""The scheduler by hand: every case small enough to be followed on paper."""

from __future__ import annotations

import pytest
from hand import Hand, names

from twofold import events as ev
from twofold.events import Admission
from twofold.types import Phase

# ---------------------------------------------------------------- the rule


def test_the_hard_case() -> None:
    """S = 1, P = 1: two groups start at version 0, one is trained, a third starts at 1 and finishes
    first. It must wait for the second, which could never be trained after it."""
    hand = Hand(max_staleness=1)
    hand.start()
    assert hand.admitted == [(0, 0, 1), (1, 0, 1)]
    assert names(hand.generated((0, 0))) == ["Reward", "Generate"]
    hand.rewarded(0)
    hand.generated()
    hand.switched(Phase.TRAIN)
    hand.trained(0)
    hand.published()
    hand.switched(Phase.GENERATE)
    assert hand.admitted == [(2, 1, 2)]
    hand.generated((2, 0))
    hand.rewarded(2)
    assert names(hand.generated()) == ["Generate"], "2 is ready, but 1 is due"
    hand.generated((1, 0))
    assert hand.scheduler.waiting_for == "reward of group 1"
    assert names(hand.rewarded(1)) == ["Switch"]
    hand.switched(Phase.TRAIN)
    assert names(hand.trained(1)) == ["Switch"]
    # 2 is ready at version 2, its deadline, without another quantum
    assert names(hand.published()) == ["Switch"]
    hand.switched(Phase.TRAIN)
    hand.trained(2)


def test_s_0_is_the_synchronous_loop() -> None:
    hand = Hand(groups_per_step=2, steps=2, group_size=2)
    hand.start()
    for step in range(2):
        a, b = 2 * step, 2 * step + 1
        assert hand.admitted == [(a, step, step), (b, step, step)]
        hand.generated((b, 0), (b, 1), (a, 0))
        assert hand.admitted == []
        assert names(hand.generated((a, 1))) == ["Reward"], "nothing starts before the update"
        hand.rewarded(b, n_valid=2)
        assert hand.scheduler.waiting_for == f"reward of group {a}"
        hand.rewarded(a, n_valid=2)
        hand.switched(Phase.TRAIN)
        assert hand.doing(ev.Train).group_ids == (a, b), "ascending, whoever was ready first"
        hand.trained(a, b)
        hand.published()
        if step == 0:
            hand.switched(Phase.GENERATE)
    hand(ev.Checkpointed(command=hand.doing(ev.Checkpoint).seq, version=2))
    assert hand.scheduler.outcome == "done"


def test_no_more_starts_than_steps_need() -> None:
    hand = Hand(steps=2, max_staleness=4)
    hand.start()
    assert len(hand.admitted) == 2


def test_starts_fill_twice_the_slots() -> None:
    hand = Hand(groups_per_step=9, max_running_samples=4, group_size=3)
    hand.start()
    assert len(hand.admitted) == 3, "9 samples: the third group started below 8"
    hand.generated((0, 0))
    assert hand.admitted == [], "8 unfinished are enough"
    hand.generated((0, 1))
    assert [gid for gid, *_ in hand.admitted] == [3]


# ---------------------------------------------------------------- drops


def test_a_group_with_too_few_rewards_is_replaced() -> None:
    hand = Hand(group_size=3)
    hand.start()
    hand.generated((0, 0), (0, 1), (0, 2))
    commands = hand.rewarded(0, n_valid=1, cause="timeout")
    assert names(commands) == ["Discard", "Generate"]
    assert hand.doing(ev.Discard).reason == "1 of 3 samples have a reward: timeout"
    assert hand.admitted == [(1, 0, 0)]


@pytest.mark.parametrize(
    ("group_size", "n_valid", "ready"),
    [(1, 1, True), (1, 0, False), (3, 2, True), (3, 1, False)],
)
def test_how_many_rewards_a_group_needs(group_size: int, n_valid: int, ready: bool) -> None:
    hand = Hand(group_size=group_size)
    hand.start()
    hand.generated(*((0, index) for index in range(group_size)))
    hand.rewarded(0, n_valid=n_valid)
    assert (len(hand.scheduler.outstanding()) == 1) == ready  # Switch, or Discard and Generate


def test_too_many_drops_stop_the_run_and_say_why() -> None:
    hand = Hand(max_drops_per_step=1)
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0, n_valid=0)
    hand.generated((1, 0))
    hand.rewarded(1, n_valid=0, cause="no such module: sympy")
    assert hand.scheduler.outcome.startswith("failed: 2 groups dropped in step 1")
    assert hand.scheduler.outcome.endswith("no such module: sympy")


def test_drops_are_counted_per_step() -> None:
    hand = Hand(max_drops_per_step=1)
    hand.start()
    for step in range(2):
        bad, good = 2 * step, 2 * step + 1
        hand.generated((bad, 0))
        hand.rewarded(bad, n_valid=0)
        hand.generated((good, 0))
        hand.rewarded(good)
        hand.switched(Phase.TRAIN)
        hand.trained(good)
        hand.published()
        hand.switched(Phase.GENERATE)
    assert not hand.scheduler.finished


# ---------------------------------------------------------------- the rest


def test_evaluation_and_checkpoints_come_when_they_are_due() -> None:
    hand = Hand(steps=5, evaluate=True, eval_every=2, checkpoint_every=3)
    hand(ev.RunStarted())
    order: list[str] = []
    while not hand.scheduler.finished:
        command = hand.scheduler.outstanding()[0]
        seq = command.seq
        match command:
            case ev.Evaluate(version=version):
                order.append(f"evaluate {version}")
                hand(ev.Evaluated(command=seq, version=version))
            case ev.Checkpoint(version=version):
                order.append(f"checkpoint {version}")
                hand(ev.Checkpointed(command=seq, version=version))
            case ev.Switch():
                hand(ev.Switched(command=seq))
            case ev.Generate(admit=admit):
                hand.generated(*((a.group_id, 0) for a in admit))
            case ev.Reward(group_id=gid):
                hand.rewarded(gid)
            case ev.Train(group_ids=group_ids):
                hand.trained(*group_ids)
            case ev.Publish(version=version):
                hand(ev.Published(command=seq, version=version))
    assert order == ["evaluate 0", "evaluate 2", "checkpoint 3", "evaluate 4", "evaluate 5",
                     "checkpoint 5"]  # fmt: skip


def test_admissions_are_fixed_under_the_version_the_card_has() -> None:
    hand = Hand(max_staleness=3, steps=9)
    hand.start()
    assert hand.doing(ev.Generate).admit[0] == Admission(0, start_version=0, deadline=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("groups_per_step", 0), ("max_staleness", -1), ("group_size", 0), ("steps", -1)],
)
def test_a_spec_that_cannot_work_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Hand(**{field: value})
