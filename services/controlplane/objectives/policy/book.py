"""The sums of all gateways' reports, and how a report changes them. Pure.

A source numbers its reports; a number counts once. The sums and the sources' last numbers are stored and
loaded together, so that a report is either in both or in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from services.controlplane.objectives.policy.burn import BurnRings, counted
from services.core.arms import ArmKey, ArmWindow, GateWindow, SliKey, SliReport, SliSums
from services.core.estimates.traffic_shapes import TrafficShapes
from services.core.records import Objective, Priority

INTERVAL_S: Final = 600.0
INTERVALS: Final = 7  # intervals of series: the last hour, which begins within an interval
SERIES_S: Final = (INTERVALS - 1) * INTERVAL_S
MAX_SERIES: Final = 5_000  # most series of an interval; further tenants share one
MAX_BURNS: Final = 2_000
MAX_STEPS: Final = 4  # most steps of a model
MAX_WINDOWS: Final = 256
MAX_SHAPED: Final = 256  # models with shapes of traffic
# Part of their weight that shapes keep from one interval to the next: half of it after 4 hours.
SHAPES_KEPT: Final = 0.97
SOURCE_S: Final = 3600.0  # a source that was silent for so long has nothing left to send again
REPORT_S: Final = 2.0  # the time between two reports of a gateway
OTHER: Final = "(other)"
_LATE_S: Final = 900.0

ObjectivesByClass = Mapping[tuple[str, Priority], Objective]


@dataclass(frozen=True, slots=True)
class SliSource:
    """``last``: number of its last report that is counted."""

    last: int
    seen_s: float


@dataclass(frozen=True, slots=True)
class BurnKey:
    """``version_digest`` is empty for requests that were refused before they had a version."""

    arm: ArmKey
    priority: Priority


@dataclass(slots=True)
class StepSums:
    """The arms of a step by version digest and cluster. ``began_s`` is its first report's time, ``seen_s``
    its last one's.
    """

    arms: dict[str, dict[int, SliSums]] = field(default_factory=dict)
    seen_s: float = 0.0
    began_s: float = 0.0


@dataclass(slots=True)
class SliBook:
    """``number`` is the number of the snapshot that it was loaded from or stored in last."""

    number: int = 0
    sources: dict[str, SliSource] = field(default_factory=dict)
    intervals: dict[int, dict[SliKey, SliSums]] = field(default_factory=dict)
    burns: dict[BurnKey, BurnRings] = field(default_factory=dict)
    steps: dict[GateWindow, StepSums] = field(default_factory=dict)
    shapes: dict[str, TrafficShapes] = field(default_factory=dict)
    # Up to which interval the shapes have lost weight.
    shapes_number: int = 0

    def last_of(self, source: str) -> int:
        found = self.sources.get(source)
        return found.last if found is not None else 0

    def apply(
        self,
        source: str,
        first: int,
        oldest: int,
        reports: Sequence[SliReport],
        objectives: ObjectivesByClass,
        *,
        now_s: float,
    ) -> int:
        """Count the reports that are new. Returns the last counted number of the source.

        Nothing is counted while reports before ``first`` are missing that the source still has.
        """
        last = self.last_of(source)
        if first > max(last + 1, oldest):
            return last
        for number, report in enumerate(reports, start=first):
            if number > last:
                self._add(report, objectives, now_s)
                last = number
        last = max(last, first - 1)
        self.sources[source] = SliSource(last, now_s)
        return last

    def forget(self, now_s: float) -> None:
        """Drop what is too old."""
        self.sources = {name: one for name, one in self.sources.items() if one.seen_s > now_s - SOURCE_S}
        oldest = int(now_s // INTERVAL_S) - INTERVALS
        self.intervals = {number: one for number, one in self.intervals.items() if number > oldest}
        self.burns = {key: one for key, one in self.burns.items() if not one.forget(now_s)}
        self._age_shapes(int(now_s // INTERVAL_S))

    def arms_of(self, window: GateWindow) -> dict[str, ArmWindow]:
        """Return the arms of a step, by version digest."""
        found = self.steps.get(window)
        return {} if found is None else {digest: ArmWindow(one) for digest, one in found.arms.items()}

    def lasted_s(self, window: GateWindow) -> float:
        """Return for how long requests of a step ended so far: a first report covers a period too."""
        found = self.steps.get(window)
        return 0.0 if found is None else found.seen_s - found.began_s + REPORT_S

    def series(self, window_s: float, now_s: float) -> set[SliKey]:
        """Return the series with requests in the window that ends now; ``SERIES_S`` at most are kept."""
        return {key for interval in self._within(window_s, now_s) for key in interval}

    def sums_of(self, series: SliKey, window_s: float, now_s: float) -> SliSums:
        """Return the sums of one series since the start of the interval in which the window begins."""
        found = SliSums()
        for interval in self._within(window_s, now_s):
            if series in interval:
                found.merge(interval[series])
        return found

    def burns_of(self, model: str, priority: Priority) -> list[BurnRings]:
        """Return the events of a model and class, of every arm."""
        return [
            rings for key, rings in self.burns.items() if key.arm.model == model and key.priority is priority
        ]

    def burns_of_arm(self, arm: ArmKey) -> dict[Priority, BurnRings]:
        """Return the events of one arm by class."""
        return {key.priority: rings for key, rings in self.burns.items() if key.arm == arm}

    def _within(self, window_s: float, now_s: float) -> list[dict[SliKey, SliSums]]:
        first = int((now_s - window_s) // INTERVAL_S)
        return [interval for number, interval in self.intervals.items() if number >= first]

    def _add(self, report: SliReport, objectives: ObjectivesByClass, now_s: float) -> None:
        at_s = min(now_s, max(report.cut_unix_s, now_s - _LATE_S))
        interval = self.intervals.setdefault(int(at_s // INTERVAL_S), {})
        for key, sums in report.series.items():
            kept = key
            if key not in interval and len(interval) >= MAX_SERIES:
                kept = replace(key, tenant=OTHER, zone="")
            interval.setdefault(kept, SliSums()).merge(sums)
            objective = objectives.get((key.arm.model, key.priority))
            if objective is not None:
                self._burn(BurnKey(key.arm, key.priority), sums, objective, at_s)
        for window, arms in report.windows.items():
            self._add_window(window, arms, now_s)
        for model, shapes in report.shapes.items():
            if model in self.shapes or len(self.shapes) < MAX_SHAPED:
                self.shapes.setdefault(model, TrafficShapes()).merge(shapes)

    def _age_shapes(self, number: int) -> None:
        """Let what was recorded in earlier intervals weigh less."""
        passed = number - self.shapes_number if self.shapes_number else 0
        self.shapes_number = number
        if passed > 0:
            for shapes in self.shapes.values():
                shapes.keep(SHAPES_KEPT**passed)
            self.shapes = {model: shapes for model, shapes in self.shapes.items() if len(shapes)}

    def _burn(self, key: BurnKey, sums: SliSums, objective: Objective, at_s: float) -> None:
        if key not in self.burns and len(self.burns) >= MAX_BURNS:
            key = BurnKey(replace(key.arm, version_digest=""), key.priority)
        self.burns.setdefault(key, BurnRings()).add(counted(sums, objective), at_s)

    def _add_window(self, window: GateWindow, arms: Mapping[str, ArmWindow], now_s: float) -> None:
        step = self.steps.get(window)
        if step is None:
            step = self.steps[window] = StepSums(began_s=now_s)
        step.seen_s = now_s
        for digest, arm in arms.items():
            clusters = step.arms.setdefault(digest, {})
            for cluster, sums in arm.clusters.items():
                clusters.setdefault(cluster, SliSums()).merge(sums)
        mine = [one for one in self.steps if one.model == window.model]
        if len(mine) > MAX_STEPS:
            del self.steps[min(mine, key=lambda one: self.steps[one].seen_s)]
        if len(self.steps) > MAX_WINDOWS:
            del self.steps[min(self.steps, key=lambda one: self.steps[one].seen_s)]
