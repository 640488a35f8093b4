"""Alerts as Alertmanagers take them: which are on, with their labels and what to do next. Pure.

Names and labels are those of deploy/prometheus/fairway.yml, so that an Alertmanager that receives an alert
from here and from Prometheus notifies once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from services.core.records import BurnAlert, Objective, Sli, SliStatus

MAX_ALERTS: Final = 1000  # alerts that are on at once; of further ones none is sent until others end
ENDS_S: Final = 240.0  # an alert that no leader repeats ends after that time
ENDED_S: Final = 900.0  # time for which the end of an alert is repeated
DIAGNOSED: Final = frozenset({Sli.TTFT, Sli.ITL, Sli.TOTAL})
NEARLY_SPENT: Final = 0.8

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PagedAlert:
    """An alert that is on. ``labels`` are its identity, in the order of their names."""

    labels: Labels
    annotations: Mapping[str, str] = field(default_factory=dict, compare=False)


def burn_alert(objective: Objective, status: SliStatus) -> PagedAlert | None:
    """Return the alert of an objective's indicator, None without one."""
    if status.alert is BurnAlert.NONE:
        return None
    name, sli, model = objective.meta.name, status.sli, objective.model
    if status.alert is BurnAlert.SLOW:
        alert, severity = "FairwayObjectiveBurnsSlowly", "ticket"
        summary = f"The {sli} budget of {name} will not last 28 days"
    else:
        alert, severity = "FairwayObjectiveBurnsFast", "page"
        summary = f"The {sli} budget of {name} is spent at 6 times the allowed rate or more"
    command = f"fairway slis --model {model}"
    if sli in DIAGNOSED:
        command = f"fairway diagnose --model {model} --metric {sli} --since 15m"
    return _alert(
        {"alertname": alert, "severity": severity, "objective": name, "sli": sli.value, "model": model},
        summary=summary,
        action="Run the command; a rollout that causes it is rolled back",
        command=command,
        runbook_url="docs/operations/observability.md#alerts",
    )


def spend_alert(budget: str, period: str, spent_ratio: float) -> PagedAlert | None:
    """Return the alert of a budget's period, None without one."""
    if spent_ratio < NEARLY_SPENT:
        return None
    if spent_ratio >= 1:
        alert, severity = "FairwayBudgetSpent", "page"
        summary = f"The budget {budget} is spent for this {period}, and its requests are refused"
    else:
        alert, severity = "FairwayBudgetNearlySpent", "ticket"
        summary = f"Four fifths of the budget {budget} are spent for this {period}"
    return _alert(
        {"alertname": alert, "severity": severity, "budget": budget, "period": period},
        summary=summary,
        action="Run the command; `fairway budgets update` raises the limit",
        command=f"fairway budgets show {budget}",
        runbook_url="docs/operations/limits.md#prices-and-budgets",
    )


def _alert(labels: Mapping[str, str], **annotations: str) -> PagedAlert:
    return PagedAlert(tuple(sorted(labels.items())), annotations)


@dataclass(slots=True)
class AlertBook:
    """The alerts that are on, by who found them, and those that ended lately.

    ``version`` grows with each alert that begins or ends.
    """

    version: int = 0
    _found: dict[str, tuple[PagedAlert, ...]] = field(default_factory=dict)
    _since_s: dict[PagedAlert, float] = field(default_factory=dict)
    # Begin and end of the time in which the end of an alert is repeated.
    _ended: dict[PagedAlert, tuple[float, float]] = field(default_factory=dict)

    def replace(self, source: str, alerts: Iterable[PagedAlert]) -> None:
        """Set the alerts of a source that are on; its others end."""
        before, self._found[source] = self._found.get(source, ()), tuple(alerts)
        self.version += set(before) != set(self._found[source])

    def clear(self) -> None:
        """Forget all without ending them: another leader goes on with them."""
        self._found, self._since_s, self._ended = {}, {}, {}

    def payload(self, unix_s: float) -> list[dict[str, Any]]:
        """Return the body of Alertmanager's POST /api/v2/alerts."""
        self._pass_time(unix_s)
        on = [(one, since_s, unix_s + ENDS_S) for one, since_s in self._since_s.items()]
        ended = [(one, since_s, end_s) for one, (since_s, end_s) in self._ended.items()]
        return [
            {
                "labels": dict(one.labels),
                "annotations": dict(one.annotations),
                "startsAt": _time(since_s),
                "endsAt": _time(end_s),
            }
            for one, since_s, end_s in (*on, *ended)
        ]

    def _pass_time(self, unix_s: float) -> None:
        """Note which alerts began or ended by now."""
        found = list(dict.fromkeys(one for alerts in self._found.values() for one in alerts))[:MAX_ALERTS]
        before, self._since_s = self._since_s, {one: self._since_s.get(one, unix_s) for one in found}
        gone = {one: (since_s, unix_s) for one, since_s in before.items() if one not in self._since_s}
        kept = {
            one: times
            for one, times in {**self._ended, **gone}.items()
            if times[1] > unix_s - ENDED_S and one not in self._since_s
        }
        latest = sorted(kept, key=lambda one: kept[one][1])[-MAX_ALERTS:]
        self._ended = {one: kept[one] for one in latest}


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
