"""Whether two records of equal conditions differ, figure by figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from statistics import fmean, median
from typing import Any, Final

from bench.store.records import BenchRecord, BenchStore, StoreError, differences, values_of
from bench.store.statistics import LEVEL, MIN_VALUES, Interval, change_of

BUSY_RATIO: Final = 0.5  # runnable processes per core above which a machine is busy with other work
METHOD: Final = (
    "difference of means, bootstrap-t; the intervals of all figures hold together with "
    f"{1 - LEVEL:.0%} (Bonferroni)"
)


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of two records. ``change``, ``low`` and ``high`` are None for too few values."""

    name: str
    a: float  # mean of its values
    b: float
    change: float | None
    low: float | None
    high: float | None
    verdict: str  # better, worse, changed (of a figure without a direction), no difference, too few values
    values: int  # values of the record that has fewer
    of: str  # what a value is: a start's median, or a round


@dataclass(frozen=True, slots=True)
class Comparison:
    a: BenchRecord
    b: BenchRecord
    paired: bool
    figures: tuple[ComparedFigure, ...]
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return it for JSON, which has no infinite numbers: None is also an infinite bound."""
        versions = sorted({*self.a.versions, *self.b.versions})
        return {
            "a": self.a.id,
            "b": self.b.id,
            "suite": self.a.suite,
            "paired": self.paired,
            "method": METHOD,
            "versions": {
                name: [self.a.versions.get(name), self.b.versions.get(name)]
                for name in versions
                if self.a.versions.get(name) != self.b.versions.get(name)
            },
            "figures": [
                {key: None if value in (inf, -inf) else value for key, value in asdict(figure).items()}
                for figure in self.figures
            ],
            "warnings": list(self.warnings),
        }


def compare(a: BenchRecord, b: BenchRecord) -> Comparison:
    """Return what changed from ``a`` to ``b``. Raises StoreError for other conditions and without values."""
    for record in (a, b):
        if not record.runs:
            raise StoreError(
                f"{record.id} has no raw samples: it was written from a published figure",
                "compare records of `fairway bench run --record`",
            )
    if found := differences(a, b):
        listed = "; ".join(f"{name}: {ours} and {theirs}" for name, (ours, theirs) in found.items())
        raise StoreError(
            f"{a.id} and {b.id} were not recorded under equal conditions: {listed}",
            "run the suite again under the conditions of one of them",
        )
    names = [name for name in a.names if name in b.names]
    if not names:
        raise StoreError(f"{a.id} and {b.id} have no figure in common", "compare other records")
    paired = bool(a.session) and a.session == b.session and len(a.runs) == len(b.runs)
    figures = tuple(_figure(name, a, b, paired=paired, level=LEVEL / len(names)) for name in names)
    return Comparison(a, b, paired, figures, tuple(_warnings(a, b, figures)))


def _figure(name: str, a: BenchRecord, b: BenchRecord, *, paired: bool, level: float) -> ComparedFigure:
    runs = values_of(a, name), values_of(b, name)
    # Rounds of one start resemble each other: starts are the values wherever there are enough of them.
    by_start = min(map(len, runs)) >= MIN_VALUES
    ours, theirs = (
        [median(run) for run in each] if by_start else [*chain.from_iterable(each)] for each in runs
    )
    found: Interval | None = None
    verdict = "too few values"
    if min(len(ours), len(theirs)) >= MIN_VALUES:
        pairs = paired and by_start and len(ours) == len(theirs)
        found = change_of(ours, theirs, paired=pairs, level=level)
        verdict = _verdict(found, b.better.get(name))
    return ComparedFigure(
        name=name,
        a=fmean(ours),
        b=fmean(theirs),
        change=found.change if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        verdict=verdict,
        values=min(len(ours), len(theirs)),
        of="starts" if by_start else "rounds",
    )


def _verdict(found: Interval, direction: str | None) -> str:
    if not found.excludes_zero:
        return "no difference"
    if direction is None:
        return "changed"
    return "better" if (found.change > 0) == (direction == "higher") else "worse"


def _warnings(a: BenchRecord, b: BenchRecord, figures: Sequence[ComparedFigure]) -> list[str]:
    found = []
    for record in (a, b):
        cores, load = record.machine.cores or 1, record.load_before
        if load is not None and load > BUSY_RATIO * cores:
            found.append(f"{record.id}: the machine was busy: a load of {load:g} on {cores} cores before it")
        if record.versions.get("fairway", "").endswith("+changes"):
            found.append(f"{record.id}: its files differed from its commit")
    if any(figure.of == "rounds" and figure.change is not None for figure in figures):
        found.append(
            "rounds of one start: what differs between starts is not in these intervals; "
            f"--starts {MIN_VALUES} or more has it"
        )
    return found


def latest_pair(store: BenchStore, suite: str) -> tuple[BenchRecord, BenchRecord]:
    """Return the newest record of a suite, after the one before it of the same conditions."""
    records = [record for record in store.records if record.suite == suite and record.runs]
    for newest in records[-1:]:
        for other in reversed(records[:-1]):
            if not differences(other, newest):
                return other, newest
    raise StoreError(
        f"{suite} has no two records with raw values under the conditions of its newest",
        f"record it twice: `fairway bench run {suite} --record {store.folder}`",
    )
