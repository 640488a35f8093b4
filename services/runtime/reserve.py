"""The part of a store that the bytes of tenants leave free, so that what keeps it alive can still be written.

Logs of Redis and etcd, settlements, usage events, the ledger and leases may use it. Writers of what tenants
and operators add ask first; deletions ask nobody. Each process measures for itself, so several that write at
once can pass the mark by what they write between two measurements.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from services.core.errors import StorageFull
from services.ports.clock import Clock

MEASURED_S: Final = 0.1
RESERVE_RATIO: Final = 0.2  # the part of Redis's memory and of etcd's quota
_RETRY_S: Final = 10.0


class Reserve:
    """Room in one store. Threads may share it. Until a first measurement it refuses nothing."""

    def __init__(
        self,
        store: str,
        mend: str,
        clock: Clock,
        *,
        reserve_bytes: int = 0,
        measure: Callable[[], int] | None = None,
    ) -> None:
        """``store`` names it in errors and metrics, ``mend`` is what an operator does. ``measure`` returns
        the free bytes, for a store that a blocking call can measure; others call ``measured``."""
        self.store = store
        self._mend = mend
        self._clock = clock
        self._reserve_bytes = reserve_bytes
        self._measure = measure
        self._lock = threading.Lock()
        self._free: float = math.inf
        self._held = 0  # bytes whose write has begun
        self._next_s = clock.monotonic_s()
        self._refused_s = -math.inf

    @property
    def free_bytes(self) -> float:
        """Free at the last measurement, less what was written since; infinite where nothing limits it."""
        return self._free

    @property
    def reached(self) -> bool:
        """Too little is free, or was a moment ago for what was to be written."""
        refused = self._clock.monotonic_s() - self._refused_s < _RETRY_S
        return refused or self._free - self._held < self._reserve_bytes

    def problem(self) -> str:
        """Return what is full and what to do; empty while there is room."""
        return self._text() if self.reached else ""

    def measured(self, free_bytes: float, reserve_bytes: int) -> None:
        with self._lock:
            self._free, self._reserve_bytes = free_bytes, reserve_bytes

    def wrote(self, size_bytes: int) -> None:
        """Count bytes that were written since the last measurement."""
        with self._lock:
            self._free -= size_bytes

    def refusal(self) -> StorageFull:
        return StorageFull(
            self._text(),
            retry_after_s=_RETRY_S,
            store=self.store,
            reserve_bytes=self._reserve_bytes,
        )

    def look(self) -> None:
        """Measure, unless that was done a moment ago. Blocks; raises OSError."""
        if self._measure is None:
            return
        with self._lock:
            if self._clock.monotonic_s() >= self._next_s:
                self._free = self._measure()
                self._next_s = self._clock.monotonic_s() + MEASURED_S

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        """Hold room for bytes that are written inside. Blocks; raises StorageFull, OSError."""
        self.look()
        with self._lock:
            refused = self._free - self._held - size_bytes < self._reserve_bytes
            self._held += 0 if refused else size_bytes
        if refused:
            self._refused_s = self._clock.monotonic_s()
            raise self.refusal()
        try:
            yield
        finally:
            with self._lock:
                self._held -= size_bytes
                self._free -= size_bytes

    def _text(self) -> str:
        free, kept = max(0, int(self._free)), self._reserve_bytes
        return f"no room in {self.store}: {free} bytes are free, {kept} are kept in reserve; {self._mend}"
