"""Periodic health review, about once a second: bars slow and failing workers, and sheds overdue placements.

``health`` and ``overload`` decide; this module applies their decisions to the fleet view and the queue, and
logs them. Called by the task that owns both.
"""

from __future__ import annotations

from typing import Final

import structlog

from services.scheduler.fleet.view import FleetView
from services.scheduler.health.worker_health import FleetHealth, Ticked
from services.scheduler.overload.pool_load import Overload
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.telemetry import SchedulerTelemetry

log = structlog.get_logger()

_MAX_SHED: Final = 1024  # most placements of a version that one review sheds


class ServingCount:
    """How many workers of each version serve, as of the last review."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._counts: dict[str, int] = {}

    def of(self, digest: str) -> int:
        """Return the count of the last review, at most about a second old; the number of workers that report
        the version while none was found to serve."""
        return self._counts.get(digest, 0) or len(self._fleet.candidates(digest))

    def run(self) -> None:
        """Count again."""
        self._counts = {
            digest: sum(one.serving for one in self._fleet.candidates(digest).values())
            for digest in self._fleet.versions
        }


class HealthReview:
    """Bars slow and failing workers, readmits others, and sheds overdue placements."""

    def __init__(
        self,
        fleet: FleetView,
        queue: FlowQueue,
        health: FleetHealth,
        overload: Overload,
        serving: ServingCount,
        *,
        telemetry: SchedulerTelemetry | None = None,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._health = health
        self._overload = overload
        self._serving = serving
        self._telemetry = telemetry

    def run(self, now_s: float) -> None:
        """Run one review."""
        found = self._health.tick(self._reachable_workers, now_s)
        for barring in found.barrings:
            if self._fleet.bar(barring.worker_id, barring.digest, barred=bool(barring.reason)):
                self._queue.touch((barring.digest,))
        self._shed_overdue(now_s)
        self._overload.keep(self._fleet.versions)
        self._serving.run()
        self._report(found)

    def _shed_overdue(self, now_s: float) -> None:
        """Refuse placements that can no longer be served in time."""
        for digest in self._overload.versions:
            for _ in range(_MAX_SHED):
                victim = self._overload.overdue(digest, now_s)
                if victim is None:
                    break
                self._queue.evict(*victim, now_s)

    def _report(self, found: Ticked) -> None:
        """Log and count each change."""
        for changed in found.ejections:
            log.warning(
                "worker.health_changed",
                worker_id=changed.change.worker_id,
                version_digest=changed.digest,
                state=changed.change.after.value,
                before=changed.change.before.value,
                slowness_ratio=round(changed.change.ratio, 2),
                why=changed.change.why,
            )
            if self._telemetry is not None:
                self._telemetry.health_changed("ejection", changed.change.after.value)
        for change in found.circuits:
            log.warning("circuit.changed", kind=change.kind, name=change.name, state=change.state.value)
            if self._telemetry is not None:
                self._telemetry.health_changed(f"{change.kind}_circuit", change.state.value)

    def _reachable_workers(self, digest: str) -> list[str]:
        """Return the workers that serve or would serve if they were not barred."""
        return [
            worker_id
            for worker_id, found in self._fleet.candidates(digest).items()
            if found.ready and found.reporting and not found.draining
        ]
