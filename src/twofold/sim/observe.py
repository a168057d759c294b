"""What the record of a real run says about seconds and about the work.

Owns: reading one record, and rebuilding what each decode quantum did: which samples ran, how long
their contexts were, what had to be prefilled. Does not own: the record (`obs.record`), what is
fitted to it (`calibrate`).

The record has every chunk of tokens that a quantum appended to a sample, but not which quantum it
was, nor who ran. Both follow: samples that run go on to run until the next pause, and those that
wait start strictly in order (deadline, resumed before new, group, index). So a quantum's chunks are
the next ones of the running samples and then of the first waiting ones, as many as make up the
number of tokens that it reports.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from twofold import events as ev
from twofold.config import Config, from_dict
from twofold.events import Command, Event
from twofold.obs.record import CommandRow, Record
from twofold.runtime.spec import scheduler_spec
from twofold.sched.spec import SchedulerSpec
from twofold.sim.integrity import check_folder, check_record
from twofold.sim.rows import CHECKSUM
from twofold.sim.workload import GroupWork
from twofold.types import Phase

_LEARNS_FROM_ALL = ("reinforce_pp", "ppo")  # their advantages are not taken within the group
_MACHINE = ("device", "cpu", "threads", "attention", "torch")  # of the fingerprint: set the speed


class Quantum(NamedTuple):
    """The counts that `Costs.quantum` takes, and the seconds it took."""

    steps: int
    tokens: int
    context_tokens: int
    prefill_tokens: int
    seconds: float


class Measured(NamedTuple):
    """How a run went, evaluations left out: mean seconds per step, mean staleness of the trained
    tokens (in versions), sampled tokens per second over all steps."""

    n_steps: int
    step_s: float
    staleness: float
    tokens_per_s: float


@dataclass
class Observed:
    """One run. `seconds` is by field of `Costs`, of the commands whose cost is one number;
    `trained` and `scored` are (tokens computed, seconds); `n_lost` quanta could not be rebuilt.
    """

    folder: Path
    config: Config
    machine: dict[str, str]
    measured: Measured
    quanta: list[Quantum] = field(default_factory=list)
    n_lost: int = 0
    trained: list[tuple[int, float]] = field(default_factory=list)
    scored: list[tuple[int, float]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    groups: list[GroupWork] = field(default_factory=list)

    @property
    def spec(self) -> SchedulerSpec:
        return scheduler_spec(self.config)


def observe(path: Path) -> Observed:
    """Reads a run's folder, or the record.sqlite in it; also while it is being written. ValueError,
    one line, for what is no record, damaged, simulated, or has no finished step."""
    folder = path.parent if path.name == "record.sqlite" else path
    try:
        with Record.open(folder, read_only=True) as record:
            list(record.query("BEGIN"))  # all that follows sees the record at one moment
            return _observe(folder, record)
    except sqlite3.Error as error:
        raise ValueError(f"{folder}: the record is damaged: {error}") from None
    except KeyError as error:
        raise ValueError(f"{folder}: the record is damaged: {error} is missing") from None
    except (AttributeError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"{folder}: the record is damaged: {error}") from None
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from None


def measure(
    history: Iterable[tuple[float, Event]], staleness: dict[int, int], folder: Path | str = "run"
) -> Measured:
    """`history` is (seconds, event) in order, of a real or of a simulated run; `staleness` counts
    the trained tokens. ValueError without a finished step."""
    n_steps = 0
    start_s: float | None = None
    aside_s = aside_so_far_s = total_s = 0.0  # aside: evaluations
    n_tokens = n_tokens_so_far = 0
    for now_s, event in history:
        start_s = now_s if start_s is None else start_s
        match event:
            case ev.Generated():
                n_tokens_so_far += event.n_tokens
            case ev.Evaluated():
                aside_so_far_s += event.seconds
            case ev.Published():
                n_steps += 1
                total_s, aside_s, n_tokens = now_s - start_s, aside_so_far_s, n_tokens_so_far
    if not n_steps or not staleness:
        raise ValueError(f"{folder} has no finished step: let the run go on, or leave it out")
    mean = sum(age * n for age, n in staleness.items()) / sum(staleness.values())
    total_s = max(total_s - aside_s, 1e-9)
    return Measured(n_steps, total_s / n_steps, mean, n_tokens / total_s)


# ---------------------------------------------------------------- reading


def _observe(folder: Path, record: Record) -> Observed:
    meta = record.meta()
    simulated = record.query("SELECT 1 FROM versions WHERE checksum = ? LIMIT 1", CHECKSUM)
    if any(simulated) or meta["fingerprint"]["device"] == "simulated":
        raise ValueError(f"{folder} is a simulated run: costs are fitted to real ones")
    config = from_dict(meta["config"])
    check_folder(folder, config)
    numbered = list(record.events())
    if [n for n, *_ in numbered] != list(range(1, len(numbered) + 1)):
        raise ValueError("the record is damaged: events are missing")
    history = [(time_s, event) for _, time_s, event in numbered]
    rows = {row.command.seq: row for row in record.commands()}
    check_record(record, history, rows)
    measured = measure(history, _staleness(record, config), folder)
    found = Observed(folder, config, _machine(config, meta), measured)
    latencies = _reward_latencies(rows.values(), history, config.reward.workers)
    works = _works(record, config, [event for _, event in history], latencies)
    found.groups = [works[gid] for gid in sorted(works)]
    replay = _Replay(record, keeps_cache=config.rollout.kv_after_update == "keep")
    _add_event_gaps(found, rows.values(), history)
    for _, event in history:
        if isinstance(event, ev.Resumed):
            replay.pause()
        if not isinstance(event, ev.Terminal):
            continue
        command = rows[event.command].command
        if isinstance(event, ev.Generated):
            assert isinstance(command, ev.Generate)
            quantum = replay.quantum(command, event)
            if quantum is not None:
                found.quanta.append(quantum)
            else:
                found.n_lost += event.n_tokens > 0
        elif not isinstance(event, ev.Failed | ev.Cancelled):
            replay.follow(command)
            _add_seconds(found, command, event.seconds, works)
    return found


def _add_seconds(
    found: Observed, command: Command, seconds: float, works: dict[int, GroupWork]
) -> None:
    match command:
        case ev.Train():
            groups = [works[gid] for gid in command.group_ids if works[gid].trains]
            found.trained.append((_n_tokens(groups), seconds))
        case ev.Score():
            scored = [works[gid] for gid in command.group_ids]
            found.scored.append((_n_tokens(scored), seconds))
        case ev.Switch():
            to_generate = command.after in (Phase.GENERATE, Phase.EVAL)
            found.seconds["to_generate_s" if to_generate else "to_train_s"].append(seconds)
        case ev.Evaluate():
            found.seconds["eval_s"].append(seconds)
        case ev.Publish() | ev.Fetch() | ev.Receive() | ev.Checkpoint() | ev.Discard():
            found.seconds[f"{command.kind.lower()}_s"].append(seconds)


def _add_event_gaps(
    found: Observed, rows: Iterable[CommandRow], history: Sequence[tuple[float, Event]]
) -> None:
    """Time between two events when what the second reports had ended before the first: nothing ran
    in between but the host."""
    for row in rows:
        if row.ended_by is None or row.outcome != "done" or row.seconds is None:
            continue
        before_s, now_s = history[row.ended_by - 2][0], history[row.ended_by - 1][0]
        ended_s = history[row.caused_by - 1][0] + row.seconds
        if ended_s < before_s:
            found.seconds["event_s"].append(now_s - before_s)


def _n_tokens(groups: Iterable[GroupWork]) -> int:
    return sum(work.prompt_tokens + sum(work.lengths) for work in groups)


def _machine(config: Config, meta: dict[str, Any]) -> dict[str, str]:
    """What decides how fast the same work is done."""
    fingerprint = meta["fingerprint"]
    model = {"model": config.model.name, "dtype": config.model.dtype}
    return model | {name: str(fingerprint[name]) for name in _MACHINE}


def _staleness(record: Record, config: Config) -> dict[int, int]:
    """Trained tokens by staleness towards the last update of their batch."""
    later = config.train.updates_per_batch - 1
    counts: Counter[int] = Counter()
    for staleness, n_tokens in record.query(
        "SELECT trained_version - version, sum(length(token_ids) / 4)"
        " FROM chunks JOIN groups USING (group_id) WHERE status = 'trained' GROUP BY 1"
    ):
        counts[staleness + later] = n_tokens
    return counts


def _reward_latencies(
    rows: Iterable[CommandRow], history: Sequence[tuple[float, Event]], n_workers: int
) -> dict[int, float]:
    """Seconds from asking for a group's rewards to having them: waiting for a reward process, which
    judges one group at a time in the order asked, and the judging. Groups asked for together come
    back in this order, and the order decides which of them are trained first."""
    free_s = [0.0] * n_workers
    latencies: dict[int, float] = {}
    for row in rows:
        if isinstance(row.command, ev.Reward) and row.seconds is not None:
            asked_s = history[row.caused_by - 1][0]
            ended_s = max(asked_s, heapq.heappop(free_s)) + row.seconds
            heapq.heappush(free_s, ended_s)
            latencies[row.command.group_id] = ended_s - asked_s
    return latencies


def _works(
    record: Record, config: Config, events: Iterable[Event], latencies: dict[int, float]
) -> dict[int, GroupWork]:
    """Of the groups that are finished and judged, by group id."""
    judged = {event.group_id: event for event in events if isinstance(event, ev.Rewarded)}
    with_kl_term = config.train.kl_coef > 0 and not config.train.kl_in_reward
    all_train = with_kl_term or config.train.loss in _LEARNS_FROM_ALL
    lengths: dict[int, list[int]] = defaultdict(list)
    rewards: dict[int, list[float]] = defaultdict(list)
    for group_id, n_tokens, reward in record.query(
        "SELECT group_id, n_tokens, reward FROM samples ORDER BY group_id, idx"
    ):
        if group_id in judged:
            lengths[group_id].append(n_tokens)
            if reward is not None:
                rewards[group_id].append(reward)
    prompts = dict(record.query("SELECT group_id, length(prompt_ids) / 4 FROM groups"))
    works = {}
    for group_id, event in judged.items():
        if len(lengths[group_id]) != config.rollout.group_size:
            raise ValueError(f"the record is damaged: group {group_id} has not all its samples")
        valid = rewards[group_id]
        mean = sum(valid) / len(valid) if valid else 0.0
        works[group_id] = GroupWork(
            prompts[group_id],
            tuple(lengths[group_id]),
            event.n_valid,
            latencies[group_id],
            event.varies,
            min(1.0, max(0.0, mean)),
            trains=event.n_valid > 0 and (event.varies or all_train),
        )
    return works


# ---------------------------------------------------------------- what each quantum did

_Sample = tuple[int, int]  # group id, index
_Chunk = tuple[int, int, int]  # start, version, tokens
_Waiting = tuple[int, bool, int, int]  # deadline, is new, group id, index


@dataclass
class _Unit:
    """A replica: cards that generate together."""

    unfinished: set[_Sample] = field(default_factory=set)
    running: list[_Sample] = field(default_factory=list)
    waiting: list[_Waiting] = field(default_factory=list)  # a heap
    lost_at: int | None = None  # the version under which a quantum did not add up
    cached: set[int] = field(default_factory=set)  # groups whose prompt is in the cache


class _Replay:
    """Follows who runs and who waits. When a quantum does not add up (samples were preempted for
    want of cache, say), its unit is lost until the next version: then all pause, and what they had
    got by then is known again, for chunks have versions."""

    def __init__(self, record: Record, keeps_cache: bool) -> None:
        self._keeps_cache = keeps_cache
        self._units: dict[tuple[int, ...], _Unit] = {}
        self._chunks: dict[_Sample, list[_Chunk]] = defaultdict(list)  # the next one last
        self._dropped: set[int] = set()
        self._prompt: dict[int, int] = {}
        self._deadline: dict[int, int] = {}
        self._n_samples: dict[int, int] = {}
        for group_id, idx, *chunk in record.query(
            "SELECT group_id, idx, start, version, length(token_ids) / 4 FROM chunks"
            " ORDER BY group_id, idx, start DESC"
        ):
            start, version, n_tokens = chunk
            self._chunks[group_id, idx].append((start, version, n_tokens))
        for group_id, prompt, deadline, n_samples in record.query(
            "SELECT group_id, length(prompt_ids) / 4, deadline,"
            " (SELECT count(*) FROM samples WHERE samples.group_id = groups.group_id) FROM groups"
        ):
            self._prompt[group_id], self._deadline[group_id] = prompt, deadline
            self._n_samples[group_id] = n_samples

    def follow(self, command: Command) -> None:
        """It has been done."""
        if isinstance(command, ev.Discard):
            self._dropped.add(command.group_id)
        elif isinstance(command, ev.Receive) or (
            isinstance(command, ev.Switch) and not self._keeps_cache
        ):
            self.pause(command.cards)

    def pause(self, cards: tuple[int, ...] | None = None) -> None:
        """The units of these cards (None: all) leave generation; tokens are all they keep."""
        for of_unit, unit in self._units.items():
            if cards is None or not set(cards).isdisjoint(of_unit):
                for sample in unit.running:
                    heapq.heappush(unit.waiting, self._to_wait(sample))
                unit.running, unit.cached = [], set()

    def quantum(self, command: ev.Generate, event: ev.Generated) -> Quantum | None:
        """What it did; None when that cannot be told, or when it did nothing."""
        unit = self._units.setdefault(command.cards, _Unit())
        for admission in command.admit:
            for index in range(self._n_samples.get(admission.group_id, 0)):
                unit.unfinished.add((admission.group_id, index))
                heapq.heappush(unit.waiting, self._to_wait((admission.group_id, index)))
        if unit.lost_at is not None and unit.lost_at != command.version:
            self._find_again(unit, command.version)
        found = self._rebuilt(unit, command, event) if unit.lost_at is None else None
        ended = {(done.group_id, done.index) for done in event.finished}
        unit.unfinished -= ended
        unit.running = [sample for sample in unit.running if sample not in ended]
        return found

    def _rebuilt(self, unit: _Unit, command: ev.Generate, event: ev.Generated) -> Quantum | None:
        started = []
        left = event.n_tokens - sum(self._next(sample)[2] for sample in unit.running)
        while left > 0 and unit.waiting:
            *_, group_id, index = heapq.heappop(unit.waiting)
            if group_id not in self._dropped:
                started.append((group_id, index))
                left -= self._next(started[-1])[2]
        unit.running += started
        if left or any(self._next(sample)[1] != command.version for sample in unit.running):
            unit.lost_at = command.version
            return None
        prefill = sum(self._next(sample)[0] for sample in started)
        for group_id in {group_id for group_id, _ in started} - unit.cached:
            prefill += self._prompt[group_id]
            unit.cached.add(group_id)
        context = sum(map(self._context, unit.running))
        for sample in unit.running:
            self._chunks[sample].pop()
        if not unit.running:
            return None
        return Quantum(event.decode_steps, event.n_tokens, context, prefill, event.seconds)

    def _find_again(self, unit: _Unit, version: int) -> None:
        """Everyone waits, with the tokens of all versions before this one."""
        for sample in unit.unfinished:
            while self._chunks[sample] and self._next(sample)[1] < version:
                self._chunks[sample].pop()
        unit.waiting = sorted(map(self._to_wait, unit.unfinished))
        unit.running, unit.cached, unit.lost_at = [], set(), None

    def _next(self, sample: _Sample) -> _Chunk:
        """Its next chunk; one that fits nowhere when there is none."""
        chunks = self._chunks[sample]
        return chunks[-1] if chunks else (0, -1, 1)

    def _context(self, sample: _Sample) -> int:
        """Of the tokens of its next chunk, the sum of the tokens that each attends to."""
        start, _, n_tokens = self._next(sample)
        before = self._prompt[sample[0]] + start
        return n_tokens * before + n_tokens * (n_tokens + 1) // 2

    def _to_wait(self, sample: _Sample) -> _Waiting:
        group_id, index = sample
        # one without a next chunk has tokens only if it has finished, and then it does not wait;
        # unless the record ends here, when its place in the order decides nothing any more
        is_new = self._next(sample)[0] == 0
        return self._deadline[group_id], is_new, group_id, index
