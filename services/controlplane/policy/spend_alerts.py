"""Which thresholds of a budget were passed: one event for each threshold and period. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from services.controlplane.policy.events import FleetEvent
from services.core.limits import MICROS
from services.core.records import Budget, BudgetAlert, EventKind

THRESHOLDS: Final = (50, 80, 100)  # percent of the limit


def spend_alerts(
    budget: Budget, last: BudgetAlert, *, spent_micros: int, day_spent_micros: int, unix_s: float
) -> tuple[BudgetAlert, tuple[FleetEvent, ...]]:
    """Return the thresholds reported from now on, and the events of those that are newly passed.

    ``last`` is what was reported; a new period begins without reported thresholds.
    """
    now = datetime.fromtimestamp(unix_s, UTC)
    month, day = f"{now:%Y-%m}", f"{now:%Y-%m-%d}"
    month_percent = last.month_percent if last.month == month else 0
    day_percent = last.day_percent if last.day == day else 0
    in_month = _passed(spent_micros, budget.limit_micros, month_percent)
    on_day = _passed(day_spent_micros, budget.day_limit_micros, day_percent)
    events = (
        *_events(budget, "BUDGET_SPENT", in_month, spent_micros, budget.limit_micros, f"in {month}"),
        *_events(budget, "BUDGET_DAY_SPENT", on_day, day_spent_micros, budget.day_limit_micros, f"on {day}"),
    )
    after = BudgetAlert(month, max((month_percent, *in_month)), day, max((day_percent, *on_day)))
    return after, events


def _passed(spent: int, limit: int, reported_percent: int) -> tuple[int, ...]:
    return tuple(
        percent
        for percent in THRESHOLDS
        if limit and percent > reported_percent and spent * 100 >= limit * percent
    )


def _events(
    budget: Budget, reason: str, passed: tuple[int, ...], spent: int, limit: int, when: str
) -> Iterator[FleetEvent]:
    for percent in passed:
        message = (
            f"{percent} % spent {when}: {spent / MICROS:.2f} of {limit / MICROS:.2f} {budget.currency}, "
            f"tenant {budget.tenant}"
        )
        name = budget.meta.name
        yield FleetEvent(EventKind.BUDGET, name, f"{reason}_{percent}", message, warning=True)
