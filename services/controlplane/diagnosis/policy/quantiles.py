"""A quantile, its change divided over parts, and how certain a change is. Random draws have a fixed seed."""

from __future__ import annotations

from itertools import pairwise
from math import erfc, sqrt
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.samples import Floats, Mask

_BAND: Final = 0.025  # half of the widest band
_DRAWS: Final = 400
_SEED: Final = 20_000


def band_weights(values: Floats, weights: Floats, level: float) -> Floats:
    """Return what each value weighs in the quantile: the mean of the values whose ranks are in its band.

    An L-estimator (Harrell and Davis, A New Distribution-Free Quantile Estimator, 1982, with equal weights):
    it is a sum over requests, so that the parts of its requests sum to it exactly. Sums to 1.
    """
    half = min(_BAND, (1 - level) / 2, level / 2)
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    ends /= ends[-1]
    starts = np.concatenate([[0.0], ends[:-1]])
    inside = np.minimum(ends, level + half) - np.maximum(starts, level - half)
    found = np.zeros(len(values))
    found[order] = np.maximum(0.0, inside)
    return np.asarray(found / found.sum())


def quantile(values: Floats, weights: Floats, level: float) -> float:
    """Return the quantile, 0 without a value of any weight."""
    if not len(values) or not weights.sum() > 0:
        return 0.0
    return float(band_weights(values, weights, level) @ values)


def allocated(values: Floats, weights: Floats, level: float, parts: Floats) -> Floats:
    """Return what each column of ``parts`` contributes to the quantile; the contributions sum to it.

    The contribution of a part is its mean over the requests at the quantile: the Euler allocation (Tasche,
    Capital Allocation to Business Units and Sub-Portfolios: the Euler Principle, 2008).
    """
    return np.asarray(band_weights(values, weights, level) @ parts)


def rises(before: Floats, after: Floats) -> float:
    """Return the probability of such a rise if both had one distribution.

    Mann and Whitney, On a Test of Whether one of Two Random Variables is Stochastically Larger than the
    Other, 1947, with its normal approximation, corrected for ties and continuity.
    """
    first, second = len(before), len(after)
    if not first or not second:
        return 1.0
    pooled = np.concatenate([before, after])
    values, places, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    above = float(middle[places[first:]].sum()) - second * (second + 1) / 2
    whole = first + second
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (whole * max(1, whole - 1))
    spread = first * second / 12 * (whole + 1 - ties)
    if len(values) == 1 or spread <= 0:
        return 1.0
    return 0.5 * erfc((above - first * second / 2 - 0.5) / sqrt(2 * spread))


def bucket_means(values: Floats, weights: Floats, buckets: Floats, mask: Mask) -> Floats:
    """Return the weighted mean of each bucket that has a value, in order of time."""
    if not mask.any():
        return np.zeros(0)
    _, places = np.unique(buckets[mask], return_inverse=True)
    sums = np.bincount(places, weights=values[mask] * weights[mask])
    return np.asarray(sums / np.bincount(places, weights=weights[mask]))


def ratio_interval(
    before: tuple[Floats, Floats, Floats], after: tuple[Floats, Floats, Floats], level: float
) -> tuple[float, float]:
    """Return the 99 % interval of the ratio of two quantiles; each side: values, weights, buckets.

    Whole buckets are drawn, since requests of one moment share their queue (block bootstrap: Künsch, The
    Jackknife and the Bootstrap for General Stationary Observations, 1989).
    """
    rng = np.random.default_rng(_SEED)
    drawn = [_drawn(rng, *side, level) for side in (before, after)]
    ratios = drawn[1] / np.maximum(drawn[0], 1e-9)
    low, high = np.quantile(ratios, (0.005, 0.995))
    return float(low), float(high)


def _drawn(
    rng: np.random.Generator, values: Floats, weights: Floats, buckets: Floats, level: float
) -> Floats:
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    _, places = np.unique(buckets[order], return_inverse=True)
    size = int(places.max()) + 1
    found = np.empty(_DRAWS)
    for draw in range(_DRAWS):
        counts = np.bincount(rng.integers(size, size=size), minlength=size)
        ends = np.cumsum(weights * counts[places])
        found[draw] = values[min(len(values) - 1, int(np.searchsorted(ends, level * ends[-1])))]
    return found


def unlike_span(series: Floats) -> tuple[int, int, float]:
    """Return begin and end of the span whose ranks differ most from the others', and the probability of such
    a difference by chance.

    Circular binary segmentation (Olshen et al., Circular Binary Segmentation for the Analysis of Array-Based
    DNA Copy Number Data, 2004) on ranks. The largest of all spans' scores is about as probable as one of
    ``2 * len(series)`` independent ones: so it was in permutations of 12 to 120 values.
    """
    size = len(series)
    _, places, counts = np.unique(series, return_inverse=True, return_counts=True)
    if size < 8 or len(counts) == 1:
        return 0, size, 1.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places] - (size + 1) / 2
    ends, sums = np.arange(size + 1), np.concatenate([[0.0], np.cumsum(ranks)])
    inside = ends[None, :] - ends[:, None]
    spread = inside * (size - inside) * float(ranks @ ranks) / (size * (size - 1))
    # One or two values that lie oddly at an end are no part of it that changed.
    is_edge = (ends == 0) | (ends == size) | ((ends >= 3) & (ends <= size - 3))
    allowed = is_edge[:, None] & is_edge[None, :] & (spread > 0)
    scores = np.abs(sums[None, :] - sums[:, None]) / np.sqrt(np.where(allowed, spread, np.inf))
    begin, end = divmod(int(np.argmax(scores)), size + 1)
    return begin, end, min(1.0, 2 * size * erfc(float(scores[begin, end]) / sqrt(2)))


def levels(series: Floats, most_chance: float) -> list[tuple[int, float]]:
    """Return the parts of a series that differ beyond chance: where each begins, and its median."""
    edges = [0, *change_points(series, most_chance), len(series)]
    for at in range(1, len(edges) - 1):
        edges[at] = _meeting(series, edges[at - 1], edges[at + 1])
    return [(begin, float(np.median(series[begin:end]))) for begin, end in pairwise(edges) if begin < end]


def _meeting(series: Floats, begin: int, end: int) -> int:
    """Return where two levels meet in a part, by least absolute deviations: ranks favour equal halves."""

    def apart(part: Floats) -> float:
        return float(np.abs(part - np.median(part)).sum())

    return min(range(begin + 1, end), key=lambda at: apart(series[begin:at]) + apart(series[at:end]))


def change_points(series: Floats, most_chance: float) -> list[int]:
    """Return where a series changes beyond chance, in order."""
    begin, end, chance = unlike_span(series)
    if chance > most_chance:
        return []
    found = {begin, end} - {0, len(series)}
    for first, last in ((0, begin), (begin, end), (end, len(series))):
        found.update(first + place for place in change_points(series[first:last], most_chance))
    return sorted(found)
