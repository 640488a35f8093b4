"""What a simulation shows, as values: the source of the table and of report.json.

Nothing in it depends on the machine or on the time of day, so that equal runs give equal reports: ``digest``
is over all the rest.

Fairness is how evenly tenants that waited at the same time were served. A tenant counts as waiting in a bin
when it had one request in the queue on average or more. Only tenants of one class are compared, as the
scheduler's fairness holds within a class. Service is in weighted tokens over the tenant's weight.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Final

from services.core.estimates.sketch import Sketch, merged
from services.core.records import Priority
from simulator.lab.report.measure import OTHERS, Group, GroupKey, RecordCollector, Slo
from simulator.lab.report.seconds import Second

MAX_TENANTS: Final = 24
WINDOW_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class Fairness:
    """``jain_*``: mean and least over the windows in which two tenants or more waited throughout.

    None without such a window. ``difference_tokens``: the largest difference in weighted service that two
    tenants came to while both waited without a break; ``pair`` names them.
    """

    windows: int
    jain_mean: float | None
    jain_least: float | None
    difference_tokens: float
    pair: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class _Course:
    tenant: str
    service: Sequence[float]
    waited: Sequence[bool]


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 when all are equal, 1/n when one has all. ValueError for none."""
    if not values:
        raise ValueError("no values")
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness(collector: RecordCollector, weights: Mapping[str, float]) -> Fairness:
    """Return how evenly the tenants were served; weights of tenants without one are 1."""
    indices: list[float] = []
    worst, pair = 0.0, None
    for priority in Priority:
        courses = _courses(collector, priority, weights)
        indices += _windows(courses)
        for left, right in combinations(courses, 2):
            difference = _difference(left, right)
            if difference > worst:
                worst, pair = difference, (left.tenant, right.tenant)
    mean = sum(indices) / len(indices) if indices else None
    return Fairness(len(indices), mean, min(indices, default=None), worst, pair)


def _courses(collector: RecordCollector, priority: Priority, weights: Mapping[str, float]) -> list[_Course]:
    """Return the courses of the tenants with the most requests of a class, over bins of one width."""

    def busiest(key: GroupKey) -> tuple[int, str]:
        return -sum(collector.groups[key].outcomes.values()), key[0]

    keys = [key for key in collector.groups if key[1] is priority and key[0] != OTHERS]
    groups = [(key[0], collector.groups[key]) for key in sorted(keys, key=busiest)[:MAX_TENANTS]]
    if not groups:
        return []
    width_s = max(max(group.service.width_s, group.waiting.width_s) for _, group in groups)
    length = int(collector.last_s / width_s) + 1
    courses = []
    for tenant, group in groups:
        weight = weights.get(tenant, 1.0)
        service = _padded(group.service.widened(width_s), length)
        waited = [waiting >= width_s for waiting in _padded(group.waiting.widened(width_s), length)]
        courses.append(_Course(tenant, [amount / weight for amount in service], waited))
    return courses


def _windows(courses: Sequence[_Course]) -> list[float]:
    length = len(courses[0].service) if courses else 0
    found = []
    for start in range(0, length - WINDOW_BINS + 1, WINDOW_BINS):
        window = slice(start, start + WINDOW_BINS)
        served = [sum(course.service[window]) for course in courses if all(course.waited[window])]
        if len(served) >= 2:
            found.append(jain(served))
    return found


def _difference(left: _Course, right: _Course) -> float:
    """Return the largest |W_left - W_right| over any interval in which both waited throughout."""
    worst = 0.0
    ahead = least = most = 0.0
    for index, both in enumerate(zip(left.waited, right.waited, strict=True)):
        if not all(both):
            ahead = least = most = 0.0
            continue
        ahead += left.service[index] - right.service[index]
        least, most = min(least, ahead), max(most, ahead)
        worst = max(worst, most - least)
    return worst


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values[:length], *([0.0] * (length - len(values)))]


MAX_SAMPLES: Final = 480


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker. What is not a level counts since its engine started: a smaller value is a new engine.

    ``busy_s`` are seconds inside steps, ``kv_ratio`` is the share of KV blocks that is reserved.
    """

    name: str
    prefill_tokens: int
    decode_tokens: int
    busy_s: float
    running: int
    waiting: int
    kv_ratio: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet. ``waiting`` are placements in the leader's queue; ``pressure_ratio`` is the leader's."""

    at_s: float
    waiting: int
    pressure_ratio: float
    workers: tuple[WorkerSample, ...]


@dataclass(slots=True)
class _Totals:
    """Sums over engine lives."""

    tokens: int = 0
    busy_s: float = 0.0
    last_tokens: int = 0
    last_busy_s: float = 0.0

    def take(self, worker: WorkerSample) -> float:
        """Add what happened since the sample before; return the seconds that it was busy."""
        tokens = worker.prefill_tokens + worker.decode_tokens
        began_anew = tokens < self.last_tokens or worker.busy_s < self.last_busy_s
        busy_s = worker.busy_s - (0.0 if began_anew else self.last_busy_s)
        self.tokens += tokens - (0 if began_anew else self.last_tokens)
        self.busy_s += busy_s
        self.last_tokens, self.last_busy_s = tokens, worker.busy_s
        return busy_s


class Timeline:
    """Keeps samples: all while they are few, then every second, every fourth, and so on.

    ``names`` of more than 32 workers are not kept over time: a long run on a thousand workers stays small.
    """

    KEPT_WORKERS: Final = 32

    def __init__(self) -> None:
        self.points: list[tuple[float, int, float, float]] = []  # at_s, waiting, pressure, KV reserved
        self.busy: dict[str, list[tuple[float, float]]] = {}  # at_s, utilisation since the point before
        self.totals: dict[str, _Totals] = {}
        self.first_s: float | None = None
        self.last_s = 0.0
        self._stride = 1
        self._seen = 0
        self._busy_since: dict[str, float] = {}
        self._kept_s = 0.0

    def add(self, sample: Sample) -> None:
        """Take one more sample; they come in order of time."""
        if self.first_s is None:
            self.first_s = self._kept_s = sample.at_s
        self.last_s = sample.at_s
        for worker in sample.workers:
            busy_s = self.totals.setdefault(worker.name, _Totals()).take(worker)
            self._busy_since[worker.name] = self._busy_since.get(worker.name, 0.0) + busy_s
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        self._keep(sample)
        if len(self.points) >= MAX_SAMPLES:
            self.points = self.points[::2]
            self.busy = {name: _halved(points) for name, points in self.busy.items()}
            self._stride *= 2

    def utilisation(self, name: str) -> float:
        """Return the share of the sampled time that the worker spent inside steps."""
        lasted_s = self.last_s - (self.first_s or 0.0)
        return min(1.0, self.totals[name].busy_s / lasted_s) if lasted_s > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Return each worker's part of all tokens that were computed."""
        whole = sum(totals.tokens for totals in self.totals.values())
        return {name: totals.tokens / whole if whole else 0.0 for name, totals in self.totals.items()}

    def _keep(self, sample: Sample) -> None:
        kv_ratio = sum(worker.kv_ratio for worker in sample.workers) / max(1, len(sample.workers))
        self.points.append((sample.at_s, sample.waiting, sample.pressure_ratio, kv_ratio))
        lasted_s = sample.at_s - self._kept_s
        if lasted_s > 0:
            for worker in sample.workers[: self.KEPT_WORKERS]:
                ratio = min(1.0, self._busy_since[worker.name] / lasted_s)
                self.busy.setdefault(worker.name, []).append((sample.at_s, ratio))
        self._busy_since.clear()
        self._kept_s = sample.at_s


def _halved(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge neighbours: the mean of both at the later one's instant."""
    return [
        (points[index + 1][0], (points[index][1] + points[index + 1][1]) / 2)
        for index in range(0, len(points) - 1, 2)
    ]


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
    seconds: tuple[Second, ...] = ()

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
