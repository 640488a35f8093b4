"""What a simulation shows, as values: the source of the table and of report.json.

Nothing in it depends on the machine or on the time of day, so that equal runs give equal reports:
``digest`` is over all the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from services.core.estimates.sketch import Sketch, merged
from simulator.lab.report.fairness import Fairness, fairness
from simulator.lab.report.measure import Group, RecordCollector, Slo
from simulator.lab.report.samples import Timeline

CDF_POINTS: Final = 120
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None

    @classmethod
    def of(cls, sketch: Sketch) -> Quantiles:
        p50, p90, p95, p99 = (sketch.quantile(ratio) for ratio in (0.5, 0.9, 0.95, 0.99))
        return cls(p50, p90, p95, p99, sketch.mean)


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of one tenant and class, or of all. ``rejected`` had no token; by reason."""

    tenant: str
    priority: str
    sent: int
    finished: int
    good: int
    good_per_s: float
    ttft_s: Quantiles
    itl_s: Quantiles
    tpot_s: Quantiles
    queue_s: Quantiles
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    resumes: int
    ended_by: dict[str, int]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """``share_ratio``: its part of all computed tokens. ``busy_ratio``: its time inside steps."""

    name: str
    busy_ratio: float
    share_ratio: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that was done to the fleet, from and until when."""

    name: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of (seconds, value) for the plots."""

    ttft_cdf: dict[str, list[Point]]
    waiting: list[Point]
    pressure: list[Point]
    kv_ratio: list[Point]
    tokens_per_s: list[Point]
    arrivals_per_s: list[Point]
    refusals_per_s: list[Point]
    service: dict[str, list[Point]]
    busy: dict[str, list[Point]]


@dataclass(frozen=True, slots=True)
class Header:
    """What was run."""

    scenario: str
    summary: str
    workers: int
    preset: str
    seed: int
    duration_s: float
    warm_up_s: float
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Course:
    """How the run went: its length, what it violated, and a digest of its events."""

    simulated_s: float
    violations: tuple[str, ...] = ()
    trace_digest: str = ""


@dataclass(frozen=True, slots=True)
class LabReport:
    """The whole. ``fairness_bound_tokens`` is the policy's bound of ``fairness.difference_tokens``."""

    header: Header
    slo: Slo
    error_ratio: float
    simulated_s: float
    total: Row
    rows: tuple[Row, ...]
    fairness: Fairness
    fairness_bound_tokens: float | None
    workers: tuple[WorkerRow, ...]
    series: Series
    violations: tuple[str, ...] = ()
    trace_digest: str = ""
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def cache_hit_ratio(self) -> float:
        prompt = self.total.prompt_tokens
        return self.total.cached_tokens / prompt if prompt else 0.0

    @property
    def busy_ratio(self) -> float:
        return sum(worker.busy_ratio for worker in self.workers) / len(self.workers) if self.workers else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values, with ``digest``."""
        values = asdict(self)
        values["cache_hit_ratio"] = self.cache_hit_ratio
        values["busy_ratio"] = self.busy_ratio
        values["digest"] = self.digest
        return values

    @property
    def digest(self) -> str:
        """The same for the same run, whatever machine it ran on."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def build(
    header: Header,
    collector: RecordCollector,
    timeline: Timeline,
    course: Course,
    *,
    weights: Mapping[str, float],
    bound_tokens: float | None = None,
    figures: Mapping[str, float | None] | None = None,
) -> LabReport:
    """Return the report of a run. ``weights`` are the tenants' for fairness; 1 for one that is not there."""
    lasted_s = max(header.duration_s - header.warm_up_s, 1e-9)
    groups = {key: group for key, group in collector.groups.items() if group.sent}
    ordered = sorted(groups, key=lambda key: (-groups[key].sent, key[0], key[1].rank))
    utilisation = {name: timeline.utilisation(name) for name in timeline.totals}
    shares = timeline.shares()
    return LabReport(
        header=header,
        slo=collector.slo,
        error_ratio=Sketch().error_ratio,
        simulated_s=course.simulated_s,
        total=_row("all", "all", groups.values(), lasted_s),
        rows=tuple(_row(key[0], key[1].value, [groups[key]], lasted_s) for key in ordered),
        fairness=fairness(collector, weights),
        fairness_bound_tokens=bound_tokens,
        workers=tuple(WorkerRow(name, utilisation[name], shares[name]) for name in utilisation),
        series=_series(collector, timeline),
        violations=course.violations,
        trace_digest=course.trace_digest,
        figures=dict(figures or {}),
    )


def _row(tenant: str, priority: str, groups: Iterable[Group], lasted_s: float) -> Row:
    groups = list(groups)
    ended_by: Counter[str] = Counter()
    for group in groups:
        ended_by.update(group.outcomes)
    good = sum(group.good for group in groups)
    return Row(
        tenant=tenant,
        priority=priority,
        sent=sum(group.sent for group in groups),
        finished=sum(group.finished for group in groups),
        good=good,
        good_per_s=good / lasted_s,
        ttft_s=Quantiles.of(merged(group.ttft for group in groups)),
        itl_s=Quantiles.of(merged(group.itl for group in groups)),
        tpot_s=Quantiles.of(merged(group.tpot for group in groups)),
        queue_s=Quantiles.of(merged(group.queue for group in groups)),
        prompt_tokens=sum(group.prompt_tokens for group in groups),
        cached_tokens=sum(group.cached_tokens for group in groups),
        output_tokens=sum(group.output_tokens for group in groups),
        resumes=sum(group.resumes for group in groups),
        ended_by=dict(sorted(ended_by.items())),
    )


def _series(collector: RecordCollector, timeline: Timeline) -> Series:
    by_tenant: dict[str, list[Group]] = {}
    for key, group in collector.groups.items():
        by_tenant.setdefault(key[0], []).append(group)
    names = sorted(by_tenant, key=lambda name: (-sum(group.sent for group in by_tenant[name]), name))[:10]
    cdf = {"all": _cdf(merged(group.ttft for group in collector.groups.values()))}
    if len(names) > 1:
        cdf.update((name, _cdf(merged(group.ttft for group in by_tenant[name]))) for name in names[:9])
    return Series(
        ttft_cdf=cdf,
        waiting=[(at_s, float(waiting)) for at_s, waiting, _, _ in timeline.points],
        pressure=[(at_s, pressure) for at_s, _, pressure, _ in timeline.points],
        kv_ratio=[(at_s, kv_ratio) for at_s, _, _, kv_ratio in timeline.points],
        tokens_per_s=_rate(collector.tokens.sums, collector.tokens.width_s),
        arrivals_per_s=_rate(collector.arrivals.sums, collector.arrivals.width_s),
        refusals_per_s=_rate(collector.refusals.sums, collector.refusals.width_s),
        service={name: _service(by_tenant[name]) for name in names},
        busy=dict(timeline.busy),
    )


def _cdf(sketch: Sketch) -> list[Point]:
    points = list(sketch.cdf())
    step = max(1, -(-len(points) // CDF_POINTS))
    return [*points[:-1:step], *points[-1:]]


def _rate(sums: list[float], width_s: float) -> list[Point]:
    """Return (middle of the bin, amount per second)."""
    return [((index + 0.5) * width_s, amount / width_s) for index, amount in enumerate(sums)]


def _service(groups: list[Group]) -> list[Point]:
    """Return a tenant's cumulative service at the ends of the bins."""
    width_s = max(group.service.width_s for group in groups)
    columns = [group.service.widened(width_s) for group in groups]
    points, total = [(0.0, 0.0)], 0.0
    for index in range(max(len(column) for column in columns)):
        total += sum(column[index] for column in columns if index < len(column))
        points.append(((index + 1) * width_s, total))
    return points
