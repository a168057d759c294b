"""A run's commands over time, in a form that Perfetto (ui.perfetto.dev) opens.

Owns: that form (Chrome's trace events), made from the events of a run with the commands that each
caused, and its file. Does not own: where the entries come from (`window`, a record).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from twofold import events as ev
from twofold.events import Command, Event
from twofold.sched.placement import Placement, Unit
from twofold.sim.window import Entry


def check_writable(path: Path) -> None:
    """ValueError, one line, when no file can be written there. Leaves nothing behind."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(
            f"--timeline {path} cannot be written ({error.strerror}): name a file in a folder that "
            "exists and that you may write to"
        ) from None
    if not existed:
        path.unlink()


def write(path: Path, entries: Iterable[Entry], placement: Placement) -> None:
    """OSError when it cannot be written."""
    path.write_text(json.dumps(timeline(entries, placement), separators=(",", ":")), "utf-8")


def timeline(entries: Iterable[Entry], placement: Placement) -> dict[str, Any]:
    """Chrome's trace format (JSON object form), which Perfetto opens: a track for each unit with
    its commands, one for the work beside the cards (rewards, fetches), a mark for each version. For
    a record, its events with the commands that each caused."""
    units = placement.units()
    unit_of = {card: i for i, unit in enumerate(units) for card in unit.cards}
    events: list[dict[str, Any]] = [_track(i, _unit_name(unit.cards, unit)) for i, unit in
                                    enumerate(units)]  # fmt: skip
    host = len(units)
    events.append(_track(host, "rewards and fetches"))
    issued: dict[int, tuple[float, Command]] = {}
    for now_s, event, commands in entries:
        if isinstance(event, ev.Terminal) and event.command in issued:
            start_s, command = issued.pop(event.command)
            tracks = sorted({unit_of[card] for card in command.cards})
            if tracks:
                events += [_slice(track, command, event, start_s, now_s) for track in tracks]
            else:
                events += _beside(host, command, event, start_s, now_s)
        if isinstance(event, ev.Published):
            events.append({"name": f"version {event.version}", "ph": "i", "s": "g", "pid": 0,
                           "tid": host, "ts": now_s * 1e6})  # fmt: skip
        issued.update((command.seq, (now_s, command)) for command in commands)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(index: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": {"name": name}}


def _unit_name(cards: Sequence[int], unit: Unit) -> str:
    jobs = [name for name in ("generates", "trains", "scores") if getattr(unit, name)]
    which = f"card {cards[0]}" if len(cards) == 1 else f"cards {cards[0]}-{cards[-1]}"
    return f"{which} ({', '.join(jobs)})"


def _slice(
    track: int, command: Command, event: Event, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "name": command.kind, "ph": "X", "pid": 0, "tid": track, "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6, "args": _arguments(command, event),
    }  # fmt: skip


def _beside(
    track: int, command: Command, event: Event, start_s: float, end_s: float
) -> list[dict[str, Any]]:
    """As an asynchronous pair: these overlap, which slices of one track must not."""
    common = {"name": command.kind, "cat": "host", "id": command.seq, "pid": 0, "tid": track}
    return [
        {**common, "ph": "b", "ts": start_s * 1e6, "args": _arguments(command, event)},
        {**common, "ph": "e", "ts": end_s * 1e6},
    ]


def _arguments(command: Command, event: Event) -> dict[str, Any]:
    """What a reader wants to see of a command: its numbers, and how it ended."""
    arguments: dict[str, Any] = {"seq": command.seq, "ended": event.kind}
    match command, event:
        case ev.Generate(), ev.Generated():
            arguments |= {"version": command.version, "admitted": len(command.admit),
                          "finished": len(event.finished), "tokens": event.n_tokens,
                          "decode_steps": event.decode_steps}  # fmt: skip
        case ev.Train() | ev.Score(), _:
            arguments |= {"groups": len(command.group_ids)}
        case ev.Reward() | ev.Discard(), _:
            arguments |= {"group": command.group_id}
        case ev.Switch(), _:
            arguments |= {"to": str(command.after)}
        case ev.Publish() | ev.Fetch() | ev.Receive(), _:
            arguments |= {"version": command.version}
    return arguments
