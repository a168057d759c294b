"""Whether what was trained is what was submitted: short, easy or few prompts preferred.

Owns: the comparison of lengths, pass rates and prompts of the groups that were trained with those
that were started, in the same span of versions. Does not own: the record; the rule that bounds such
a bias (docs/stalesync.md). No torch.

Whoever trains what is ready first and drops, or never comes back to, what is late, trains shorter
completions than the policy samples, and the policy learns to be short. Here nothing is dropped for
age, so over a span of versions the two agree up to the groups on the way at its ends, at most
(S + 1) P at each.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from twofold.obs.record import Record

QUANTILES = (0.1, 0.5, 0.9, 0.99)


class Side(NamedTuple):
    """Groups that were submitted, or trained. Lengths are of finished samples, in tokens."""

    n_groups: int
    n_samples: int
    mean_tokens: float
    quantiles: tuple[int, ...]  # of the lengths, at QUANTILES
    pass_rate: float  # share of the rewarded samples with reward 1 or more
    n_prompts: int  # distinct


class Bias(NamedTuple):
    """Of the groups started, and of those trained, at versions first..last. `noise` is the standard
    error of `length_ratio` if chance had decided what of it is trained (by groups, as the samples
    of one are alike); `share_gap` the largest difference of a share in `length_shares`.

    `n_lost` of the groups started there were dropped, or are past their deadline and not trained;
    `n_open` are still on their way.
    """

    first: int
    last: int
    submitted: Side
    trained: Side
    noise: float
    share_gap: float
    n_lost: int
    n_open: int

    @property
    def length_ratio(self) -> float:
        """Mean trained length / mean submitted length."""
        return self.trained.mean_tokens / self.submitted.mean_tokens

    @property
    def coverage(self) -> float:
        """Distinct prompts that were trained / that were submitted (1 at most)."""
        return min(1.0, self.trained.n_prompts / self.submitted.n_prompts)

    @property
    def short_first(self) -> bool:
        """Trained lengths are shorter by more than three times the noise."""
        return self.length_ratio < 1 - 3 * self.noise

    def line(self) -> str:
        """All of it in one line of text."""
        a, b = self.trained, self.submitted
        lengths = "/".join(map(str, a.quantiles)) + " of " + "/".join(map(str, b.quantiles))
        verdict = "SHORT FIRST" if self.short_first else "no short-first bias"
        return (
            f"trained of submitted, versions {self.first}..{self.last}: {verdict}; mean length "
            f"{a.mean_tokens:.1f} of {b.mean_tokens:.1f} (x{self.length_ratio:.3f} "
            f"±{self.noise:.3f}), quantiles {lengths}, pass rate {a.pass_rate:.3f} of "
            f"{b.pass_rate:.3f}, prompts {a.n_prompts} of {b.n_prompts}, groups {a.n_groups} of "
            f"{b.n_groups} ({self.n_lost} lost, {self.n_open} on their way)"
        )


def selection_bias(
    record: Record, first: int | None = None, last: int | None = None
) -> Bias | None:
    """None when no sample was finished, or no group trained, in that span.

    The span's default leaves out the run's first S versions, in which what is trained must be what
    finished first, and its last S, of whose groups some are still on their way (but no more than a
    quarter of the run at each end).
    """
    ((most_stale, newest),) = record.query(
        "SELECT max(deadline - start_version), max(trained_version) FROM groups"
    )
    if newest is None:
        return None
    margin = min(most_stale, newest // 4)
    first = margin if first is None else first
    last = max(first, newest - margin) if last is None else last
    submitted = _groups(record, "start_version", first, last)
    trained = _groups(record, "trained_version", first, last)
    if not (any(g.lengths for g in submitted) and any(g.lengths for g in trained)):
        return None
    a, b = _side(trained), _side(submitted)
    noise = _noise(trained, submitted) / b.mean_tokens
    gap = max(abs(s.trained - s.sampled) for s in length_shares(record, first, last))
    live = [g for g in submitted if g.trained_version is None and not g.dropped]
    n_late = sum(g.deadline < newest for g in live)
    n_lost = n_late + sum(g.dropped for g in submitted)
    return Bias(first, last, b, a, noise, gap, n_lost, len(live) - n_late)


class _Group(NamedTuple):
    group_id: int
    deadline: int
    trained_version: int | None
    dropped: bool
    prompt: str
    lengths: list[int]
    rewards: list[float]


def _groups(record: Record, column: str, first: int, last: int) -> list[_Group]:
    where = f"{column} BETWEEN ? AND ?"
    found = {
        gid: _Group(gid, deadline, trained, drop_reason is not None, prompt, [], [])
        for gid, deadline, trained, drop_reason, prompt in record.query(
            "SELECT group_id, deadline, trained_version, drop_reason, prompt FROM groups"
            f" WHERE {where}",
            first,
            last,
        )
    }
    for gid, n_tokens, reward in record.query(
        "SELECT group_id, n_tokens, reward FROM samples JOIN groups USING (group_id)"
        f" WHERE {where} AND n_tokens IS NOT NULL",
        first,
        last,
    ):
        found[gid].lengths.append(n_tokens)
        if reward is not None:
            found[gid].rewards.append(reward)
    return list(found.values())


def _side(groups: Sequence[_Group]) -> Side:
    lengths = sorted(n for group in groups for n in group.lengths)
    rewards = [reward for group in groups for reward in group.rewards]
    return Side(
        len(groups),
        len(lengths),
        statistics.fmean(lengths),
        tuple(lengths[min(int(q * len(lengths)), len(lengths) - 1)] for q in QUANTILES),
        sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else math.nan,
        len({group.prompt for group in groups}),
    )


def _noise(trained: Sequence[_Group], submitted: Sequence[_Group]) -> float:
    """Standard error of mean trained length - mean submitted length, in tokens, if chance decided
    which groups are on one side only; infinite when there is nothing to estimate it from.

    With d the deviations of the groups' mean lengths from their mean, n_a trained and n_b submitted
    groups, the variance is the sum of (d / n_a)^2 over those trained only, (d / n_b)^2 over those
    submitted only, and (d / n_a - d / n_b)^2 over the others. The groups at the ends of the span
    are the long ones on either side, so their own deviations count, not those of all.
    """
    means = {g.group_id: statistics.fmean(g.lengths) for g in (*trained, *submitted) if g.lengths}
    if len(means) < 2:
        return math.inf
    a = {group.group_id for group in trained if group.lengths}
    b = {group.group_id for group in submitted if group.lengths}
    middle = statistics.fmean(means.values())
    weight = {gid: (gid in a) / len(a) - (gid in b) / len(b) for gid in means}
    return math.hypot(*(weight[gid] * (mean - middle) for gid, mean in means.items()))


class LengthShare(NamedTuple):
    """Shares of the samples with a length in (max_tokens / 2, max_tokens]."""

    max_tokens: int
    sampled: float
    trained: float


def length_shares(record: Record, first: int, last: int) -> list[LengthShare]:
    """Lengths of the samples trained at versions first..last, against those started at these
    versions: when fast, short samples are preferred, the trained ones are shorter. Samples that
    never finished have no length and are left out, so choose `last` well before the end."""
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
    return [
        LengthShare(
            max_tokens,
            sampled[max_tokens] / max(1, sampled.total()),
            trained[max_tokens] / max(1, trained.total()),
        )
        for max_tokens in sorted(sampled | trained)
    ]
