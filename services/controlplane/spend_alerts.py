"""Spend alerts: the leader compares what was spent with the thresholds of each budget.

An event is written in one commit with the record of the reported threshold, under the leader's fence and only
if the budget is unchanged. So a threshold is reported once in a period, whichever control plane leads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

import structlog

from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import readable
from services.controlplane.leading import repeat_while_leading
from services.controlplane.policy.events import FleetEvent
from services.controlplane.resources.budgets import Budgets, BudgetView
from services.controlplane.telemetry import AlertTelemetry
from services.core.limits import MICROS
from services.core.records import BUDGET_ALERTS, BUDGETS, Budget, BudgetAlert, EventKind, dump
from services.ports.clock import Clock
from services.ports.store import ModRevisionIs, Put, Store
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.idempotent_writes import WriteSet

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


log = structlog.get_logger()
PERIOD_S: Final = 5.0


class SpendAlerts:
    """Runs in every control plane; acts only while it leads."""

    def __init__(
        self,
        store: Store,
        budgets: Budgets,
        leadership: Leadership,
        clock: Clock,
        *,
        events: EventRecorder,
        telemetry: AlertTelemetry | None = None,
    ) -> None:
        self._store = store
        self._budgets = budgets
        self._leadership = leadership
        self._clock = clock
        self._events = events
        self._telemetry = telemetry or AlertTelemetry()

    async def run(self) -> None:
        """Check every ``PERIOD_S`` while leading, until cancelled; survives a store outage."""
        await repeat_while_leading(
            self._leadership, self._clock, self.check, each_s=PERIOD_S, failed="spend_alerts.store_lost"
        )

    async def check(self, epoch: int) -> None:
        """Report the thresholds that were passed since the last check of any leader."""
        listing = await self._store.list(BUDGET_ALERTS)
        stored = {entry.key: entry for entry in listing.entries}
        views = await self._budgets.all()
        self._telemetry.spent(_levels(views))
        for view in views:
            budget = view.stored.record
            key = BUDGET_ALERTS + budget.meta.name
            entry = stored.get(key)
            last = readable(entry, BudgetAlert) if entry is not None else None
            alert, events = spend_alerts(
                budget,
                last or BudgetAlert(),
                spent_micros=view.spent_micros or 0,
                day_spent_micros=view.day_spent_micros or 0,
                unix_s=self._clock.unix_s(),
            )
            if events:
                fence = self._leadership.fence(epoch)
                unchanged = ModRevisionIs(BUDGETS + budget.meta.name, view.stored.mod_revision)
                together = WriteSet((fence, unchanged), (Put(key, dump(alert)),))
                await self._events.record_with(events, listing.revision, together)


def _levels(views: Iterable[BudgetView]) -> Iterator[tuple[str, str, int | None, int]]:
    for view in views:
        budget = view.stored.record
        yield budget.meta.name, "month", view.spent_micros, budget.limit_micros
        yield budget.meta.name, "day", view.day_spent_micros, budget.day_limit_micros
