"""What requests of each class met, by the second in which they were sent, and the replicas of that second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from services.core.records import Priority
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.fleet import SimFleet
from simulator.fleet.spec import VERSION_DIGEST

_CLASSES: Final = tuple(sorted(Priority, key=lambda one: -one.rank))
_BEFORE_S: Final = 5
_AFTER_S: Final = 30
_LATER_S: Final = 10  # width of the rows that follow


@dataclass(frozen=True, slots=True)
class ClassSecond:
    """Requests of a class that were sent in a span: all, those that did not finish, the first tokens."""

    priority: str
    sent: int
    failed: int
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Second:
    """A span from ``at_s`` after the instant of interest; the replicas are those at its start."""

    at_s: int
    ready: int
    wanted: int
    classes: tuple[ClassSecond, ...]


@dataclass(slots=True)
class SecondsCollector:
    """A plan of a run that also receives its records. ``at_s``: the instant of interest after the start."""

    at_s: float
    _origin_s: float = 0.0
    _replicas: list[tuple[int, int]] = field(default_factory=list)
    _records: dict[int, list[RequestRecord]] = field(default_factory=dict)

    async def run(self, fleet: SimFleet) -> None:
        """Sample the replicas each second until cancelled."""
        self._origin_s = fleet.load_began_s
        while True:
            term = fleet.term
            found = {} if term is None else term.fleet.candidates(VERSION_DIGEST)
            ready = sum(one.serving for one in found.values())
            self._replicas.append((ready, fleet.scaled.replicas))
            await fleet.wait(1.0)

    def take(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self._records.setdefault(int(record.sent_s - self._origin_s), []).append(record)

    def rows(self) -> Iterator[Second]:
        """Yield a row for each second around the instant, and wider ones until the end of the load."""
        first, last = int(self.at_s) - _BEFORE_S, max(self._records, default=0)
        second = max(0, first)
        while second <= last:
            width = 1 if second < int(self.at_s) + _AFTER_S else _LATER_S
            sent = [one for at in range(second, second + width) for one in self._records.get(at, ())]
            ready, wanted = self._replicas[min(second, len(self._replicas) - 1)]
            classes = tuple(_class(priority, sent) for priority in _CLASSES)
            yield Second(second - int(self.at_s), ready, wanted, classes)
            second += width


def _class(priority: Priority, sent: list[RequestRecord]) -> ClassSecond:
    mine = [one for one in sent if one.request.priority is priority]
    ttfts = sorted(one.ttft_s for one in mine if one.ttft_s is not None)
    p95_s = ttfts[math.ceil(0.95 * len(ttfts)) - 1] if ttfts else None
    return ClassSecond(priority.value, len(mine), sum(not one.finished for one in mine), p95_s)
