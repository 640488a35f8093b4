"""Two times side by side: what was usual, and what is diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np

from services.controlplane.diagnosis.policy.quantiles import allocated, bucket_means, quantile
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
T = TypeVar("T")
Columns = tuple[Floats, Floats]  # a value of each request or bucket, in the baseline and in the window
Masks = tuple[Mask, Mask]


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """A time, and the requests in it: those that the samples stand for. ``covered_s``: the seconds of it that
    samples cover; 0: all of it."""

    begin_s: float
    end_s: float
    requests: int = 0
    samples: int = 0
    covered_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """The samples of a time, of all models, and what the fleet was like. ``covered``: the times of samples
    within it; empty: all of it."""

    begin_s: float
    end_s: float
    samples: RequestTable
    moments: Sequence[FleetMoment] = ()
    covered: Sequence[tuple[float, float]] = ()

    def span(self, model: str = "", tenant: str = "") -> SampledSpan:
        mask = self.samples.asked("model", model) & self.samples.asked("tenant", tenant)
        requests = round(float(self.samples.weight[mask].sum()))
        covered_s = sum(end_s - begin_s for begin_s, end_s in self.covered)
        return SampledSpan(self.begin_s, self.end_s, requests, int(mask.sum()), covered_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Evidence):
    """The evidence of one model. ``parts``: of each request's metric; ``buckets``: the number of each's."""

    parts: SpentTimes
    buckets: Floats

    @property
    def spans(self) -> Sequence[tuple[float, float]]:
        return self.covered or ((self.begin_s, self.end_s),)

    def mean(self, values: Floats, mask: Mask) -> float:
        """Return the weighted mean of these requests, 0 for none."""
        weight = self.samples.weight[mask]
        return float(values[mask] @ weight / weight.sum()) if len(weight) else 0.0

    def rate(self, mask: Mask) -> float:
        lasted_s = sum(end_s - begin_s for begin_s, end_s in self.spans)
        return float(self.samples.weight[mask].sum()) / max(1e-9, lasted_s)

    def means(self, values: Floats, mask: Mask) -> Floats:
        return bucket_means(values, self.samples.weight, self.buckets, mask)

    def rates(self, mask: Mask, bucket_s: float) -> Floats:
        """Return the arrivals per second of each whole bucket, those without one too."""
        ended_s, weight, found = self.samples.ended_s[mask], self.samples.weight[mask], []
        for begin_s, end_s in self.spans:
            size = int((end_s - begin_s) / bucket_s)
            places = ((ended_s - begin_s) // bucket_s).astype(int)
            inside = (places >= 0) & (places < size)
            found.append(np.bincount(places[inside], weights=weight[inside], minlength=size) / bucket_s)
        return np.concatenate(found)


@dataclass(frozen=True)
class TwoTimes:
    """A model's baseline and window, under one metric and level. ``prices`` are those of the baseline.

    With a ``tenant`` the latencies are those of its requests. Loads and figures are those of all requests:
    whoever slows it may be another.
    """

    model: str
    metric: Metric
    level: float
    baseline: Side
    window: Side
    prices: FittedPrices
    bucket_s: float
    tenant: str = ""

    @cached_property
    def asked(self) -> Masks:
        """Return the requests whose latencies are compared."""
        return self.both(lambda side: side.samples.asked("tenant", self.tenant))

    @cached_property
    def before_s(self) -> float:
        return quantile(self.baseline.parts.total, self.baseline.samples.weight * self.asked[0], self.level)

    @cached_property
    def after_s(self) -> float:
        return quantile(self.window.parts.total, self.window.samples.weight * self.asked[1], self.level)

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    @cached_property
    def host_ratio(self) -> float:
        """How many times as long the gateways validate requests: their processors alone decide it.

        Where it grew, hosts are loaded, and whatever they do takes as many times as long.
        """
        found = self.both(lambda side: quantile(side.samples.stages[:, VALIDATE], side.samples.weight, 0.5))
        return max(1.0, found[1] / found[0]) if found[0] > 0 else 1.0

    def explained_s(self, values: Floats, weights: Floats) -> float:
        """Return by how much lower the quantile of the window is with these values and weights."""
        return self.after_s - quantile(values, weights * self.asked[1], self.level)

    # --- both times at once ----------------------------------------------------------------------

    def both(self, of: Callable[..., T], *each: tuple[Any, Any]) -> tuple[T, T]:
        """Return a function of both times. ``each``: more arguments, one for each time."""
        return of(self.baseline, *(one[0] for one in each)), of(self.window, *(one[1] for one in each))

    @cached_property
    def everyone(self) -> Masks:
        return self.both(lambda side: np.ones(len(side.samples), bool))

    def column(self, name: str) -> tuple[Any, Any]:
        return self.both(lambda side: getattr(side.samples, name))

    def masks(self, name: str, *values: str) -> Masks:
        """Return which requests have one of these values in a column."""
        return self.both(lambda side: np.isin(getattr(side.samples, name), values))

    def part(self, part: SpentOn) -> Columns:
        return self.both(lambda side: side.parts[part])

    def means(self, columns: Columns, masks: Masks) -> tuple[float, float]:
        return self.both(Side.mean, columns, masks)

    def by_bucket(self, columns: Columns, masks: Masks) -> Columns:
        """Return the means of buckets."""
        return self.both(Side.means, columns, masks)

    def rates(self, masks: Masks) -> Columns:
        """Return the arrivals per second in each bucket."""
        return self.both(lambda side, mask: side.rates(mask, self.bucket_s), masks)

    @cached_property
    def tails(self) -> Columns:
        """Return the ratio of each bucket's requests that are slower than the baseline's quantile."""
        slow = self.both(lambda side: (side.parts.total > self.before_s).astype(float))
        return self.by_bucket(slow, self.asked)

    def allocated(self, table: Callable[[Side], Floats]) -> Columns:
        """Return what each column of a table contributes to the quantile."""
        return self.both(
            lambda side, asked: allocated(
                side.parts.total, side.samples.weight * asked, self.level, table(side)
            ),
            self.asked,
        )

    def excess(self, part: SpentOn, least_s: float = 0.0) -> Floats:
        """Return what the window's requests would save of a part if its mean were the usual one.

        The mean of a batch is that of one step. Nothing is saved where it grew by ``least_s`` or less.
        """
        usual_s, now_s = self.means(self.part(part), self.everyone)
        if part is SpentOn.BATCH:
            columns = self.both(lambda side: side.samples.before[:, 0] + side.samples.after[:, 0])
            steps = self.means(columns, self.everyone)
            usual_s, now_s = usual_s / max(1e-9, steps[0]), now_s / max(1e-9, steps[1])
        ratio = 1 - usual_s / now_s if now_s > usual_s + least_s else 0.0
        return np.asarray(ratio * self.window.parts[part])


def compare(
    model: str, metric: Metric, level: float, baseline: Evidence, window: Evidence, tenant: str = ""
) -> TwoTimes:
    """Return the comparison of one model."""
    bucket_s = max(LEAST_BUCKET_S, (window.end_s - window.begin_s) / BUCKETS)
    usual = of_model(baseline.samples, model, metric)
    prices = fit_prices(usual)

    def side(found: Evidence, samples: RequestTable) -> Side:
        buckets = np.floor((samples.ended_s - found.begin_s) / bucket_s)
        parts = parts_of(samples, metric, prices)
        times = found.begin_s, found.end_s
        return Side(*times, samples, found.moments, found.covered, parts=parts, buckets=buckets)

    sides = side(baseline, usual), side(window, of_model(window.samples, model, metric))
    return TwoTimes(model, metric, level, *sides, prices, bucket_s, tenant)


def of_model(samples: RequestTable, model: str, metric: Metric) -> RequestTable:
    """Return the requests of a model that have the metric."""
    found = samples.model == model
    return samples.where(found & (samples.output > 1) if metric is Metric.ITL else found)
