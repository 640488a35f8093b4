"""How evenly tenants that waited at the same time were served, from service and waiting over time.

A tenant counts as waiting in a bin when it had one request in the queue on average or more. Only tenants
of one class are compared, as the scheduler's fairness holds within a class. Service is in weighted tokens
over the tenant's weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from services.core.records import Priority
from simulator.lab.report.measure import OTHERS, GroupKey, RecordCollector

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
