"""The fairness counters that the leader sent, retained for the next leader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.core.fleet import TenantCounter
from services.core.records import Priority

MAX_COUNTERS: Final = 4096


class CounterBook:
    """The latest counter of each tenant. Bounded: the least recently updated one is dropped."""

    def __init__(self, *, most: int = MAX_COUNTERS) -> None:
        self._most = most
        self._counters: dict[tuple[str, str, Priority], TenantCounter] = {}

    def hear(self, counters: Iterable[TenantCounter]) -> None:
        """Store the leader's counters."""
        for counter in counters:
            key = counter.tenant, counter.digest, counter.priority
            self._counters.pop(key, None)
            self._counters[key] = counter
        while len(self._counters) > self._most:
            del self._counters[next(iter(self._counters))]

    def all(self) -> tuple[TenantCounter, ...]:
        return tuple(self._counters.values())
