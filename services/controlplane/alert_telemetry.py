"""Levels of the alerts, so that a pager receives them: how fast objectives burn, what budgets have spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from services.core.records import BurnAlert, Objective, SliStatus
from services.runtime.telemetry.metrics import LabelCap, Labels, Metrics, Reading

MAX_NAMES: Final = 500  # objectives, and budgets; of further ones the highest level shares "other"
_LEVELS: Final = {BurnAlert.NONE: 0, BurnAlert.SLOW: 1, BurnAlert.FAST: 2, BurnAlert.ACUTE: 3}


class AlertTelemetry:
    """Exports what the leader checked last. Nothing is exported while this process does not lead."""

    def __init__(self, metrics: Metrics | None = None, *, leads: Callable[[], bool] = lambda: True) -> None:
        metrics = metrics if metrics is not None else Metrics()
        self._leads = leads
        self._burns: dict[Labels, float] = {}
        self._spent: dict[Labels, float] = {}
        metrics.gauge(
            "fairway_objective_burn_level",
            "Burn alert of an objective's indicator: 0 none, 1 slow, 2 fast, 3 acute; only from the leader",
            lambda: self._read(self._burns),
            ("objective", "sli"),
        )
        metrics.gauge(
            "fairway_budget_spent_ratio",
            "Spent of a budget's limit, of the month and of the day; only from the leader",
            lambda: self._read(self._spent),
            ("budget", "period"),
        )

    def burns(self, found: Iterable[tuple[Objective, Iterable[SliStatus]]]) -> None:
        """Replace the levels of all objectives."""
        levels: dict[Labels, float] = {}
        names = LabelCap(MAX_NAMES)
        for objective, slis in found:
            name = names.of(objective.meta.name)
            for one in slis:
                _raise_to(levels, (name, one.sli.value), _LEVELS[one.alert])
        self._burns = levels

    def spent(self, found: Iterable[tuple[str, str, int | None, int]]) -> None:
        """Replace the levels of all budgets: name, period, spent (None: unknown) and limit (0: none)."""
        ratios: dict[Labels, float] = {}
        names = LabelCap(MAX_NAMES)
        for name, period, spent_micros, limit_micros in found:
            if limit_micros and spent_micros is not None:
                _raise_to(ratios, (names.of(name), period), spent_micros / limit_micros)
        self._spent = ratios

    def _read(self, levels: dict[Labels, float]) -> Reading:
        return tuple(levels.items()) if self._leads() else ()


def _raise_to(levels: dict[Labels, float], labels: Labels, level: float) -> None:
    levels[labels] = max(level, levels.get(labels, 0.0))
