"""The commands that are on their way.

Owns: sequence numbers, the epoch, which commands are issued and not ended, failures in a row.
Does not own: which command is next, and what its end means (`scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from twofold.events import Command, Discard, Failed, Reward, Terminal

MAX_REISSUES = (
    3  # a hiccup passes within three tries; what fails more often will not heal by itself
)


@dataclass
class Outbox:
    epoch: int = 0
    next_seq: int = 0
    outstanding: dict[int, Command] = field(default_factory=dict)  # by seq, ascending
    issued: list[Command] = field(default_factory=list)  # since the last `clear_issued`
    _failures: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """In a row, by kind of work and the cards that do it."""

    def stamp(self, cards: tuple[int, ...]) -> dict[str, Any]:
        """The fields that every command has, for the next one."""
        self.next_seq += 1
        return {"seq": self.next_seq - 1, "cards": cards, "epoch": self.epoch}

    def issue(self, command: Command) -> None:
        self.outstanding[command.seq] = command
        self.issued.append(command)

    def end(self, event: Terminal) -> Command:
        """The command that this event ends. Asserts that it is outstanding: commands end once."""
        command = self.outstanding.pop(event.command, None)
        assert command is not None, f"no such command, or it has ended: {event}"
        if not isinstance(event, Failed):
            self._failures.pop(_work(command), None)
        return command

    def give_up(self, command: Command, cause: str) -> str:
        """Counts a failure. Empty, or why the same work is not to be issued again."""
        work = _work(command)
        times = self._failures[work] = self._failures.get(work, 0) + 1
        return f"{work[0]} failed {times} times in a row: {cause}" if times > MAX_REISSUES else ""

    def reissue(self, epoch: int) -> None:
        """Another process took over: everything outstanding is issued again, in order."""
        assert epoch > self.epoch, f"epoch {epoch} after {self.epoch}"
        self.epoch = epoch
        self.outstanding = {s: replace(c, epoch=epoch) for s, c in self.outstanding.items()}
        self.issued.extend(self.outstanding.values())
        self._failures.clear()

    def check_integrity(self) -> None:
        seqs = list(self.outstanding)
        assert seqs == sorted(seqs) and all(seq < self.next_seq for seq in seqs), seqs
        assert all(seq == c.seq for seq, c in self.outstanding.items())
        assert all(c.epoch == self.epoch for c in self.outstanding.values())


def _work(command: Command) -> tuple[str, tuple[int, ...]]:
    """The work whose failures in a row are counted together: what it is called, and its cards."""
    if isinstance(command, Reward | Discard):
        return f"{command.kind} of group {command.group_id}", ()
    return command.kind, command.cards
