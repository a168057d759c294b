"""Coefficients of a linear cost from measured seconds.

Owns: the fit: no coefficient below 0, insensitive to stalls, and honest about what the measurements
cannot tell apart. Does not own: what is measured (`observe`), what it is for (`calibrate`).

A handful of columns at most: where a general solver would search, this tries every subset.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

INDEPENDENT = 0.02
"""A column counts when at least this share of its length is not a combination of those before it;
less than that would be fitted to the noise of a machine whose seconds vary by some per cent."""
_ROUNDS = 40  # of reweighting: the coefficients stand still to four digits after about twenty
_CLOSE = 1e-6  # relative residuals below this weigh alike, so that exact data divides by no zero

Vector = Sequence[float]


class Fit(NamedTuple):
    """`coefficients`, one a column; those of the `inseparable` columns (by place) are 0 because the
    data cannot tell them from the columns before; `error`: median of |predicted / measured - 1|."""

    coefficients: tuple[float, ...]
    inseparable: tuple[int, ...]
    error: float


def fit(rows: Sequence[Vector], seconds: Vector) -> Fit:
    """seconds ~ rows @ coefficients, all of them 0 or more; the first columns are preferred where
    several explain the same.

    Minimises the sum of |predicted - measured| / predicted by iteratively reweighted non-negative
    least squares (least absolute deviations: Bloomfield and Steiger 1983, ch. 1), so that up to
    nearly half of the measurements may be stalls. Asserts that there is a row and that seconds are
    above 0.
    """
    assert rows and len(rows) == len(seconds) and min(seconds) > 0
    kept = independent([[x / y for x in row] for row, y in zip(rows, seconds, strict=True)])
    columns = [[row[place] for place in kept] for row in rows]
    weights = [1.0 / y**2 for y in seconds]
    found = nonnegative(columns, seconds, weights)
    for _ in range(_ROUNDS):
        weights = []
        for row, y in zip(columns, seconds, strict=True):
            predicted = max(_dot(row, found), 1e-3 * y)
            weights.append(1.0 / (predicted * max(abs(predicted - y), _CLOSE * predicted)))
        found = nonnegative(columns, seconds, weights)
    by_place = dict(zip(kept, found, strict=True))
    coefficients = tuple(by_place.get(place, 0.0) for place in range(len(rows[0])))
    used = [place for place in range(len(rows[0])) if any(row[place] for row in rows)]
    errors = [abs(_dot(row, coefficients) / y - 1.0) for row, y in zip(rows, seconds, strict=True)]
    inseparable = tuple(place for place in used if place not in by_place)
    return Fit(coefficients, inseparable, statistics.median(errors))


def independent(rows: Sequence[Vector]) -> list[int]:
    """Places of the columns that are not (nearly) combinations of those before (Gram-Schmidt)."""
    kept: list[int] = []
    basis: list[list[float]] = []
    for place in range(len(rows[0])):
        column = [row[place] for row in rows]
        length = _dot(column, column) ** 0.5
        for unit in basis * 2:  # twice: once loses digits when little is left
            along = _dot(column, unit)
            column = [x - along * u for x, u in zip(column, unit, strict=True)]
        rest = _dot(column, column) ** 0.5
        if rest > INDEPENDENT * length:
            kept.append(place)
            basis.append([x / rest for x in column])
    return kept


def nonnegative(rows: Sequence[Vector], values: Vector, weights: Vector) -> list[float]:
    """The non-negative least-squares solution, exactly: it is the unconstrained solution on the
    columns where it is not 0, so the best feasible one of all subsets. Columns are independent."""
    n = len(rows[0])
    scale = [_dot(weights, [row[i] ** 2 for row in rows]) ** 0.5 for i in range(n)]
    gram = [
        [sum(w * r[i] * r[j] for r, w in zip(rows, weights, strict=True)) / (scale[i] * scale[j])
         for j in range(n)]
        for i in range(n)
    ]  # fmt: skip
    target = [
        sum(w * r[i] * y for r, y, w in zip(rows, values, weights, strict=True)) / scale[i]
        for i in range(n)
    ]
    best, gained = [0.0] * n, 0.0  # the square that is explained: the more the better
    for size in range(1, n + 1):
        for subset in combinations(range(n), size):
            part = _solve([[gram[i][j] for j in subset] for i in subset],
                          [target[i] for i in subset])  # fmt: skip
            explained = _dot(part, [target[i] for i in subset])
            if min(part) >= 0 and explained > gained:
                best, gained = [0.0] * n, explained
                for place, value in zip(subset, part, strict=True):
                    best[place] = value / scale[place]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a symmetric positive definite system, by elimination."""
    rows = [[*row, y] for row, y in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(n):
            if k != i:
                factor = rows[k][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [row[-1] for row in rows]


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
