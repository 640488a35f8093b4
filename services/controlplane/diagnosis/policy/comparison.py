"""Two times side by side: what was usual, and what is diagnosed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.quantiles import bucket_means, quantile, rises
from services.controlplane.diagnosis.policy.samples import (
    VALIDATE,
    FittedPrices,
    FleetMoment,
    Floats,
    Mask,
    Metric,
    RequestTable,
    SpentOn,
    SpentTimes,
    fit_prices,
    parts_of,
)

BUCKETS: Final = 12  # buckets of a window, so that a trend in it can be tested
LEAST_BUCKET_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two times: its samples of one model and what the fleet was like."""

    begin_s: float
    end_s: float
    samples: RequestTable
    parts: SpentTimes
    buckets: Floats
    moments: Sequence[FleetMoment]

    @property
    def lasted_s(self) -> float:
        return max(1e-9, self.end_s - self.begin_s)

    def mean(self, values: Floats, mask: Mask) -> float:
        """Return the weighted mean of these requests, 0 for none."""
        weight = self.samples.weight[mask]
        return float(values[mask] @ weight / weight.sum()) if len(weight) else 0.0

    def rate(self, mask: Mask) -> float:
        return float(self.samples.weight[mask].sum()) / self.lasted_s

    def means(self, values: Floats, mask: Mask) -> Floats:
        return bucket_means(values, self.samples.weight, self.buckets, mask)

    def rates(self, mask: Mask, bucket_s: float) -> Floats:
        """Return the arrivals per second of each whole bucket, those without one too."""
        size = max(1, int(self.lasted_s / bucket_s))
        places = ((self.samples.ended_s[mask] - self.begin_s) // bucket_s).astype(int)
        inside = (places >= 0) & (places < size)
        weights = self.samples.weight[mask][inside]
        return np.asarray(np.bincount(places[inside], weights=weights, minlength=size) / bucket_s)


@dataclass(frozen=True)
class TwoTimes:
    """A model's baseline and window, under one metric and level. ``prices`` are those of the baseline."""

    metric: Metric
    level: float
    baseline: Side
    window: Side
    prices: FittedPrices
    bucket_s: float

    @cached_property
    def before_s(self) -> float:
        return quantile(self.baseline.parts.total, self.baseline.samples.weight, self.level)

    @cached_property
    def after_s(self) -> float:
        return quantile(self.window.parts.total, self.window.samples.weight, self.level)

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    @cached_property
    def host_ratio(self) -> float:
        """How many times as long the gateways validate requests: their processors alone decide it.

        Where it grew, hosts are loaded, and whatever they do takes as many times as long.
        """
        found = [
            quantile(side.samples.stages[:, VALIDATE], side.samples.weight, 0.5)
            for side in (self.baseline, self.window)
        ]
        return max(1.0, found[1] / found[0]) if found[0] > 0 else 1.0

    def explained_s(self, values: Floats, weights: Floats) -> float:
        """Return by how much lower the quantile of the window is with these values and weights."""
        return self.after_s - quantile(values, weights, self.level)

    def chance(self, values: tuple[Floats, Floats], masks: tuple[Mask, Mask]) -> float:
        """Return the probability of the rise of the means of buckets by chance."""
        return rises(self.baseline.means(values[0], masks[0]), self.window.means(values[1], masks[1]))

    def part_means(self, part: SpentOn) -> tuple[float, float]:
        """Return the mean of a part in both times; of a batch it is that of one step."""
        found = []
        for side in (self.baseline, self.window):
            column = side.parts[part]
            everyone = np.ones(len(column), dtype=bool)
            found.append(side.mean(column, everyone))
        if part is SpentOn.BATCH:
            steps = [
                side.mean(side.samples.before[:, 0] + side.samples.after[:, 0], side.samples.weight > 0)
                for side in (self.baseline, self.window)
            ]
            found = [value / max(1e-9, count) for value, count in zip(found, steps, strict=True)]
        return found[0], found[1]


def compare(
    model: str,
    metric: Metric,
    level: float,
    baseline: tuple[float, float, RequestTable, Sequence[FleetMoment]],
    window: tuple[float, float, RequestTable, Sequence[FleetMoment]],
) -> TwoTimes:
    """Return the comparison of one model. Each time: begin, end, its samples, its moments."""
    bucket_s = max(LEAST_BUCKET_S, (window[1] - window[0]) / BUCKETS)
    usual = baseline[2].where(_of(baseline[2], model, metric))
    prices = fit_prices(usual)

    def side(begin_s: float, end_s: float, samples: RequestTable, moments: Sequence[FleetMoment]) -> Side:
        buckets = np.floor((samples.ended_s - begin_s) / bucket_s)
        return Side(begin_s, end_s, samples, parts_of(samples, metric, prices), buckets, moments)

    asked = window[2].where(_of(window[2], model, metric))
    return TwoTimes(
        metric,
        level,
        side(baseline[0], baseline[1], usual, baseline[3]),
        side(window[0], window[1], asked, window[3]),
        prices,
        bucket_s,
    )


def _of(samples: RequestTable, model: str, metric: Metric) -> Mask:
    found = samples.model == model
    return np.asarray(found & (samples.output > 1) if metric is Metric.ITL else found, dtype=bool)
