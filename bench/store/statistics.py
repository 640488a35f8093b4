"""Whether two sets of values differ, and where a series changes. The same values give the same answer.

Intervals: bootstrap-t of the difference of means (Efron and Tibshirani 1993, "An Introduction to the
Bootstrap", section 12.5), which holds its level with few and with skewed values.
Changes: E-divisive (Matteson and James 2014, "A Nonparametric Approach for Multiple Change Point Analysis of
Multivariate Data"), as Daly et al. 2020 search series of benchmarks ("The Use of Change Point Detection to
Identify Software Performance Regressions in a Continuous Integration System").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.05  # probability of a false verdict over all figures of a comparison
MIN_VALUES: Final = 5  # least values of each set; with fewer, chance alone separates two sets too often
RESAMPLES: Final = 5_000
SEED: Final = 20_260_101
CHANGE_LEVEL: Final = 0.01  # probability that a series without a change is cut
PERMUTATIONS: Final = 499
MIN_SEGMENT: Final = 3  # records between two changes; a change is found that long after it
MAX_SERIES: Final = 300  # newest records that are searched

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """The change from ``a`` to ``b`` of a mean: its estimate and bounds, in the figure's unit."""

    change: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def change_of(
    a: Sequence[float] | Floats, b: Sequence[float] | Floats, *, paired: bool, level: float = LEVEL
) -> Interval:
    """Return the change of the mean with its interval of confidence ``1 - level``.

    ``paired``: the values stand in pairs, which are resampled as such. Raises ValueError for fewer than
    ``MIN_VALUES`` values, and for pairs that are not of equal number.
    """
    if min(len(a), len(b)) < MIN_VALUES:
        raise ValueError(f"{len(a)} and {len(b)} values; {MIN_VALUES} of each are the least")
    if paired and len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values stand in no pairs")
    ours, theirs = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    sets = [theirs - ours] if paired else [theirs, -ours]
    change = sum(float(each.mean()) for each in sets)
    error = math.sqrt(sum(float(each.var(ddof=1)) / len(each) for each in sets))
    if error <= 1e-12 * (abs(ours.mean()) + abs(theirs.mean())):  # the values of each set are equal
        return Interval(change, change, change)
    rng = np.random.default_rng(SEED)
    drawn = [_resampled(each, rng) for each in sets]
    means = np.sum([mean for mean, _ in drawn], axis=0) - change
    errors = np.sqrt(np.sum([variance for _, variance in drawn], axis=0))
    # A resample of equal values has no error: its t is unbounded, which widens the interval of few values.
    with np.errstate(divide="ignore", invalid="ignore"):
        students = np.nan_to_num(means / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low = np.quantile(students, level / 2, method="lower")
    high = np.quantile(students, 1.0 - level / 2, method="higher")
    return Interval(change, change - float(high) * error, change - float(low) * error)


def _resampled(values: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the means of resamples, and their squared standard errors."""
    found = values[rng.integers(0, len(values), (RESAMPLES, len(values)))]
    return found.mean(axis=1), found.var(axis=1, ddof=1) / len(values)


def change_points(values: Sequence[float]) -> list[int]:
    """Return the first index of each segment but the first, sorted.

    A series of more than ``MAX_SERIES`` values is searched at its end. Values without a change must be
    exchangeable: a drift, or values that resemble their neighbours, are reported as changes more often.
    """
    skipped = max(0, len(values) - MAX_SERIES)
    series = np.asarray(values[skipped:], dtype=float)
    rng = np.random.default_rng(SEED)
    bounds = [0, len(series)]
    refused: set[tuple[int, int]] = set()
    while True:
        best: tuple[float, int, tuple[int, int]] | None = None
        for segment in pairwise(bounds):
            if segment not in refused and (found := _split(_distances(series[slice(*segment)]))):
                at = (found[0], segment[0] + found[1], segment)
                best = at if best is None or at > best else best
        if best is None:
            return [skipped + bound for bound in bounds[1:-1]]
        statistic, index, segment = best
        if _is_chance(series[slice(*segment)], statistic, rng):
            refused.add(segment)
        else:
            bounds = sorted([*bounds, index])


def _distances(values: Floats) -> Floats:
    found: Floats = np.abs(values[:, None] - values[None, :])
    return found


def _split(distances: Floats) -> tuple[float, int] | None:
    """Return the largest divergence of two parts, and where the second begins; None for too few values.

    The divergence is the energy statistic of the parts with exponent 1, scaled by their lengths.
    """
    count = len(distances)
    if count < 2 * MIN_SEGMENT:
        return None
    sums = distances.cumsum(axis=0).cumsum(axis=1)
    left = np.arange(MIN_SEGMENT, count - MIN_SEGMENT + 1, dtype=float)
    at = left.astype(int) - 1
    right = count - left
    within_left = sums[at, at]
    across = sums[at, -1] - within_left
    within_right = sums[-1, -1] - within_left - 2.0 * across
    energy = (
        2.0 * across / (left * right)
        - within_left / (left * (left - 1.0))
        - within_right / (right * (right - 1.0))
    )
    scaled = energy * left * right / count
    best = int(scaled.argmax())
    return float(scaled[best]), int(left[best])


def _is_chance(values: Floats, statistic: float, rng: np.random.Generator) -> bool:
    """Whether the values in another order diverge as much too often for ``CHANGE_LEVEL``."""
    if statistic <= 0.0:
        return True
    distances, exceeded = _distances(values), 0
    for _ in range(PERMUTATIONS):
        order = rng.permutation(len(values))
        found = _split(distances[np.ix_(order, order)])
        # Rounding differs with the order of a sum.
        exceeded += found is not None and found[0] >= statistic * (1.0 - 1e-9)
        if (exceeded + 1) / (PERMUTATIONS + 1) > CHANGE_LEVEL:
            return True
    return False
