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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.core.arms import ArmWindow, SliSums
from services.core.sketch import Sketch

MIN_CLUSTERS: Final = 12  # of each arm: fewer give no variance
QUANTILE: Final = 0.95
_MIN_EVENT_CLUSTERS: Final = 4  # an error ratio fails only if sessions of as many clusters had errors
_QUANTILE_EFFECT: Final = 0.05  # further share of values above the threshold that a gate is tuned for
_TUNED_Z: Final = 5.0  # standard errors of the effect at which the bound is tightest
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
        """Return the bound that the statistic crosses with ``error_ratio`` at most, over all looks."""
        share = error_ratio / self.sides
        tuned = 2 * math.log(1 / share)
        scale = (tuned + math.log(1 + tuned)) * self.information  # V / rho
        if scale <= 0:
            return math.inf
        return math.sqrt(2 * (1 + 1 / scale) * math.log(1 + math.sqrt(1 + scale) / (2 * share)))


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A ratio of sums. ``variance`` is that of the ratio, from the clusters' residuals."""

    value: float
    variance: float
    total: float
    clusters: int
    hit: int  # clusters whose numerator is above 0


def of_shares(arms: Arms, parts: Callable[[SliSums], Pair], margin: float, limit: float) -> Comparison:
    """Compare shares of requests. ``margin`` and ``limit`` are differences of shares."""
    base, other = (_ratio([parts(sums) for sums in arm.clusters.values()]) for arm in arms)
    if base is None or other is None:
        return _incomplete(base, other)
    regression_z, information = _share_test(base, other, margin, limit - margin)
    if other.hit < _MIN_EVENT_CLUSTERS:
        regression_z = min(regression_z, 0.0)
    ruled_out_z, _ = _share_test(base, other, limit, limit - margin)
    return _comparison(base, other, regression_z, -ruled_out_z, information)


def of_quantiles(arms: Arms, sketch: Callable[[SliSums], Sketch], margin: float, limit: float) -> Comparison:
    """Compare 95th percentiles. ``margin`` and ``limit`` are factors."""
    sketches = [[sketch(sums) for sums in arm.clusters.values()] for arm in arms]
    wholes = [_whole(found) for found in sketches]
    values = [None if whole is None else whole.quantile(QUANTILE) for whole in wholes]
    samples = [0 if whole is None else round(whole.count) for whole in wholes]
    at = wholes[0].bucket_of(QUANTILE) if wholes[0] is not None else None
    if wholes[0] is None or wholes[1] is None or at is None:
        return Comparison(values[0], values[1], samples[0], samples[1])
    base = _above(sketches[0], at)
    regression_z, information = _share_test(
        base, _above(sketches[1], at + wholes[0].steps(margin)), 0.0, _QUANTILE_EFFECT
    )
    ruled_out_z, _ = _share_test(base, _above(sketches[1], at + wholes[0].steps(limit)), 0.0, 1.0)
    return Comparison(values[0], values[1], *samples, regression_z, -ruled_out_z, information)


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


def _share_test(base: _Ratio, other: _Ratio, margin: float, effect: float) -> tuple[float, float]:
    """Return by how many standard errors ``other`` exceeds ``base`` and the margin, and the information.

    The variance is at least the one that independent samples would have at the margin: a share near 0 that
    has not occurred yet is not known exactly.
    """
    expected = min(0.5, base.value + margin)
    pooled = (base.value * base.total + max(0.0, other.value - margin) * other.total) / (
        base.total + other.total
    )
    spread = max(expected, min(0.5, pooled), 1 / (base.total + other.total))
    binomial = spread * (1 - spread)
    variance = max(base.variance, binomial / base.total) + max(other.variance, binomial / other.total)
    statistic = (other.value - base.value - margin) / math.sqrt(variance)
    return _normal(statistic, _freedom(base, other)), _information(variance, effect)


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


def _above(sketches: Sequence[Sketch], index: int) -> _Ratio:
    found = _ratio([(one.above(index), one.count) for one in sketches])
    assert found is not None, "a sketch with a quantile is not empty"
    return found


def _whole(sketches: Sequence[Sketch]) -> Sketch | None:
    used = [one for one in sketches if one.count]
    if len(used) < MIN_CLUSTERS:
        return None
    whole = Sketch(error_ratio=used[0].error_ratio, floor=used[0].floor, max_buckets=used[0].max_buckets)
    for one in used:
        whole.merge(one)
    return whole


def _freedom(base: _Ratio, other: _Ratio) -> int:
    return min(base.clusters, other.clusters) - 1


def _normal(statistic: float, freedom: int) -> float:
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
