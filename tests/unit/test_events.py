"""Commands and events are plain data that round-trips through JSON."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest

from twofold import events as ev
from twofold.events import Admission, Command, Event, Finished
from twofold.types import Phase

COMMANDS: list[Command] = [
    ev.Generate(seq=1, cards=(0,), epoch=2, version=3, max_decode_steps=16,
                admit=(Admission(7, 3, 4), Admission(8, 3, 4))),
    ev.Reward(seq=2, group_id=7),
    ev.Score(seq=3, cards=(0, 1), group_ids=(7, 8)),
    ev.Train(seq=4, cards=(0, 1), version=3, group_ids=(7, 8)),
    ev.Publish(seq=5, cards=(0, 1), version=4),
    ev.Switch(seq=6, cards=(0,), before=Phase.GENERATE, after=Phase.TRAIN),
    ev.Evaluate(seq=7, cards=(0,), version=4),
    ev.Checkpoint(seq=8, cards=(0,), version=4),
    ev.Discard(seq=9, group_id=9, reason="0 of 8 samples have a reward: \"no\" \u2013 Zeit\nende"),
    ev.Fetch(seq=10, version=4, unit=2),
    ev.Receive(seq=11, cards=(2, 3), version=4),
]  # fmt: skip
EVENTS: list[Event] = [
    ev.RunStarted(),
    ev.Resumed(epoch=1),
    ev.StopRequested(reason="Ctrl-C"),
    ev.DataEnded(n_groups=12),
    ev.Generated(command=1, seconds=0.1, finished=(Finished(7, 0, 5), Finished(8, 1, 16)),
                 n_tokens=40, decode_steps=16),
    ev.Rewarded(command=2, group_id=7, n_valid=7, varies=True, cause="timeout"),
    ev.Scored(command=3),
    ev.Trained(command=4, seconds=1 / 3, version=4),
    ev.Published(command=5, version=4),
    ev.Switched(command=6),
    ev.Evaluated(command=7, version=4),
    ev.Checkpointed(command=8, version=4),
    ev.Discarded(command=9, group_id=9),
    ev.Fetched(command=10, version=4, unit=2),
    ev.Received(command=11, version=4),
    ev.Failed(command=4, cause="killed"),
    ev.Cancelled(command=1),
]  # fmt: skip


def subclasses(cls: type) -> set[type]:
    return {cls} | {below for sub in cls.__subclasses__() for below in subclasses(sub)}


def test_the_lists_above_leave_no_kind_out() -> None:
    assert {type(c) for c in COMMANDS} == subclasses(Command) - {Command}
    assert {type(e) for e in EVENTS} == subclasses(Event) - {Event, ev.Terminal}


@pytest.mark.parametrize("item", [*COMMANDS, *EVENTS], ids=lambda item: item.kind)
def test_json_round_trip(item: Command | Event) -> None:
    text = ev.to_json(item)
    assert "\n" not in text
    assert json.loads(text)["kind"] == item.kind
    again = ev.from_json(text)
    assert again == item
    for field in fields(item):  # types too: a list is not a tuple, a str not a Phase
        assert type(getattr(again, field.name)) is type(getattr(item, field.name))
    assert hash(again) == hash(item)


def test_admissions_and_finished_come_back_by_name() -> None:
    generate, generated = ev.from_json(ev.to_json(COMMANDS[0])), ev.from_json(ev.to_json(EVENTS[4]))
    assert generate.admit[1].deadline == 4
    assert generated.finished[1].n_tokens == 16


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "{}", '{"kind":"Explode"}', '{"kind":"Train","seq":1}',
     '{"kind":"Switched","command":1,"colour":2}'],
)  # fmt: skip
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ev.from_json(text)


def test_items_cannot_be_changed_after_they_were_recorded() -> None:
    with pytest.raises(FrozenInstanceError):
        COMMANDS[0].seq = 3  # type: ignore[misc]


def test_ids_name_kind_and_place() -> None:
    assert COMMANDS[3].id == "train-4"
