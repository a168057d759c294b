"""Driving the scheduler by hand: `Hand` answers its commands with facts, one at a time."""

from __future__ import annotations

from typing import Any, TypeVar

from twofold import events as ev
from twofold.events import Command, Event
from twofold.sched.scheduler import Scheduler, SchedulerSpec
from twofold.types import Phase

C = TypeVar("C", bound=Command)


class Hand:
    """A scheduler, and what it asked for last. Its integrity is checked after every event."""

    def __init__(self, **spec: Any) -> None:
        small = {"steps": 3, "groups_per_step": 1, "group_size": 1, "max_staleness": 0,
                 "max_running_samples": 4}  # fmt: skip
        self.scheduler = Scheduler(SchedulerSpec(**{**small, **spec}))
        self.history: list[tuple[Event, list[Command]]] = []

    def __call__(self, event: Event) -> list[Command]:
        commands = list(self.scheduler.handle(event, 0.0))
        self.scheduler.check_integrity()
        self.history.append((event, commands))
        return commands

    def doing(self, kind: type[C]) -> C:
        """The one outstanding command of this kind."""
        found = [c for c in self.scheduler.outstanding() if isinstance(c, kind)]
        assert len(found) == 1, (kind, self.scheduler.outstanding())
        return found[0]

    def start(self) -> list[Command]:
        self(ev.RunStarted())
        return self.switched(Phase.GENERATE)

    def switched(self, to: Phase) -> list[Command]:
        switch = self.doing(ev.Switch)
        assert switch.after is to, switch
        return self(ev.Switched(command=switch.seq))

    def generated(self, *finished: tuple[int, int]) -> list[Command]:
        done = tuple(ev.Finished(gid, index, 5) for gid, index in finished)
        seq = self.doing(ev.Generate).seq
        return self(ev.Generated(command=seq, finished=done, n_tokens=9, decode_steps=9))

    def rewarded(self, gid: int, n_valid: int = 1, cause: str = "") -> list[Command]:
        (seq,) = (
            c.seq
            for c in self.scheduler.outstanding()
            if isinstance(c, ev.Reward) and c.group_id == gid
        )
        return self(
            ev.Rewarded(command=seq, group_id=gid, n_valid=n_valid, varies=True, cause=cause)
        )

    def trained(self, *group_ids: int) -> list[Command]:
        train = self.doing(ev.Train)
        assert train.group_ids == group_ids, train
        return self(ev.Trained(command=train.seq, version=train.version + 1))

    def published(self) -> list[Command]:
        self.switched(Phase.PUBLISH)
        publish = self.doing(ev.Publish)
        return self(ev.Published(command=publish.seq, version=publish.version))

    def failed(self, kind: type[Command], cause: str = "broke") -> list[Command]:
        return self(ev.Failed(command=self.doing(kind).seq, cause=cause))

    @property
    def admitted(self) -> list[tuple[int, int, int]]:
        return [tuple(a) for a in self.doing(ev.Generate).admit]


def step(hand: Hand, *group_ids: int) -> None:
    """The cards are on their way to SCORE; at the end they generate again."""
    hand.switched(Phase.SCORE)
    hand(ev.Scored(command=hand.doing(ev.Score).seq))
    hand.switched(Phase.TRAIN)
    hand.trained(*group_ids)
    hand.published()
    hand.switched(Phase.GENERATE)


def names(commands: list[Command]) -> list[str]:
    return [c.kind for c in commands]


def train_one(hand: Hand) -> None:
    """As far as the update of group 0, which is under way."""
    hand.start()
    hand.generated((0, 0))
    hand.rewarded(0)
    hand.switched(Phase.TRAIN)
