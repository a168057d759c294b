"""What the planner says of a search over a cluster: the table, what does not fit, why the best is.

Owns: these words. Does not own: the search (`plan`), the words that every search shares
(`ranking`).
"""

from __future__ import annotations

from collections.abc import Mapping

from twofold.sim.plan import Candidate, Plan, Refused, Row, memory_options
from twofold.sim.ranking import ages, asynchrony, causes, left_out, waiting
from twofold.types import Phase

HEAD = (
    f"  {'placement':<24}{'replica':>8}{'S':>3}{'quantum':>8}{'batch':>9}{'slots':>7}"
    f"{'tokens/s':>10}{'s/step':>9}{'stale':>7}{'busy':>6}"
    "  tokens by staleness; idle by cause; peak GB of a card; memory options"
)


def table(found: Plan, most: int = 20) -> str:
    """The `most` fastest rows (and the best, wherever it stands), what was refused and by how
    much, why the best is the best."""
    lines = [HEAD]
    for place, row in enumerate(found.rows):
        if place < most or row is found.best:
            lines.append(_line(row, row is found.best))
    if (hidden := len(found.rows) + 1 - len(lines)) > 0:
        lines.append(f"  {hidden} more are slower (--top {len(found.rows)} shows all)")
    lines += ["", *refusals(found)] if found.refused else []
    best = found.best
    return "\n".join([
        *lines,
        "",
        f"why: {why(found)}",
        f"memory of the best, GB a card: {_peaks(best.memory)}; "
        f"{memory_options(best.candidate)}",
        f"options: {options(best)}",
    ])  # fmt: skip


def why(found: Plan) -> str:
    """What the best one does better than the best of another placement, and what staleness buys."""
    best = found.best
    speed = best.outcome.tokens_per_s
    words = [f"{describe(best.candidate)}: {speed:,.0f} tokens/s."]
    name = best.candidate.placement.name
    other = next((row for row in found.rows if row.candidate.placement.name != name), None)
    if other is not None:
        ahead = speed / other.outcome.tokens_per_s - 1
        words.append(
            f"{abs(ahead):.0%} {'ahead of' if ahead >= 0 else 'behind'} the best "
            f"{other.candidate.name}, whose cards wait {waiting(other.outcome)}; here "
            f"{waiting(best.outcome)}."
        )
    words += [left_out(found.rows, best), asynchrony(found.rows)]
    return " ".join(filter(None, words))


def describe(c: Candidate) -> str:
    return f"{c.name}, S = {c.staleness}, {_replica(c)}, quantum {c.quantum}"


def _replica(c: Candidate) -> str:
    n = c.placement.cards_per_replica
    return "1 card a replica" if n == 1 else f"{n} cards a replica"


def refusals(found: Plan) -> list[str]:
    """One line for each placement; another S or quantum needs the same memory."""
    lacking: dict[tuple[str, str], Refused] = {}
    for refused in found.refused:
        c = refused.candidate
        lacking.setdefault((c.name, _replica(c)), refused)
    lines = []
    for (name, replica), refused in lacking.items():
        lacks = ", ".join(f"{gap / 1e9:.1f} GB in {p}" for p, gap in refused.missing.items())
        lines.append(
            f"does not fit: {name}, {replica}: a card lacks {lacks} "
            f"({memory_options(refused.candidate)})"
        )
    return lines


def options(best: Row) -> str:
    """The options of a run that say the same; the placement is not an option yet."""
    c = best.candidate
    return (
        f"--sched.max_staleness {c.staleness} --rollout.quantum_decode_steps {c.quantum} "
        f"--rollout.max_running_samples {best.slots} --sched.groups_per_step {c.groups_per_step} "
        f"--rollout.group_size {c.group_size}"
    )


def _line(row: Row, best: bool) -> str:
    c, o = row.candidate, row.outcome
    batch = f"{c.groups_per_step}x{c.group_size}"
    return (
        f"{'*' if best else ' '} {c.name:<24}{c.placement.cards_per_replica:>8}{c.staleness:>3}"
        f"{c.quantum:>8}{batch:>9}{row.slots:>7}{o.tokens_per_s:>10,.0f}{o.seconds_per_step:>9.3g}"
        f"{o.mean_staleness:>7.2f}{sum(o.busy.values()):>6.0%}  {ages(o.staleness)}; "
        f"{causes(o.idle)}; {_peaks(row.memory)}; {memory_options(c)}"
    )


def _peaks(memory: Mapping[Phase, float]) -> str:
    return ", ".join(f"{phase} {n_bytes / 1e9:.1f}" for phase, n_bytes in memory.items())
