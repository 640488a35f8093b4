"""Metrics of one process: an object that is passed as an argument, read by Prometheus over HTTP.

Only the event loop writes, so a count is an addition without a lock. Code on a hot path gets its cell once
(``counter.cell("stop")``) and adds to that. Levels are read from their owners at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

Labels = tuple[str, ...]
Reading = Iterable[tuple[Labels, float]]

# Upper bounds in seconds: of a request and its stages, of gaps between tokens, of one step or decision.
LATENCY_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0,
)  # fmt: skip
GAP_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
SHORT_S: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

OTHER: Final = "other"
MAX_CHILDREN: Final = 20_000
_MAX_CATEGORIES: Final = 200


class LabelCap:
    """Bounds a label of values that operators create: after the first ``limit`` all are "other"."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def of(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value


class CounterCell:
    """One child of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class HistogramCell:
    """One child of a histogram. ``observe`` costs a binary search and three additions.

    Each bucket has the last exemplar that came with a value: labels that lead to the request or trace, with
    their names at most 128 characters, and its Unix time. Only OpenMetrics has a form for them.
    """

    __slots__ = ("_bounds", "_exemplars", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._exemplars: dict[int, tuple[Mapping[str, str], float, float]] = {}
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def observe_as(self, value: float, exemplar: Mapping[str, str], unix_s: float, times: int = 1) -> None:
        """As ``observe``, of the request that the exemplar names."""
        at = bisect_left(self._bounds, value)
        self.counts[at] += times
        self.total += value * times
        self._exemplars[at] = exemplar, value, unix_s

    def exemplar(self, at: int) -> tuple[Exemplar] | tuple[()]:
        """Return the exemplar of a bucket, if it has one."""
        found = self._exemplars.get(at)
        return () if found is None else (Exemplar(dict(found[0]), found[1], found[2]),)


class Counter:
    """A monotonic counter. Its name ends in ``_total``."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._cells: dict[Labels, CounterCell] = {}

    def cell(self, *values: str) -> CounterCell:
        """Return the child of these label values. Store it where it is used often."""
        found = self._cells.get(values)
        if found is None:
            key = _bounded(values, self._cells, self._labels)
            found = self._cells.setdefault(key, CounterCell())
        return found

    def add(self, *values: str, amount: float = 1.0) -> None:
        self.cell(*values).value += amount

    def collect(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, cell in self._cells.items():
            family.add_metric(values, cell.value)
        return family


class Histogram:
    """Counts values by upper bound."""

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._cells: dict[Labels, HistogramCell] = {}

    def cell(self, *values: str) -> HistogramCell:
        """Return the child of these label values. Store it where it is used often."""
        found = self._cells.get(values)
        if found is None:
            key = _bounded(values, self._cells, self._labels)
            found = self._cells.setdefault(key, HistogramCell(self._bounds))
        return found

    def observe(self, value: float, *values: str) -> None:
        self.cell(*values).observe(value)

    def collect(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, cell in self._cells.items():
            sums = zip(names, accumulate(cell.counts), strict=True)
            buckets = [(*found, *cell.exemplar(at)) for at, found in enumerate(sums)]
            family.add_metric(values, buckets, cell.total)
        return family


class _Read:
    """A level, or a count that its owner stores, read at each scrape."""

    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        head: tuple[str, str, Labels],
        read: Callable[[], Reading],
    ) -> None:
        self._family = family
        self._head = head
        self._read = read

    def collect(self) -> Metric:
        name, text, labels = self._head
        family = self._family(name, text, labels=labels)
        for values, value in self._read():
            assert len(values) == len(labels), f"{name} has the labels {labels}"
            family.add_metric(values, value)
        return family


class Metrics(Collector):
    """The metrics of one process. ``registry`` is what Prometheus reads; read it on the event loop.

    ``tenants``, ``models``, ``versions`` and ``categories`` bound labels; operators create what they name.
    """

    def __init__(self, *, max_tenants: int = 1000, max_models: int = 200, max_versions: int = 400) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.tenants = LabelCap(max_tenants)
        self.models = LabelCap(max_models)
        self.versions = LabelCap(max_versions)
        self.categories = LabelCap(_MAX_CATEGORIES)
        self._instruments: dict[str, Counter | Histogram | _Read] = {}

    def process(self) -> None:
        """Also export CPU, memory and files of the process."""
        ProcessCollector(namespace="fairway", registry=self.registry)

    def counter(self, name: str, text: str, labels: Labels = ()) -> Counter:
        assert name.endswith("_total"), name
        counter = Counter(name, text, labels)
        self._add(name, counter)
        return counter

    def histogram(
        self, name: str, text: str, labels: Labels = (), *, bounds: Sequence[float] = LATENCY_S
    ) -> Histogram:
        histogram = Histogram(name, text, labels, bounds)
        self._add(name, histogram)
        return histogram

    def gauge(self, name: str, text: str, read: Callable[[], Reading], labels: Labels = ()) -> None:
        """Export a level; ``read`` returns its current value by label values."""
        self._add(name, _Read(GaugeMetricFamily, (name, text, labels), read))

    def level(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Export a level without labels."""
        self.gauge(name, text, lambda: (((), read()),))

    def counted(self, name: str, text: str, read: Callable[[], Reading], labels: Labels = ()) -> None:
        """Export a count that its owner stores."""
        assert name.endswith("_total"), name
        self._add(name, _Read(CounterMetricFamily, (name, text, labels), read))

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments.values():
            yield instrument.collect()

    def _add(self, name: str, instrument: Counter | Histogram | _Read) -> None:
        assert name.startswith("fairway_"), name
        assert name not in self._instruments, f"{name} is there already"
        self._instruments[name] = instrument


def _bounded(values: Labels, cells: Mapping[Labels, object], labels: Labels) -> Labels:
    """Return the label values of a new child; with too many children, those of the shared "other" child."""
    assert len(values) == len(labels), f"expected the labels {labels}"
    return values if len(cells) < MAX_CHILDREN else (OTHER,) * len(labels)
