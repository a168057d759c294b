"""The only loop: event -> scheduler -> record -> executor.

Owns: the order of these four, and what an executor and a recorder must offer.
Does not own: decisions (`sched`), doing (`runtime.local`, `sim.executor`), storage (`obs.record`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twofold.events import Command, Event
from twofold.sched.scheduler import Scheduler


class Executor(Protocol):
    """Does what commands say. Every submitted command ends in exactly one terminal event."""

    def submit(self, command: Command) -> None: ...

    def next_event(self) -> tuple[float, Event]:
        """Waits for the next event; with it the time, in seconds since the run started."""
        ...

    def take_rows(self) -> Sequence[Any]:
        """What became durable with the last event (e.g. chunks of tokens); each row once."""
        ...


class Recorder(Protocol):
    """Makes things durable."""

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        """One transaction: the event, the commands that follow from it, the rows it came with."""
        ...


def drive(
    scheduler: Scheduler, executor: Executor, record: Recorder, first: Event, now_s: float = 0.0
) -> str:
    """Runs to the end and returns the outcome. `first` happens at `now_s`: RunStarted() or, for a
    scheduler into which the recorded events were folded, Resumed(epoch).

    Write-ahead: an event and its commands are committed before a command is submitted. A process
    that dies in between leaves commands outstanding in the record; Resumed issues them again.
    """
    event = first
    while True:
        commands = scheduler.handle(event, now_s)
        record.commit(now_s, event, commands, executor.take_rows())
        if scheduler.finished:
            return scheduler.outcome
        for command in commands:
            executor.submit(command)
        now_s, event = executor.next_event()
