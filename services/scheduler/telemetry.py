"""Scheduler telemetry: metrics with the levels of the term, a log line per placement, and spans."""

from __future__ import annotations

from typing import Protocol

import structlog

from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.ports.clock import Clock
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import SHORT_S, Metrics, Reading
from services.runtime.telemetry.tracing import Tracing
from services.scheduler.fleet.view import FleetView
from services.scheduler.health.worker_health import FleetHealth
from services.scheduler.overload.pool_load import Overload
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.report import counter_gaps
from services.scheduler.queue.waiting import GRANTED, WITHDRAWN
from services.scheduler.term_streams import TermStreams


class TermLevels:
    """Reads the parts of a term. Changes nothing."""

    def __init__(
        self,
        fleet: FleetView,
        queue: FlowQueue,
        health: FleetHealth,
        overload: Overload,
        streams: TermStreams,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._health = health
        self._overload = overload
        self._streams = streams
        self._clock = clock

    def workers_by_state(self) -> dict[str, int]:
        return self._fleet.workers_by_state

    def grants_outstanding(self) -> int:
        return self._fleet.outstanding

    def gateways(self) -> int:
        return len(self._streams.sessions)

    def inbox(self) -> int:
        return len(self._streams)

    def prompt_tokens(self) -> dict[str, int]:
        """Return the prompt tokens since the term began, by kind."""
        return self._fleet.prefix_tokens.by_kind()

    def indexed_blocks(self) -> int:
        return len(self._fleet.prefixes)

    def pressure_by_model(self) -> dict[str, float]:
        return self._overload.pressure_by_model()

    def pools_out_by_state(self) -> dict[str, int]:
        return self._health.pools_by_state()

    def counter_gaps(self) -> dict[tuple[str, Priority], float]:
        """Return the spread of the counters of waiting tenants, by model and class."""
        return counter_gaps(self._queue)

    def view_age_s(self) -> float:
        """Return the age of the oldest last report of a connected worker; 0 without workers."""
        return self._fleet.view_age_s(self._clock.monotonic_s())


log = structlog.get_logger()


class LedTerm(Protocol):
    """The current term. ``Term`` has this shape."""

    @property
    def levels(self) -> TermLevels: ...


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
        self._tracing = tracing if tracing is not None else Tracing(clock)
        self._lines = lines
        self._depth: dict[tuple[str, str], int] = {}
        self._levels: TermLevels | None = None
        metrics.gauge(
            "fairway_scheduler_queue_placements",
            "Placements in the queue, by deployment and class",
            lambda: [(key, float(count)) for key, count in self._depth.items()],
            ("model", "priority"),
        )
        self._wait = metrics.histogram(
            "fairway_scheduler_queue_wait_seconds",
            "From a placement's arrival until its grant, refusal or withdrawal",
            ("priority", "outcome"),
        )
        self._placements = metrics.counter(
            "fairway_scheduler_placements_total",
            "Placements that ended: GRANTED, WITHDRAWN or the reason of the refusal",
            ("model", "outcome"),
        )
        self.decision = metrics.histogram(
            "fairway_scheduler_decision_seconds",
            "One decision turn: commands read, grants decided, outcomes passed to the streams",
            bounds=SHORT_S,
        ).cell()
        self._health_changes = metrics.counter(
            "fairway_scheduler_health_changes_total",
            "Worker ejections, probes and readmissions, and changes of circuit breakers",
            ("what", "state"),
        )
        self._add_levels(metrics)

    def health_changed(self, what: str, state: str) -> None:
        """Count a change of a worker (ejected, probed, readmitted) or of a circuit (opened, half-open,
        closed)."""
        self._health_changes.add(what, state)

    def _add_levels(self, metrics: Metrics) -> None:
        metrics.gauge(
            "fairway_scheduler_workers",
            "Workers of the leader, by state",
            self._workers,
            ("state",),
        )
        metrics.gauge(
            "fairway_scheduler_pools_out",
            "Worker pools with reduced traffic: ejected or probed for slowness, failures or a trial",
            self._pools_out,
            ("state",),
        )
        metrics.gauge(
            "fairway_scheduler_pressure_ratio",
            "Predicted wait over the target of the most affected class, 0 to 1",
            self._pressure,
            ("model",),
        )
        metrics.gauge(
            "fairway_scheduler_counter_gap_tokens",
            "Spread of the fairness counters of waiting tenants",
            self._counter_gaps,
            ("model", "priority"),
        )
        metrics.level(
            "fairway_scheduler_grants_outstanding",
            "Grants that no worker report confirmed yet",
            lambda: float(self._levels.grants_outstanding()) if self._levels else 0.0,
        )
        metrics.level(
            "fairway_scheduler_gateways",
            "Gateways with an open stream to this leader",
            lambda: float(self._levels.gateways()) if self._levels else 0.0,
        )
        metrics.level(
            "fairway_scheduler_inbox_commands",
            "Commands that wait for the next decision turn",
            lambda: float(self._levels.inbox()) if self._levels else 0.0,
        )
        metrics.level(
            "fairway_scheduler_view_age_seconds",
            "Time since the oldest last report of a connected worker; 0 without workers",
            lambda: self._levels.view_age_s() if self._levels else 0.0,
        )
        metrics.gauge(
            "fairway_scheduler_prompt_tokens",
            "Prompt tokens of this term: granted, predicted cached, reported, reported cached",
            self._prompt_tokens,
            ("kind",),
        )
        metrics.level(
            "fairway_scheduler_prefix_blocks",
            "Cached prefix blocks in the leader's index",
            lambda: float(self._levels.indexed_blocks()) if self._levels else 0.0,
        )

    def term_started(self, term: LedTerm) -> None:
        self._depth.clear()
        self._levels = term.levels

    def term_ended(self) -> None:
        """Clear the queue metrics, because waiting placements end with the term."""
        self._depth.clear()
        self._levels = None

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

    def _prompt_tokens(self) -> Reading:
        found = self._levels.prompt_tokens() if self._levels else {}
        return [((kind,), float(tokens)) for kind, tokens in found.items()]

    def _pools_out(self) -> Reading:
        found = self._levels.pools_out_by_state() if self._levels else {}
        return [((state,), float(count)) for state, count in found.items()]

    def _pressure(self) -> Reading:
        by_label: dict[str, float] = {}
        for model, ratio in (self._levels.pressure_by_model() if self._levels else {}).items():
            label = self._models.of(model)  # models beyond the label limit share a label
            by_label[label] = max(ratio, by_label.get(label, 0.0))
        return [((label,), ratio) for label, ratio in by_label.items()]

    def _counter_gaps(self) -> Reading:
        by_label: dict[tuple[str, str], float] = {}
        for (model, priority), tokens in (self._levels.counter_gaps() if self._levels else {}).items():
            label = self._models.of(model), priority.value
            by_label[label] = max(tokens, by_label.get(label, 0.0))
        return list(by_label.items())

    def _workers(self) -> Reading:
        found = self._levels.workers_by_state() if self._levels else {}
        return [((state,), float(count)) for state, count in found.items()]
