"""What was applied of each worker's reports: deltas count once; prefix blocks are counted for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.core.fleet import ReportSnapshot


class AppliedReports:
    """By worker, for the last ``most`` workers. Single writer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deltas: dict[str, tuple[int, int]] = {}  # incarnation, number of the last deltas applied
        self._prefixes: dict[str, int] = {}

    @property
    def prefixes_by_worker(self) -> Mapping[str, int]:
        """Number of prefix blocks that each worker reported."""
        return self._prefixes

    def without_applied(self, snapshot: ReportSnapshot) -> ReportSnapshot:
        """Return the report without deltas that were applied before: the answer to that report was lost."""
        incarnation, number = self._deltas.get(snapshot.worker_id, (0, 0))
        if incarnation == snapshot.incarnation and 0 < snapshot.deltas_number <= number:
            return replace(snapshot, tenants=(), usage=())
        return snapshot

    def note(self, snapshot: ReportSnapshot, *, first: bool) -> None:
        """Record an applied report. ``first``: of its stream, so that it contains all prefix blocks."""
        worker_id = snapshot.worker_id
        incarnation, number = self._deltas.pop(worker_id, (0, 0))
        number = number if incarnation == snapshot.incarnation else 0
        self._deltas[worker_id] = snapshot.incarnation, max(number, snapshot.deltas_number)
        known = 0 if first else self._prefixes.get(worker_id, 0)
        known += sum(len(pool.prefix_added) - len(pool.prefix_removed) for pool in snapshot.pools)
        self._prefixes[worker_id] = max(0, known)
        for by_worker in (self._deltas, self._prefixes):
            while len(by_worker) > self._most:
                del by_worker[next(iter(by_worker))]
