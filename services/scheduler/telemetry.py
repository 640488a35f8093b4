"""Scheduler telemetry: metrics with the levels of the term, a log line per placement, and spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from services.core.generation import PlaceSpec
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
from services.scheduler.slots.pools import SlotPools
from services.scheduler.term_streams import TermStreams

log = structlog.get_logger()


class LedTerm(Protocol):
    """The parts of the current term that metrics read when they are scraped. ``Term`` has this shape."""

    fleet: FleetView
    queue: FlowQueue
    health: FleetHealth
    overload: Overload
    streams: TermStreams
    slots: SlotPools


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
        self._metrics = metrics
        self._models = metrics.models
        self._clock = clock
        self._tracing = tracing if tracing is not None else Tracing(clock)
        self._lines = lines
        self._depth: dict[tuple[str, str], int] = {}
        self._term: LedTerm | None = None
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
        self._add_prefix_levels(metrics)

    def health_changed(self, what: str, state: str) -> None:
        """Count a change of a worker (ejected, probed, readmitted) or of a circuit (opened, half-open,
        closed)."""
        self._health_changes.add(what, state)

    def _add_levels(self, metrics: Metrics) -> None:
        metrics.gauge(
            "fairway_scheduler_workers",
            "Workers of the leader, by state",
            self._by_kind(lambda term: term.fleet.workers_by_state),
            ("state",),
        )
        metrics.gauge(
            "fairway_scheduler_pools_out",
            "Worker pools with reduced traffic: ejected or probed for slowness, failures or a trial",
            self._by_kind(lambda term: term.health.pools_by_state()),
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
        metrics.gauge(
            "fairway_scheduler_slots",
            "Slots of fixed-cost versions: leased, held (leased or not returned yet), and rows that want one",
            self._by_kind(lambda term: term.slots.by_kind()),
            ("kind",),
        )
        metrics.level(
            "fairway_scheduler_grants_outstanding",
            "Grants that no worker report confirmed yet",
            self._level(lambda term: term.fleet.outstanding),
        )
        metrics.level(
            "fairway_scheduler_gateways",
            "Gateways with an open stream to this leader",
            self._level(lambda term: len(term.streams.sessions)),
        )
        metrics.level(
            "fairway_scheduler_inbox_commands",
            "Commands that wait for the next decision turn",
            self._level(lambda term: len(term.streams)),
        )
        metrics.level(
            "fairway_scheduler_view_age_seconds",
            "Time since the oldest last report of a connected worker; 0 without workers",
            self._level(lambda term: term.fleet.view_age_s(self._clock.monotonic_s())),
        )

    def _add_prefix_levels(self, metrics: Metrics) -> None:
        metrics.gauge(
            "fairway_scheduler_prompt_tokens",
            "Prompt tokens of this term: granted, predicted cached, reported, reported cached",
            self._by_kind(lambda term: term.fleet.prefix_tokens.by_kind()),
            ("kind",),
        )
        metrics.level(
            "fairway_scheduler_prefix_blocks",
            "Cached prefix blocks in the leader's index",
            self._level(lambda term: len(term.fleet.prefixes)),
        )

    def export_decisions(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Export the log of decisions; ``counts`` returns how many it holds and how many it has forgotten."""

        def read() -> Reading:
            held, forgotten = counts()
            return ((("recorded",), held + forgotten), (("overwritten",), forgotten))

        self._metrics.counted(
            "fairway_scheduler_recorded_decisions_total",
            "Placements in the log of decisions: recorded so far, and of these replaced by newer ones",
            read,
            ("which",),
        )

    def term_started(self, term: LedTerm) -> None:
        self._depth.clear()
        self._term = term

    def term_ended(self) -> None:
        """Clear the queue metrics, because waiting placements end with the term."""
        self._depth.clear()
        self._term = None

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

    def _level(self, read: Callable[[LedTerm], float]) -> Callable[[], float]:
        """Return a reader of one level of the current term; 0 without one."""
        return lambda: float(read(self._term)) if self._term is not None else 0.0

    def _by_kind(self, read: Callable[[LedTerm], Mapping[str, int]]) -> Callable[[], Reading]:
        """Return a reader of several levels of the current term; none without one."""

        def reading() -> Reading:
            found = read(self._term) if self._term is not None else {}
            return [((kind,), float(count)) for kind, count in found.items()]

        return reading

    def _pressure(self) -> Reading:
        by_label: dict[str, float] = {}
        for model, ratio in (self._term.overload.pressure_by_model() if self._term else {}).items():
            label = self._models.of(model)  # models beyond the label limit share a label
            by_label[label] = max(ratio, by_label.get(label, 0.0))
        return [((label,), ratio) for label, ratio in by_label.items()]

    def _counter_gaps(self) -> Reading:
        by_label: dict[tuple[str, str], float] = {}
        for (model, priority), tokens in (counter_gaps(self._term.queue) if self._term else {}).items():
            label = self._models.of(model), priority.value
            by_label[label] = max(tokens, by_label.get(label, 0.0))
        return list(by_label.items())
