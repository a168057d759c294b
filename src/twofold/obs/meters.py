"""What the record says about how a run went: where the time went, how stale the trained tokens and
samples were; and one page of text about it.

Owns: the sums of each step, the page. Does not own: the record, where each second of each card went
(`obs.card_time`), whether what was trained is what was submitted (`obs.bias`). No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from twofold.config import from_dict
from twofold.obs.bias import selection_bias
from twofold.obs.card_time import CardTime, card_time
from twofold.obs.record import Record
from twofold.runtime.spec import scheduler_spec
from twofold.sched.spec import SchedulerSpec


class StepMeters(NamedTuple):
    """Of the step that trained `version`, from that version's beginning to the next one's.

    `busy` is the share of the cards' time by kind of command ("generate", "train", ...); what is
    missing to 1 is waiting. Host work (rewards) overlaps with it and is not in it.
    `staleness` counts the trained tokens by staleness, `sample_staleness` the trained samples by
    the staleness of their oldest token, both towards `version`: of U updates that a batch makes the
    i-th finds weights i - 1 versions newer.
    """

    version: int
    wall_s: float  # without the time in which no process had the run
    busy: dict[str, float]
    staleness: dict[int, int]
    sample_staleness: dict[int, int]


def step_meters(record: Record) -> list[StepMeters]:
    """One entry for each finished step, in order."""
    ((n_cards,),) = record.query(
        "SELECT count(DISTINCT card.value) FROM commands, json_each(cards) AS card"
    )
    # the version that existed when event `{}` came; the time up to that event was its
    under = "coalesce((SELECT version FROM versions WHERE n < {} ORDER BY n DESC LIMIT 1), 0)"
    walls = record.query(
        f"SELECT {under.format('gap.n')} AS version, sum(gap_s) FROM (SELECT n, CASE kind"
        " WHEN 'Resumed' THEN 0.0 ELSE time_s - lag(time_s) OVER (ORDER BY n) END AS gap_s"
        " FROM events) AS gap GROUP BY 1"
        " HAVING version < (SELECT max(version) FROM versions) ORDER BY 1"
    )
    steps = [StepMeters(version, wall_s, {}, {}, {}) for version, wall_s in walls]
    by_version = {step.version: step for step in steps}
    for version, kind, card_s in record.query(
        f"SELECT {under.format('ended_by')}, lower(kind),"
        " sum(seconds * json_array_length(cards)) FROM commands WHERE cards != '[]'"
        " AND ended_by IS NOT NULL GROUP BY 1, 2"
    ):
        step = by_version.get(version)
        if step is not None and step.wall_s > 0:
            step.busy[kind] = card_s / (n_cards * step.wall_s)
    for version, staleness, n_tokens in record.query(
        "SELECT trained_version, trained_version - version, sum(length(token_ids) / 4)"
        " FROM chunks JOIN groups USING (group_id) WHERE status = 'trained' GROUP BY 1, 2"
    ):
        if version in by_version:
            by_version[version].staleness[staleness] = n_tokens
    for version, staleness, n_samples in record.query(
        "SELECT trained_version, trained_version - oldest, count(*) FROM (SELECT group_id,"
        " min(version) AS oldest FROM chunks GROUP BY group_id, idx) JOIN groups USING (group_id)"
        " WHERE status = 'trained' GROUP BY 1, 2"
    ):
        if version in by_version:
            by_version[version].sample_staleness[staleness] = n_samples
    _add_simulated_staleness(record, by_version)
    return steps


def _add_simulated_staleness(record: Record, by_version: dict[int, StepMeters]) -> None:
    """A simulated run has no tokens; it records these counts as metrics of the version made,
    towards the batch's last update."""
    for version, made, name, count in record.query(
        "SELECT coalesce((SELECT max(version) FROM versions WHERE version < made.version), 0),"
        " made.version, name, value FROM metrics AS made"
        " WHERE name GLOB 'staleness/tokens_*' OR name GLOB 'staleness/samples_*'"
    ):
        if version in by_version:
            what, _, age = name.partition("/")[2].partition("_")
            step = by_version[version]
            counts = step.staleness if what == "tokens" else step.sample_staleness
            counts[int(age) - (made - version - 1)] = int(count)


def record_card_time(record: Record, spec: SchedulerSpec | None = None) -> CardTime:
    """Where every second of every card of the run went. `spec`: as its recorded options say, if
    None (simulated runs of several cards must give theirs)."""
    if spec is None:
        spec = scheduler_spec(from_dict(record.meta()["config"]))
    return card_time([(time_s, event) for _, time_s, event in record.events()], spec)


def report(record: Record, spec: SchedulerSpec | None = None) -> str:
    """A page about the run so far, for a terminal. `spec` as in `record_card_time`."""
    time, steps = record_card_time(record, spec), step_meters(record)
    total, n_cards = time.total(), len(time.cards)
    walls = sorted(step.wall_s for step in steps)
    lines = [
        f"{len(steps)} steps, {time.wall_s:.1f} s on {n_cards} card{'s' * (n_cards > 1)}"
        + (f", {walls[len(walls) // 2]:.2f} s for a step (median)" if walls else ""),
        "",
        "of the cards' time",
        *_shares(total.cards.busy, total.cards.total_s, "busy: "),
        *_shares(total.cards.idle, total.cards.total_s, "idle: "),
        "",
        f"decode slots: {total.slots.used:.1%} used; card seconds of empty slots, by cause:",
        *_shares(total.slots.empty.by_name, total.cards.total_s, "empty: "),
        "",
        "staleness of trained tokens:  " + _histogram(step.staleness for step in steps),
        "of samples, by oldest token:  " + _histogram(step.sample_staleness for step in steps),
    ]
    bias = selection_bias(record)
    lines += [] if bias is None else ["", bias.line()]
    return "\n".join(lines)


def _shares(seconds: dict[str, float], total_s: float, title: str) -> list[str]:
    """The largest first."""
    return [
        f"  {title + name:20} {s:10.1f} s {s / total_s:7.1%}"
        for name, s in sorted(seconds.items(), key=lambda item: -item[1])
        if s > 0
    ]


def _histogram(counts: Iterable[dict[int, int]]) -> str:
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    if not total:
        return "none"
    return "  ".join(f"{age}: {n / total.total():.1%}" for age, n in sorted(total.items()))
