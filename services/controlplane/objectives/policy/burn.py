"""Error budgets and how fast they are spent. Pure.

Multi-window, multi-burn-rate alerts (Google: The Site Reliability Workbook, chapter 5): an alert needs both
windows, so that it is fast and also ends soon after the cause has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from services.controlplane.policy.events import FleetEvent
from services.core.arms import SliSums
from services.core.records import BurnAlert, EventKind, Objective, ObjectiveStatus, Sli, SliStatus

MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
WINDOWS_S: Final = (300.0, 1800.0, HOUR_S, 6 * HOUR_S, 3 * DAY_S)
BUDGET_S: Final = 28 * DAY_S
MIN_EVENTS: Final = 20  # events in the long window before an alert is possible
# The most urgent first: how many times the allowed rate, over which windows.
ALERTS: Final = (
    (BurnAlert.ACUTE, 14.4, HOUR_S, 300.0),
    (BurnAlert.FAST, 6.0, 6 * HOUR_S, 1800.0),
    (BurnAlert.SLOW, 1.0, 3 * DAY_S, 6 * HOUR_S),
)
# The indicators that more replicas can mend; a stream that breaks is not one.
_OF_REPLICAS: Final = (Sli.AVAILABILITY, Sli.TTFT, Sli.ITL, Sli.TOTAL)
# Length of a bin and how many are kept: windows up to six hours, up to three days, the budget.
RINGS: Final = ((MINUTE_S, 361), (0.5 * HOUR_S, 145), (6 * HOUR_S, 113))
_SLIS: Final = tuple(Sli)
_WINDOWS: Final = {alert: (rate, long_s, short_s) for alert, rate, long_s, short_s in ALERTS}


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Events of one indicator, and the bad ones among them."""

    events: int = 0
    bad: int = 0

    def __add__(self, other: EventCounts) -> EventCounts:
        return EventCounts(self.events + other.events, self.bad + other.bad)

    @property
    def bad_ratio(self) -> float:
        return self.bad / self.events if self.events else 0.0


Counted = Mapping[Sli, EventCounts]


def counted(sums: SliSums, objective: Objective) -> dict[Sli, EventCounts]:
    """Return the events of each promised indicator. Latencies are within 2 % of the target at the edge."""
    found = {}
    if objective.availability:
        found[Sli.AVAILABILITY] = EventCounts(sums.requests, sums.errors)
    if objective.completion:
        found[Sli.COMPLETION] = EventCounts(sums.started, sums.broken)
    if objective.ttft.seconds:
        sketches = tuple(sums.ttft.values())
        slow = sum(one.above_value(objective.ttft.seconds) for one in sketches)
        found[Sli.TTFT] = EventCounts(round(sum(one.count for one in sketches)), round(slow))
    for sli, target, sketch in (
        (Sli.ITL, objective.itl, sums.itl),
        (Sli.TOTAL, objective.total, sums.total),
    ):
        if target.seconds:
            slow = sketch.above_value(target.seconds)
            found[sli] = EventCounts(round(sketch.count), round(slow))
    return found


def allowed_ratio(objective: Objective, sli: Sli) -> float:
    """Return the share of bad events that the objective allows; 0 where it promises nothing."""
    promised = {
        Sli.AVAILABILITY: objective.availability,
        Sli.COMPLETION: objective.completion,
        Sli.TTFT: objective.ttft.quantile if objective.ttft.seconds else 0.0,
        Sli.ITL: objective.itl.quantile if objective.itl.seconds else 0.0,
        Sli.TOTAL: objective.total.quantile if objective.total.seconds else 0.0,
    }[sli]
    return 1.0 - promised if promised else 0.0


@dataclass(slots=True)
class BurnRings:
    """Events by time, in bins of each length of ``RINGS``. Bins are numbered by Unix time."""

    rings: list[dict[int, dict[Sli, EventCounts]]] = field(default_factory=lambda: [{} for _ in RINGS])

    def add(self, counts: Counted, unix_s: float) -> None:
        """Count events of a moment; bins that are too old are forgotten."""
        for ring, (bin_s, kept) in zip(self.rings, RINGS, strict=True):
            number = int(unix_s // bin_s)
            found = ring.setdefault(number, {})
            for sli, more in counts.items():
                found[sli] = found.get(sli, EventCounts()) + more
            while len(ring) > kept:
                del ring[min(ring)]

    def over(self, sli: Sli, window_s: float, unix_s: float) -> EventCounts:
        """Return the events of the window that ends now, to the length of a bin."""
        place = next(at for at, (bin_s, kept) in enumerate(RINGS) if window_s <= bin_s * (kept - 1))
        bin_s = RINGS[place][0]
        first, last = int((unix_s - window_s) // bin_s) + 1, int(unix_s // bin_s)
        found = EventCounts()
        for number, counts in self.rings[place].items():
            if first <= number <= last:
                found += counts.get(sli, EventCounts())
        return found

    def since(self, sli: Sli, window_s: float, since_unix_s: float, unix_s: float) -> EventCounts:
        """Return the events of the window, without those before the minute of ``since_unix_s``."""
        began_s = since_unix_s // MINUTE_S * MINUTE_S
        # A bin counts if the window reaches beyond its begin.
        return self.over(sli, min(window_s, unix_s - began_s + 1e-3), unix_s)

    def forget(self, unix_s: float) -> bool:
        """Drop what is older than the rings reach. Returns whether nothing is left."""
        for ring, (bin_s, kept) in zip(self.rings, RINGS, strict=True):
            oldest = int(unix_s // bin_s) - kept
            for number in [one for one in ring if one <= oldest]:
                del ring[number]
        return not any(self.rings)


Over = Callable[[Sli, float], EventCounts]


def status_of(objective: Objective, over: Over) -> tuple[SliStatus, ...]:
    """Return the budget, burn rates and alert of each promised indicator. ``over``: events of a window."""
    found = []
    for sli in _SLIS:
        allowed = allowed_ratio(objective, sli)
        if not allowed:
            continue
        month = over(sli, BUDGET_S)
        spent_ratio = month.bad_ratio / allowed
        found.append(
            SliStatus(
                sli=sli,
                budget_left_ratio=round(1.0 - spent_ratio, 4),
                events=month.events,
                bad_events=month.bad,
                alert=alert_of(objective, sli, over),
                burn_rates=tuple(round(over(sli, one).bad_ratio / allowed, 3) for one in WINDOWS_S),
            )
        )
    return tuple(found)


def alert_of(objective: Objective, sli: Sli, over: Over) -> BurnAlert:
    """Return the most urgent alert whose both windows burn that fast."""
    allowed = allowed_ratio(objective, sli)
    for alert, rate, long_s, short_s in ALERTS if allowed else ():
        long, short = over(sli, long_s), over(sli, short_s)
        if long.events >= MIN_EVENTS and min(long.bad_ratio, short.bad_ratio) >= rate * allowed:
            return alert
    return BurnAlert.NONE


def burn_of(objective: Objective, over: Over) -> float:
    """Return how many times too fast the budget is spent that more replicas may save, over both windows of
    the most urgent alert; 0 before ``MIN_EVENTS``."""
    _, long_s, short_s = _WINDOWS[BurnAlert.ACUTE]
    found = 0.0
    for sli in _OF_REPLICAS:
        allowed = allowed_ratio(objective, sli)
        if allowed and (long := over(sli, long_s)).events >= MIN_EVENTS:
            found = max(found, min(long.bad_ratio, over(sli, short_s).bad_ratio) / allowed)
    return found


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
