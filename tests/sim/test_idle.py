"""Why a card does nothing: one cause for each that is free, and the right one."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from tests.sim import schedules
from tests.sim.hand import Hand, train_one

from twofold import events as ev
from twofold.sched.idle import Cause, Idle
from twofold.sched.placement import Placement
from twofold.sched.scheduler import Scheduler
from twofold.types import Phase

SEEDS = range(150)


def causes(hand: Hand) -> list[str]:
    """Of all units, in order; "" for those that do something."""
    found = Idle(hand.scheduler).causes()
    return [found[unit.index].value if unit.free else "" for unit in hand.scheduler.units]


def end(hand: Hand, kind: type[ev.Command], unit: int, **facts: object) -> None:
    """The command of this kind on that unit succeeds."""
    scheduler = hand.scheduler
    card = scheduler.units[unit].unit.cards[0]
    (command,) = (c for c in scheduler.outstanding() if type(c) is kind and card in c.cards)
    fact = {
        ev.Switch: ev.Switched, ev.Receive: ev.Received, ev.Score: ev.Scored,
        ev.Evaluate: ev.Evaluated, ev.Publish: ev.Published, ev.Train: ev.Trained,
    }[kind]  # fmt: skip
    hand(fact(command=command.seq, **facts))


def decoded(hand: Hand, unit: int, *finished: tuple[int, int]) -> None:
    """The quantum on that unit ends; these samples have."""
    seq = hand.scheduler.units[unit].command
    assert seq is not None
    done = tuple(ev.Finished(gid, index, 5) for gid, index in finished)
    hand(ev.Generated(command=seq, finished=done, n_tokens=9, decode_steps=9))


def two_replicas(**options: object) -> Hand:
    """Of cards with both jobs; each has a group of the first batch."""
    spec = {"groups_per_step": 2, "placement": Placement(cards=2), **options}
    hand = Hand(**spec)
    hand(ev.RunStarted())
    for unit in (0, 1):
        end(hand, ev.Switch, unit)
    return hand


def one_of_each(**options: object) -> Hand:
    """One card that trains and one that generates."""
    hand = Hand(placement=Placement(cards=2, generate_only=1, train_only=1), **options)
    hand(ev.RunStarted())
    end(hand, ev.Switch, 1)
    return hand


# ---------------------------------------------------------------- of any state


@pytest.mark.parametrize("part", range(3))
def test_every_free_unit_has_one_cause_and_every_busy_one_none(part: int) -> None:
    """Whatever faults, stops and crashes; looking changes nothing; units that agree in job, version
    and `lost` agree in the cause, on which `obs.card_time` counts."""
    seen: Counter[Cause] = Counter()
    for seed in SEEDS[part::3]:
        history = schedules.run_schedule(seed, checked=False)
        scheduler = Scheduler(history.spec)
        for now_s, event, _ in history.entries:
            scheduler.handle(event, now_s)
            before = copy.deepcopy(schedules.state(scheduler)) if seed < 6 else None
            found = Idle(scheduler).causes()
            assert before is None or schedules.state(scheduler) == before, f"seed {seed}: changed"
            assert found.keys() == {u.index for u in scheduler.units if u.free}, f"seed {seed}"
            same: dict[object, Cause] = {}
            for index, cause in found.items():
                unit = scheduler.units[index]
                kind = unit.unit[1:], unit.version, unit.lost
                assert same.setdefault(kind, cause) is cause, f"seed {seed}, {event}"
            seen.update(found.values())
    assert len(seen) >= 10, f"seeds {SEEDS}, part {part}: too tame, only {seen}"


def test_a_step_is_due_exactly_when_the_scheduler_is_at_it() -> None:
    for seed in SEEDS:
        history = schedules.run_schedule(seed, checked=False)
        scheduler = Scheduler(history.spec)
        trainers = [u for u in scheduler.units if u.unit.trains]
        pure = not any(u.unit.generates for u in trainers)
        for now_s, event, _ in history.entries:
            scheduler.handle(event, now_s)
            if scheduler.finished or scheduler.stopping:
                continue
            busy = any(not unit.free for unit in trainers)
            if scheduler.step_due():
                held = pure and scheduler.evaluation_due()  # a publish waits for it
                assert busy or held, f"seed {seed}: {event}, and nobody is at the step"
            elif pure:
                assert not busy, f"seed {seed}: {event}, and cards that only train are busy"


# ---------------------------------------------------------------- each cause


def test_a_card_waits_for_the_reward_that_would_make_a_batch() -> None:
    hand = Hand()
    hand.start()
    assert causes(hand) == [""]
    hand.generated((0, 0))
    assert causes(hand) == ["reward"]


def test_the_longest_sample_of_a_batch_leaves_the_other_card_a_long_tail() -> None:
    hand = two_replicas()
    decoded(hand, 0, (0, 0))
    hand.rewarded(0)
    assert causes(hand) == ["long_tail", ""]
    decoded(hand, 1, (1, 0))
    assert causes(hand) == ["reward", "reward"]


def test_a_group_that_is_due_is_waited_for_though_others_are_ready() -> None:
    """The hard case of docs/stalesync.md, on two cards."""
    hand = two_replicas(groups_per_step=1, max_staleness=1)
    decoded(hand, 0, (0, 0))
    assert causes(hand) == ["reward", ""]
    hand.rewarded(0)
    assert causes(hand) == ["peers", ""], "a step begins on all cards that train, together"
    decoded(hand, 1)
    hand.switched(Phase.TRAIN)
    hand.trained(0)
    hand.published()
    for unit in (0, 1):
        end(hand, ev.Switch, unit)
    # group 1 goes on where it was; group 2 starts on the other card, and is ready first
    decoded(hand, 0, (2, 0))
    assert causes(hand) == ["required", ""], "the reward of group 2 would not make a batch"
    hand.rewarded(2)
    assert hand.scheduler.stream.n_ready() == 1
    assert causes(hand) == ["required", ""]


def test_a_card_that_only_trains_waits_for_generation_then_its_tail() -> None:
    hand = one_of_each(groups_per_step=2, max_staleness=1, max_running_samples=1)
    assert causes(hand) == ["generation", ""]
    hand = one_of_each(groups_per_step=2, max_running_samples=8)
    assert causes(hand) == ["long_tail", ""]
    decoded(hand, 1, (0, 0))
    hand.rewarded(0)
    assert causes(hand) == ["long_tail", ""]


def test_a_card_that_only_generates_waits_for_the_bound_and_then_for_weights() -> None:
    hand = one_of_each()
    decoded(hand, 1, (0, 0))
    assert causes(hand) == ["reward", "reward"]
    hand.rewarded(0)
    end(hand, ev.Switch, 0)
    assert causes(hand) == ["", "bound"]
    hand.trained(0)
    hand.published()
    assert causes(hand) == ["weights", "weights"]
    fetch = hand.doing(ev.Fetch)
    hand(ev.Fetched(command=fetch.seq, version=1, unit=1))
    assert causes(hand) == ["weights", ""]
    end(hand, ev.Receive, 1, version=1)
    assert causes(hand) == ["long_tail", ""]


def test_the_reference_model_is_waited_for() -> None:
    hand = Hand(needs_reference=True, placement=Placement(cards=2, score_only=1))
    hand(ev.RunStarted())
    end(hand, ev.Switch, 0)
    assert causes(hand) == ["", "generation"]
    decoded(hand, 0, (0, 0))
    assert causes(hand) == ["reward", "reward"]
    hand.rewarded(0)
    end(hand, ev.Switch, 1)
    assert causes(hand) == ["reference", ""]


def test_evaluation_holds_what_it_must() -> None:
    hand = Hand(
        evaluate=True, eval_every=1, placement=Placement(cards=2, generate_only=1, train_only=1)
    )
    hand(ev.RunStarted())
    end(hand, ev.Switch, 1)
    assert causes(hand) == ["evaluation", ""]
    end(hand, ev.Evaluate, 1, version=0)
    assert causes(hand) == ["generation", ""]


def test_data_that_ended_and_a_run_that_is_over() -> None:
    hand = Hand(groups_per_step=2, placement=Placement(cards=2))
    hand(ev.RunStarted())
    for unit in (0, 1):
        end(hand, ev.Switch, unit)
    hand(ev.DataEnded(n_groups=1))
    decoded(hand, 0)
    decoded(hand, 1)
    assert causes(hand) == ["data", "data"]

    hand = one_of_each(steps=1)
    decoded(hand, 1, (0, 0))
    assert causes(hand) == ["reward", "over"]


def test_a_stop_is_a_cause() -> None:
    hand = two_replicas()
    hand(ev.StopRequested(reason="Ctrl-C"))
    decoded(hand, 0)
    assert causes(hand) == ["stopping", ""]


def test_a_unit_that_does_something_has_no_cause() -> None:
    hand = Hand()
    train_one(hand)
    assert hand.scheduler.units[0].phase is Phase.TRAIN
    with pytest.raises(AssertionError, match="not idle"):
        Idle(hand.scheduler).cause(hand.scheduler.units[0])
