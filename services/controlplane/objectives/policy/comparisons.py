"""Two arms compared by sums over session clusters, with bounds that hold at every look. Pure.

A ratio of sums over independent clusters is asymptotically normal; its variance follows from the residuals
of the clusters (Deng, Knoblich, Lu: Applying the delta method in metric analytics, KDD 2018). The bound on
its statistic is the one-sided boundary of the normal mixture (Robbins 1970; Howard, Ramdas, McAuliffe,
Sekhon: Time-uniform, nonparametric, nonasymptotic confidence sequences, Annals of Statistics 2021, equation
14), which Waudby-Smith et al. (Time-uniform central limit theory, Annals of Statistics 2024) show to hold for
such estimates. It is crossed with at most the given probability over all looks together.

Quantiles are compared by the shares of values above a threshold: the baseline's 95th percentile for the
baseline, and ``margin`` times it for the candidate. The candidate is above its threshold more often than the
baseline above its own if, and only if, its percentile is more than ``margin`` times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.arms import ArmWindow, SliSums, latency_sketch
from services.core.estimates.sketch import Sketch, merged

MIN_CLUSTERS: Final = 12  # fewest clusters of each arm: fewer give no variance
QUANTILE: Final = 0.95
_MIN_EVENT_CLUSTERS: Final = 4  # an error ratio fails only if sessions of as many clusters had errors
_QUANTILE_EFFECT: Final = 0.05  # further share of values above the threshold that a gate is tuned for
_MIN_CLASS: Final = 200  # values of the baseline that have a 95th percentile of their own
_TUNED_Z: Final = 5.0  # standard errors of the effect at which the bound is tightest
_LARGE: Final = 8.0  # the larger effect that the bound is tuned for too
_NEVER: Final = -math.inf

Pair = tuple[float, float]
Arms = tuple[ArmWindow, ArmWindow]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Baseline against candidate by one metric."""

    baseline: float | None
    candidate: float | None
    baseline_samples: int = 0
    candidate_samples: int = 0
    # Standard errors by which the regression exceeds the margin, and stays below the limit.
    regression_z: float = 0.0
    ruled_out_z: float = _NEVER
    # 1 / variance of the difference, by that at which the effect stands out by ``_TUNED_Z``.
    information: float = 0.0
    sides: int = 1

    def bound(self, error_ratio: float) -> float:
        """Return the bound that the statistic crosses with ``error_ratio`` at most, over all looks.

        It is the lower of two boundaries that share it: one is tightest where the effect stands out, the
        other where a much larger one does. With only the first, half of all requests could fail for minutes.
        """
        share = error_ratio / (2 * self.sides)
        return min(_boundary(share, self.information), _boundary(share, _LARGE**2 * self.information))


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A ratio of sums. ``variance`` is that of the ratio, from the clusters' residuals."""

    value: float
    variance: float
    total: float
    clusters: int
    hit: int  # clusters whose numerator is above 0


def of_changed_shares(
    arms: Arms, parts: Callable[[SliSums], Pair], margin: float, limit: float
) -> Comparison:
    """Compare as ``of_shares``, where a fall is a regression as a rise is."""
    rise, fall = of_shares(arms, parts, margin, limit), of_shares(arms[::-1], parts, margin, limit)
    worst = max(rise, fall, key=lambda one: one.regression_z)
    ruled_out_z, information = min(rise.ruled_out_z, fall.ruled_out_z), worst.information
    found = replace(rise, regression_z=worst.regression_z, ruled_out_z=ruled_out_z)
    return replace(found, information=information, sides=2)


def of_shares(arms: Arms, parts: Callable[[SliSums], Pair], margin: float, limit: float) -> Comparison:
    """Compare shares of requests. ``margin`` and ``limit`` are differences of shares."""
    base, other = (_ratio([parts(sums) for sums in arm.clusters.values()]) for arm in arms)
    if base is None or other is None:
        return _incomplete(base, other)
    effect = limit - margin
    regression_z, information = _share_test(base, other, margin, effect, _pooled(base, other, margin))
    if other.hit < _MIN_EVENT_CLUSTERS:
        regression_z = min(regression_z, 0.0)
    ruled_out_z, _ = _share_test(base, other, limit, effect, _pooled(base, other, limit))
    return _comparison(base, other, regression_z, -ruled_out_z, information)


def of_quantiles(
    arms: Arms, sketches: Callable[[SliSums], Mapping[int, Sketch]], margin: float, limit: float
) -> Comparison:
    """Compare 95th percentiles, each class of values with its own. ``margin`` and ``limit`` are factors."""
    base, other = ([sketches(sums) for sums in arm.clusters.values()] for arm in arms)
    whole, others = _whole(base), _whole(other)
    values = whole.quantile(QUANTILE), others.quantile(QUANTILE)
    samples = round(whole.count), round(others.count)
    if (
        min(sum(any(one.count for one in each.values()) for each in arm) for arm in (base, other))
        < MIN_CLUSTERS
    ):
        return Comparison(*values, *samples)
    at = _thresholds(base)
    expected = _above(base, at, added=len(set(at.values())))
    tolerated = _above(other, {size: index + whole.steps(margin) for size, index in at.items()})
    limited = _above(other, {size: index + whole.steps(limit) for size, index in at.items()})
    share = max(expected.value, 1 - QUANTILE)
    regression_z, information = _share_test(expected, tolerated, 0.0, _QUANTILE_EFFECT, share)
    ruled_out_z, _ = _share_test(expected, limited, 0.0, _QUANTILE_EFFECT, share)
    return Comparison(*values, *samples, regression_z, -ruled_out_z, information)


def of_means(
    arms: Arms, parts: Callable[[SliSums], Pair], margin: float, limit: float, *, two_sided: bool = False
) -> Comparison:
    """Compare means by their logarithms. ``margin`` and ``limit`` are factors, two-sided also inverted."""
    base, other = (_ratio([parts(sums) for sums in arm.clusters.values()]) for arm in arms)
    if base is None or other is None or not base.value or not other.value:
        return _incomplete(base if base is None or base.value else None, other)
    variance = base.variance / base.value**2 + other.variance / other.value**2
    change = math.log(other.value / base.value)
    grown = abs(change) if two_sided else change
    error, free = math.sqrt(max(variance, 1e-12)), _freedom(base, other)
    return _comparison(
        base,
        other,
        _normal((grown - math.log(margin)) / error, free),
        _normal((math.log(limit) - grown) / error, free),
        _information(variance, math.log(limit / margin)),
        sides=2 if two_sided else 1,
    )


def _boundary(share: float, information: float) -> float:
    """Return the boundary of the normal mixture that is tightest at ``information`` 1."""
    tuned = 2 * math.log(1 / share)
    scale = (tuned + math.log(1 + tuned)) * information  # V / rho
    if scale <= 0:
        return math.inf
    return math.sqrt(2 * (1 + 1 / scale) * math.log(1 + math.sqrt(1 + scale) / (2 * share)))


def _pooled(base: _Ratio, other: _Ratio, margin: float) -> float:
    """Return the baseline's share, from both arms, if the candidate's exceeds it by the margin."""
    total = base.total + other.total
    hits = base.value * base.total + max(0.0, other.value - margin) * other.total
    return max(hits, 1.0) / total


def _share_test(
    base: _Ratio, other: _Ratio, margin: float, effect: float, expected: float
) -> tuple[float, float]:
    """Return by how many standard errors ``other`` exceeds ``base`` and the margin, and the information.

    ``expected`` is the baseline's share if it exceeds it by just the margin.

    The standard error is the one halfway between the observed and the tolerated share, which makes the tail
    of a rare event normal (Anscombe 1948: 2 (sqrt(p) - sqrt(q)) has an almost constant variance). It is at
    least that of independent samples: a share that has not occurred yet is not known to be 0. A baseline with
    almost no events does not show how they cluster; the candidate's do. Its variance is then no estimate from
    clusters, and the degrees of freedom are those of the candidate's (Welch 1947).
    """
    tolerated = min(0.5, expected + margin)
    binomial = tolerated * (1 - tolerated)
    halfway = ((1 + math.sqrt(tolerated / other.value)) / 2) ** 2 if other.value else 1.0
    of_other = max(halfway * other.variance, binomial / other.total)
    rare = base.hit < _MIN_EVENT_CLUSTERS
    unseen = _design_effect(other) if rare else 1.0
    of_base = unseen * expected * (1 - expected) / base.total
    fewer = _lower_tail(base.value * base.total / unseen, expected * base.total / unseen)
    variance = max(base.variance, fewer * of_base) + of_other
    freedom = (other.clusters - 1) * (variance / of_other) ** 2 if rare else _freedom(base, other)
    statistic = (other.value - base.value - margin) / math.sqrt(variance)
    tuned = min(variance, _variance_without(base, other, margin))
    return _normal(statistic, freedom), _information(tuned, effect)


def _lower_tail(events: float, expected: float) -> float:
    """Return the factor of a Poisson variance that gives its lower tail the normal deviate of that tail.

    The cube root of a gamma variable is almost normal (Wilson, Hilferty 1931), and at most n events are as
    probable as a gamma variable of shape n + 1 above the expected number. Without it, no event where 15 are
    expected would count as 3.9 standard errors; it is as improbable as 4.9.
    """
    shape = events + 1
    deviate: float = 3 * math.sqrt(shape) * ((expected / shape) ** (1 / 3) - 1 + 1 / (9 * shape))
    if events >= expected or deviate <= 0:
        return 1.0
    return min(1.0, (expected - events) ** 2 / (expected * deviate**2))


def _variance_without(base: _Ratio, other: _Ratio, margin: float) -> float:
    """Return the variance of the difference if the candidate exceeded the baseline by just the margin.

    It tunes the bound. A share of one half has the largest variance of all: with its own variance, a
    candidate that fails half of its requests would need more of them than one that fails few.
    """
    share = max(base.value, 1 / base.total)
    tolerated = min(0.5, share + margin)
    of_base = max(base.variance, share * (1 - share) / base.total)
    return of_base + _design_effect(other) * tolerated * (1 - tolerated) / other.total


def _design_effect(ratio: _Ratio) -> float:
    """Return the variance between clusters over that of independent samples, at least 1 (Kish 1965)."""
    binomial = ratio.value * (1 - ratio.value)
    return max(1.0, ratio.variance * ratio.total / binomial) if binomial > 0 else 1.0


def _ratio(pairs: Sequence[Pair]) -> _Ratio | None:
    """Return the ratio of the sums of the clusters that have any; None if none has."""
    used = [pair for pair in pairs if pair[1] > 0]
    total = sum(below for _, below in used)
    if len(used) < 2:
        return None
    value = sum(above for above, _ in used) / total
    squares = sum((above - value * below) ** 2 for above, below in used)
    variance = squares * len(used) / (len(used) - 1) / total**2
    return _Ratio(value, variance, total, len(used), sum(above > 0 for above, _ in used))


def _thresholds(clusters: Sequence[Mapping[int, Sketch]]) -> dict[int, int]:
    """Return the bucket of the 95th percentile of each class; neighbours with few values share one."""
    by_size: dict[int, Sketch] = {}
    for sketches in clusters:
        for size, sketch in sketches.items():
            by_size.setdefault(size, latency_sketch()).merge(sketch)
    groups: list[list[int]] = [[]]
    for size in sorted(by_size):
        if sum(by_size[one].count for one in groups[-1]) >= _MIN_CLASS:
            groups.append([])
        groups[-1].append(size)
    if len(groups) > 1 and sum(by_size[one].count for one in groups[-1]) < _MIN_CLASS:
        few = groups.pop()
        groups[-1] += few
    return {
        size: merged(by_size[one] for one in group).bucket_of(QUANTILE) or 0
        for group in groups
        for size in group
    }


def _above(clusters: Sequence[Mapping[int, Sketch]], at: Mapping[int, int], *, added: int = 0) -> _Ratio:
    """Return the share of values above the thresholds. A threshold is taken from the values themselves, so
    ``added`` further ones count as above: one of each threshold (order statistics)."""
    pairs = [
        (
            sum(sketch.above(at[size]) for size, sketch in sketches.items() if size in at),
            sum(sketch.count for size, sketch in sketches.items() if size in at),
        )
        for sketches in clusters
    ]
    found = _ratio(pairs)
    assert found is not None, "enough clusters have values"
    return replace(found, value=found.value + added / found.total)


def _whole(clusters: Sequence[Mapping[int, Sketch]]) -> Sketch:
    return merged([latency_sketch(), *(sketch for sketches in clusters for sketch in sketches.values())])


def _freedom(base: _Ratio, other: _Ratio) -> int:
    return min(base.clusters, other.clusters) - 1


def _normal(statistic: float, freedom: float) -> float:
    """Return the normal deviate of a t statistic (Wallace 1959)."""
    if freedom < 1:
        return 0.0
    size = math.sqrt(freedom * math.log1p(statistic**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(size, statistic)


def _information(variance: float, effect: float) -> float:
    return (effect / _TUNED_Z) ** 2 / max(variance, 1e-12)


def _comparison(
    base: _Ratio,
    other: _Ratio,
    regression_z: float,
    ruled_out_z: float,
    information: float,
    *,
    sides: int = 1,
) -> Comparison:
    return Comparison(
        base.value,
        other.value,
        round(base.total),
        round(other.total),
        regression_z,
        ruled_out_z,
        information,
        sides,
    )


def _incomplete(base: _Ratio | None, other: _Ratio | None) -> Comparison:
    return Comparison(
        None if base is None else base.value,
        None if other is None else other.value,
        0 if base is None else round(base.total),
        0 if other is None else round(other.total),
    )
