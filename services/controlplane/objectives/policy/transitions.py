"""The events of an objective: an alert that begins, changes or ends. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from services.controlplane.objectives.policy.burn import ALERTS, HOUR_S, MINUTE_S
from services.controlplane.policy.events import FleetEvent
from services.core.records import BurnAlert, EventKind, Objective, ObjectiveStatus, SliStatus

_WINDOWS: Final = {alert: (rate, long_s, short_s) for alert, rate, long_s, short_s in ALERTS}


def transitions(
    objective: Objective, before: ObjectiveStatus | None, after: ObjectiveStatus
) -> tuple[FleetEvent, ...]:
    """Return one event for each indicator whose alert differs."""
    return tuple(_events(objective, before, after))


def _events(
    objective: Objective, before: ObjectiveStatus | None, after: ObjectiveStatus
) -> Iterator[FleetEvent]:
    name = objective.meta.name
    for one in after.slis:
        was = before.alert_of(one.sli) if before is not None else BurnAlert.NONE
        if one.alert is was:
            continue
        if one.alert is BurnAlert.NONE:
            reason = f"{one.sli.name}_BURN_ENDED"
            yield FleetEvent(EventKind.OBJECTIVE, name, reason, f"{_of(objective)}: {_budget(one)}")
            continue
        rate, long_s, short_s = _WINDOWS[one.alert]
        message = (
            f"{_of(objective)}: the budget of {one.sli} is spent at {rate:g} times the allowed rate or more "
            f"over {_time(long_s)} and over {_time(short_s)}; {_budget(one)}"
        )
        reason = f"{one.sli.name}_BURN_{one.alert.name}"
        yield FleetEvent(EventKind.OBJECTIVE, name, reason, message, warning=True)


def _of(objective: Objective) -> str:
    return f"{objective.priority} requests of {objective.model}"


def _budget(one: SliStatus) -> str:
    return f"{one.budget_left_ratio:.1%} of it is left"


def _time(seconds: float) -> str:
    return f"{seconds / HOUR_S:g} h" if seconds >= HOUR_S else f"{seconds / MINUTE_S:g} min"
