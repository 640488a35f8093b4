"""What the scheduler tells of its queue: metrics, a line per placement, spans. It decides nothing."""

from __future__ import annotations

from typing import Final, Protocol

import structlog

from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.runtime.logging import LineBudget
from services.runtime.metrics import SHORT_S, Metrics, Reading
from services.runtime.tracing import Tracing

log = structlog.get_logger()

GRANTED: Final = "GRANTED"
WITHDRAWN: Final = "WITHDRAWN"


class QueueObserver(Protocol):
    """Hears what becomes of placements. Called by the queue's single writer; must not block or raise."""

    def entered(self, spec: PlaceSpec) -> None:
        """The placement waits from now on."""

    def left(self, spec: PlaceSpec) -> None:
        """It waits no more, however it ended."""

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        """It ended with GRANTED, WITHDRAWN or the reason of its refusal. ``queued_s``: when it entered."""


class Unobserved:
    """Nobody listens."""

    def entered(self, spec: PlaceSpec) -> None: ...

    def left(self, spec: PlaceSpec) -> None: ...

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None: ...


class Standing(Protocol):
    """What the present term holds. ``Term`` has this shape."""

    @property
    def workers_by_state(self) -> dict[str, int]: ...

    @property
    def grants_outstanding(self) -> int: ...

    @property
    def gateways(self) -> int: ...

    @property
    def inbox(self) -> int: ...

    def view_age_s(self) -> float: ...


class SchedulerTelemetry:
    """Implements ``QueueObserver``; outlives the terms of this process."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        tracing: Tracing | None = None,
        lines: LineBudget | None = None,
    ) -> None:
        self._models = metrics.models
        self._clock = clock
        self._tracing = tracing or Tracing(clock)
        self._lines = lines
        self._depth: dict[tuple[str, str], int] = {}
        self._standing: Standing | None = None
        metrics.gauge(
            "fairway_scheduler_queue_placements",
            "Placements that wait, by deployment and class",
            lambda: [(key, float(count)) for key, count in self._depth.items()],
            ("model", "priority"),
        )
        self._wait = metrics.histogram(
            "fairway_scheduler_queue_wait_seconds",
            "From when a placement reaches the scheduler until its grant, refusal or withdrawal",
            ("priority", "outcome"),
        )
        self._placements = metrics.counter(
            "fairway_scheduler_placements_total",
            "Placements that ended, by GRANTED, WITHDRAWN or the reason of the refusal",
            ("model", "outcome"),
        )
        self.decision = metrics.histogram(
            "fairway_scheduler_decision_seconds",
            "One turn of the scheduler: commands taken, grants decided, outcomes handed to the streams",
            bounds=SHORT_S,
        ).cell()
        self._levels(metrics)

    def _levels(self, metrics: Metrics) -> None:
        metrics.gauge(
            "fairway_scheduler_workers",
            "Workers known to the leader: placed on, silent, draining or away",
            self._workers,
            ("state",),
        )
        metrics.level(
            "fairway_scheduler_grants_outstanding",
            "Grants that no report of their worker speaks for yet",
            lambda: float(self._standing.grants_outstanding) if self._standing else 0.0,
        )
        metrics.level(
            "fairway_scheduler_gateways",
            "Gateways with an open stream to this leader",
            lambda: float(self._standing.gateways) if self._standing else 0.0,
        )
        metrics.level(
            "fairway_scheduler_inbox_commands",
            "Commands of streams that wait for the scheduler's next turn",
            lambda: float(self._standing.inbox) if self._standing else 0.0,
        )
        metrics.level(
            "fairway_scheduler_view_age_seconds",
            "Since the last report of the connected worker that was longest not heard; 0 without workers",
            lambda: self._standing.view_age_s() if self._standing else 0.0,
        )

    def term_started(self, standing: Standing) -> None:
        self._depth.clear()
        self._standing = standing

    def term_ended(self) -> None:
        """What waited is gone with the term."""
        self._depth.clear()
        self._standing = None

    def entered(self, spec: PlaceSpec) -> None:
        key = self._models.of(spec.model), spec.priority.value
        self._depth[key] = self._depth.get(key, 0) + 1

    def left(self, spec: PlaceSpec) -> None:
        key = self._models.of(spec.model), spec.priority.value
        self._depth[key] = self._depth.get(key, 1) - 1

    def ended(self, spec: PlaceSpec, outcome: str, queued_s: float, now_s: float, worker_id: str) -> None:
        wait_s = now_s - queued_s
        self._wait.observe(wait_s, spec.priority.value, outcome)
        self._placements.add(self._models.of(spec.model), outcome)
        if spec.traceparent:
            self._tracing.record(
                "place",
                spec.traceparent,
                (queued_s, now_s),
                attributes={"fairway.request_id": spec.request_id, "fairway.worker": worker_id},
                error="" if outcome in (GRANTED, WITHDRAWN) else outcome,
            )
        if self._lines is not None and self._lines.take():
            log.info(
                "placement.ended",
                request_id=spec.request_id,
                choice=spec.choice,
                model=spec.model,
                outcome=outcome,
                worker_id=worker_id,
                wait_ms=round(wait_s * 1e3, 3),
            )

    def _workers(self) -> Reading:
        found = self._standing.workers_by_state if self._standing else {}
        return [((state,), float(count)) for state, count in found.items()]
