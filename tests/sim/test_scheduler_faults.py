"""The scheduler by hand: failures, stop and resume, the end of the data."""

from __future__ import annotations

import pytest
from hand import Hand, names, step, train_one

from twofold import events as ev
from twofold.events import Event
from twofold.sched.scheduler import Scheduler
from twofold.types import Phase

# ---------------------------------------------------------------- failures


def test_failed_admissions_keep_their_deadline() -> None:
    """Even when the weights are newer by the time they are admitted again."""
    hand = Hand(max_staleness=1, max_running_samples=1)
    hand.start()
    assert hand.admitted == [(0, 0, 1), (1, 0, 1)]
    hand.generated((0, 0), (1, 0))
    hand.rewarded(0)
    hand.switched(Phase.TRAIN)
    hand.trained(0)
    hand.published()
    hand.switched(Phase.GENERATE)
    assert hand.admitted == [(2, 1, 2)]
    hand.rewarded(1)
    hand.failed(ev.Generate)
    hand.switched(Phase.TRAIN)
    hand.trained(1)
    hand.published()
    hand.switched(Phase.GENERATE)
    assert hand.doing(ev.Generate).version == 2
    assert hand.admitted == [(2, 1, 2)]
    hand.generated((2, 0))


def test_the_same_work_is_issued_again_three_times() -> None:
    hand = Hand()
    hand.start()
    first = hand.doing(ev.Generate)
    for _ in range(3):
        hand.failed(ev.Generate)
        assert hand.doing(ev.Generate).seq > first.seq
        assert hand.admitted == [(0, 0, 0)]
    hand.failed(ev.Generate, "no memory")
    assert hand.scheduler.outcome == "failed: Generate failed 4 times in a row: no memory"
    again = hand(ev.Resumed(epoch=1))
    assert names(again) == ["Generate"] and not hand.scheduler.finished


def test_a_success_ends_the_row_of_failures() -> None:
    hand = Hand()
    hand.start()
    for _ in range(3):
        for _ in range(3):
            hand.failed(ev.Generate)
        hand.generated()
    assert not hand.scheduler.finished


def test_one_group_whose_reward_always_fails_ends_the_run() -> None:
    """Although other rewards succeed in between."""
    hand = Hand(groups_per_step=5)
    hand.start()
    hand.generated(*((gid, 0) for gid in range(5)))
    for other in range(1, 5):
        assert not hand.scheduler.finished
        rewards = [c for c in hand.scheduler.outstanding() if isinstance(c, ev.Reward)]
        (seq,) = (c.seq for c in rewards if c.group_id == 0)
        hand(ev.Failed(command=seq, cause="dead"))
        if other < 4:
            hand.rewarded(other)
    assert hand.scheduler.outcome == "failed: Reward of group 0 failed 4 times in a row: dead"


def test_a_failed_update_trains_the_same_batch_again() -> None:
    """And what was scored is not scored again."""
    hand = Hand(max_staleness=1, steps=9, needs_reference=True)
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0)
    hand.generated()
    step(hand, 0)
    assert hand.admitted == [(2, 1, 2)]
    hand.generated((2, 0), (1, 0))
    hand.rewarded(2)  # ready first, but 1 is due
    hand.rewarded(1)
    hand.switched(Phase.SCORE)
    hand(ev.Scored(command=hand.doing(ev.Score).seq))
    hand.switched(Phase.TRAIN)
    hand.failed(ev.Train)
    hand.trained(1)


def test_cancelled_work_is_not_counted_as_failed() -> None:
    hand = Hand()
    hand.start()
    for _ in range(9):
        hand(ev.Cancelled(command=hand.doing(ev.Generate).seq))
    assert hand.admitted == [(0, 0, 0)]


def test_a_failed_switch_leaves_the_phase() -> None:
    hand = Hand()
    hand(ev.RunStarted())
    assert hand.scheduler.units[0].phase is Phase.SWITCH
    hand.failed(ev.Switch)
    again = hand.doing(ev.Switch)
    assert (again.before, again.after) == (Phase.IDLE, Phase.GENERATE)


@pytest.mark.parametrize("event", [
    ev.Trained(command=1, version=1),  # the command is a Generate
    ev.Scored(command=7),  # no such command
    ev.Switched(command=0),  # it has ended
    ev.Generated(command=1, finished=(ev.Finished(0, 5, 1),), n_tokens=1, decode_steps=1),
    ev.RunStarted(),
    ev.Resumed(epoch=0),
])  # fmt: skip
def test_impossible_events_are_refused(event: Event) -> None:
    hand = Hand()
    hand.start()
    with pytest.raises(AssertionError):
        hand(event)


# ---------------------------------------------------------------- stop and resume


def test_a_stop_in_an_update_publishes_and_saves_it() -> None:
    hand = Hand()
    train_one(hand)
    assert hand(ev.StopRequested(reason="Ctrl-C")) == []
    hand.trained(0)
    assert names(hand.published()) == ["Checkpoint"]
    hand(ev.Checkpointed(command=hand.doing(ev.Checkpoint).seq, version=1))
    assert hand.scheduler.outcome == "stopped: Ctrl-C"
    assert names(hand(ev.Resumed(epoch=1))) == ["Switch"]
    hand.switched(Phase.GENERATE)
    assert hand.admitted == [(1, 1, 1)]


def test_a_stop_before_an_update_leaves_it_for_later() -> None:
    hand = Hand()
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0)
    hand(ev.StopRequested(reason="time"))
    assert hand.switched(Phase.TRAIN) == []
    assert hand.scheduler.outcome == "stopped: time", "version 0 needs no checkpoint"
    assert names(hand(ev.Resumed(epoch=1))) == ["Train"]


def test_a_stop_does_not_wait_for_rewards() -> None:
    hand = Hand()
    hand.start()
    hand(ev.StopRequested(reason="now"))
    assert hand.generated((0, 0)) == []
    assert hand.scheduler.finished
    assert names(hand(ev.Resumed(epoch=1))) == ["Reward"]
    assert hand.scheduler.waiting_for == "reward of group 0"


def test_resumed_issues_outstanding_commands_again_under_the_new_epoch() -> None:
    hand = Hand(groups_per_step=3)
    hand.start()
    hand.generated((0, 0), (2, 0))
    before = hand.scheduler.outstanding()
    again = hand(ev.Resumed(epoch=4))
    assert names(again) == ["Reward", "Reward", "Generate"]
    assert [c.seq for c in again] == [c.seq for c in before]
    assert [c.epoch for c in again] == [4, 4, 4]
    hand.rewarded(0)
    hand.rewarded(2)
    hand.generated((1, 0))
    assert hand.doing(ev.Reward).epoch == 4


def test_a_resumed_run_has_all_its_tries_again() -> None:
    hand = Hand(max_drops_per_step=1)
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0, n_valid=0)
    for _ in range(3):
        hand.failed(ev.Generate)
    hand(ev.Resumed(epoch=1))
    for _ in range(3):
        hand.failed(ev.Generate)
    hand.generated((1, 0))
    hand.rewarded(1, n_valid=0)
    assert not hand.scheduler.finished


def test_the_first_reason_to_stop_is_the_one_told() -> None:
    hand = Hand()
    hand.start()
    hand(ev.StopRequested(reason="time limit"))
    hand(ev.StopRequested(reason="Ctrl-C"))
    hand.generated()
    assert hand.scheduler.outcome == "stopped: time limit"


def test_a_stop_that_comes_too_late_stops_nothing() -> None:
    hand = Hand(steps=1)
    train_one(hand)
    hand.trained(0)
    hand.published()
    hand(ev.StopRequested(reason="Ctrl-C"))
    hand(ev.Checkpointed(command=hand.doing(ev.Checkpoint).seq, version=1))
    assert hand.scheduler.outcome == "done"


def test_folding_the_events_gives_the_same_scheduler() -> None:
    hand = Hand(max_staleness=1, evaluate=True, eval_every=1)
    hand(ev.RunStarted())
    hand.switched(Phase.EVAL)
    hand(ev.Evaluated(command=hand.doing(ev.Evaluate).seq, version=0))
    hand.switched(Phase.GENERATE)
    hand.generated((1, 0))
    folded = Scheduler(hand.scheduler.spec)
    for event, commands in hand.history:
        assert folded.handle(event, 99.0) == commands, "whatever the time"
    assert folded.outstanding() == hand.scheduler.outstanding()
    assert folded.stream == hand.scheduler.stream


# ---------------------------------------------------------------- the end of the data


def test_a_batch_that_can_no_longer_fill_is_discarded() -> None:
    hand = Hand(groups_per_step=2, max_staleness=1, steps=9)
    hand.start()
    assert len(hand.admitted) == 4
    hand(ev.DataEnded(n_groups=3))
    hand.generated((0, 0), (1, 0))
    assert {c.group_id for c in hand.scheduler.outstanding() if isinstance(c, ev.Discard)} == {3}
    hand(ev.Discarded(command=hand.doing(ev.Discard).seq, group_id=3))
    hand.rewarded(0)
    hand.rewarded(1)
    hand.generated()
    hand.switched(Phase.TRAIN)
    hand.trained(0, 1)
    commands = hand.published()
    assert names(commands) == ["Discard", "Checkpoint"], "one group is left, two make a batch"
    assert hand.doing(ev.Discard).reason == "data ended"
    hand(ev.Checkpointed(command=hand.doing(ev.Checkpoint).seq, version=1))
    assert hand.scheduler.waiting_for == "discard of group 2"
    hand(ev.Discarded(command=hand.doing(ev.Discard).seq, group_id=2))
    assert hand.scheduler.outcome == "done" and hand.scheduler.version == 1


def test_no_data_is_an_end_too() -> None:
    hand = Hand(evaluate=True)
    hand(ev.RunStarted())
    hand(ev.DataEnded(n_groups=0))
    hand.switched(Phase.EVAL)
    hand(ev.Evaluated(command=hand.doing(ev.Evaluate).seq, version=0))
    assert hand.scheduler.outcome == "done"
