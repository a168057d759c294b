"""What the record says about how a run went: where the time went, how stale the trained tokens
were, and whether the trained lengths are the sampled ones.

Owns: these three sums. Does not own: the record, or how they are shown. No torch.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from twofold.obs.record import Record


class StepMeters(NamedTuple):
    """Of the step that trained `version`, from that version's beginning to the next one's.

    `busy` is the share of the cards' time by kind of command ("generate", "train", ...); what is
    missing to 1 is waiting. Host work (rewards) overlaps with it and is not in it.
    `staleness` counts the trained tokens by staleness (none in a simulated run).
    """

    version: int
    wall_s: float  # without the time in which no process had the run
    busy: dict[str, float]
    staleness: dict[int, int]


def step_meters(record: Record) -> list[StepMeters]:
    """One entry for each finished step, in order."""
    ((n_cards,),) = record.query(
        "SELECT count(DISTINCT card.value) FROM commands, json_each(cards) AS card"
    )
    # the version that existed when event `{}` came; the time up to that event was its
    under = "(SELECT version FROM versions WHERE n < {} ORDER BY n DESC LIMIT 1)"
    walls = record.query(
        f"SELECT {under.format('gap.n')} AS version, sum(gap_s) FROM (SELECT n, CASE kind"
        " WHEN 'Resumed' THEN 0.0 ELSE time_s - lag(time_s) OVER (ORDER BY n) END AS gap_s"
        " FROM events) AS gap GROUP BY 1"
        " HAVING version < (SELECT max(version) FROM versions) ORDER BY 1"
    )
    steps = [StepMeters(version, wall_s, {}, {}) for version, wall_s in walls]
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
    return steps


class LengthShare(NamedTuple):
    """Shares of the samples with a length in (max_tokens / 2, max_tokens]."""

    max_tokens: int
    sampled: float
    trained: float


def length_shares(record: Record, first: int, last: int) -> list[LengthShare]:
    """Lengths of the samples trained at versions first..last, against those started at these
    versions: when fast, short samples are preferred, the trained ones are shorter. Samples that
    never finished have no length and are left out, so choose `last` well before the end."""
    shares = []
    counts = []
    for column in ("start_version", "trained_version"):
        count: Counter[int] = Counter()
        for n_tokens, n_samples in record.query(
            "SELECT n_tokens, count(*) FROM samples JOIN groups USING (group_id)"
            f" WHERE n_tokens > 0 AND {column} BETWEEN ? AND ? GROUP BY 1",
            first,
            last,
        ):
            count[1 << (n_tokens - 1).bit_length()] += n_samples
        counts.append(count)
    sampled, trained = counts
    for max_tokens in sorted(sampled | trained):
        shares.append(
            LengthShare(
                max_tokens,
                sampled[max_tokens] / max(1, sampled.total()),
                trained[max_tokens] / max(1, trained.total()),
            )
        )
    return shares
