"""Telemetry of the gateway's requests: metrics, one log line each, the stages as spans.

``RequestTelemetry`` collects everything about one request. Tokens cost one clock reading and one addition per
frame and choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

import structlog
from msgspec.structs import replace

from services.core import faults
from services.core.arms import ArmKey, SliKey, session_hash
from services.core.errors import FairwayError, QueueFull
from services.core.estimates.finished import FinishedRequest
from services.core.estimates.traffic_shapes import RequestShape
from services.core.faults import fault_of
from services.core.generation import NO_RUN, NO_USAGE, GenerationSpec, RunFacts, StageClock, Usage
from services.core.records import Priority
from services.core.rollouts.routes import SHADOW_TENANT
from services.gateway.catalog import Route
from services.gateway.events import Finished, Received
from services.gateway.policy.degrade import Degradation
from services.gateway.requests.stage_timer import STAGE_NAMES, StageTimer, StageTrace
from services.gateway.slis import (
    RequestEnd,
    RequestLatencies,
    SliRecorder,
    SliSubject,
    sampling_kind,
    subject_of,
)
from services.ports.clock import Clock
from services.runtime.clock import SystemClock
from services.runtime.connections import ConnectionTable
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import GAP_S, HistogramCell, Metrics
from services.runtime.telemetry.tracing import Tracing

log = structlog.get_logger()

FINISHED: Final = "finished"
FAILED: Final = "failed"
CONDEMNED: Final = "condemned"


class GatewayTelemetry:
    """The instruments of a gateway process."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        clock: Clock | None = None,
        tracing: Tracing | None = None,
        lines: LineBudget | None = None,
        slis: SliRecorder | None = None,
    ) -> None:
        """Without arguments it exports no metrics, writes no lines or spans and reports nothing."""
        self.clock = clock if clock is not None else SystemClock()
        self.tracing = tracing if tracing is not None else Tracing(self.clock)
        self.metrics = metrics = metrics if metrics is not None else Metrics()
        self._lines = lines
        self.slis = slis if slis is not None else SliRecorder(metrics)
        self._requests = metrics.counter(
            "fairway_gateway_requests_total",
            "Requests that ended, by outcome, error reason (FINISHED without an error) and party at fault",
            ("face", "outcome", "reason", "fault"),
        )
        self._by_tenant = metrics.counter(
            "fairway_gateway_tenant_requests_total",
            "Admitted requests that ended, by tenant",
            ("tenant", "model", "outcome"),
        )
        self._tokens = metrics.counter(
            "fairway_gateway_tokens_total",
            "Tokens of admitted requests that ended: prompt, cached (part of prompt) and output",
            ("tenant", "model", "kind"),
        )
        self._admissions = metrics.counter(
            "fairway_gateway_admissions_total",
            "Admission decisions: ADMITTED or the reason of the refusal",
            ("outcome",),
        )
        self._placed_again = metrics.counter(
            "fairway_gateway_placed_again_total",
            "Sequences placed again, by cause: the worker's answer, or LOST",
            ("cause",),
        )
        self._poisoned = metrics.counter(
            "fairway_gateway_poisoned_inputs_total",
            "Inputs that ended an engine, by model, version and event: condemned, or refused later",
            ("model", "version", "event"),
        )
        self._degraded = metrics.counter(
            "fairway_gateway_degraded_total",
            "Requests changed under pressure, by kind of change",
            ("kind",),
        )
        self._rows = metrics.counter(
            "fairway_gateway_rows_total",
            "Rows of fixed-cost models in requests that were answered",
            ("model",),
        )
        self._fallback_placements = metrics.counter(
            "fairway_gateway_fallback_placements_total",
            "Sequences that this gateway placed itself while no leader answered",
        )
        self._latencies(metrics)

    def _latencies(self, metrics: Metrics) -> None:
        by_model = ("model",)
        self._ttft = metrics.histogram(
            "fairway_gateway_ttft_seconds",
            "From the first byte of a request until the first token of each choice at the gateway",
            by_model,
        )
        self._itl = metrics.histogram(
            "fairway_gateway_itl_seconds",
            "From one token of a choice until the next at the gateway, weighted by token",
            by_model,
            bounds=GAP_S,
        )
        self._tpot = metrics.histogram(
            "fairway_gateway_tpot_seconds",
            "From a choice's first token until its end, divided by its output tokens less one",
            by_model,
            bounds=GAP_S,
        )
        self._e2e = metrics.histogram(
            "fairway_gateway_request_seconds",
            "From the first byte of a request until its terminal event is passed to the transport",
            ("outcome",),
        )
        stages = metrics.histogram(
            "fairway_gateway_stage_seconds",
            "Time of a request in one stage of its clock; stages sum to its latency",
            ("stage",),
        )
        self._stages = tuple(stages.cell(name) for name in STAGE_NAMES)

    def begin(self, received: Received) -> RequestTelemetry:
        return RequestTelemetry(self, received)

    def refused(self, received: Received, error: FairwayError) -> None:
        """Count a request that was rejected before it began."""
        error.metadata.setdefault("request_id", received.request_id)
        self._requests.add(received.face, FAILED, error.reason, fault_of(error.reason))

    def full(self, tenant: str, model: str) -> None:
        """Count a request for a deployment that this gateway had no room for."""
        key = SliKey(ArmKey(model, ""), tenant, Priority.STANDARD, self.slis.zone)
        self.slis.ended(SliSubject(key), RequestEnd(QueueFull.reason, NO_USAGE, RequestLatencies()))

    def admission(self, outcome: str) -> None:
        self._admissions.add(outcome)

    def placed_again(self, cause: str) -> None:
        self._placed_again.add(cause)

    def degraded(self, kind: str) -> None:
        self._degraded.add(kind)

    def may_be_poisoned(self, model: str, version_digest: str) -> None:
        """Export the version's count before its first event: Prometheus sees no increase in a series that
        begins above 0."""
        self._poisoned.cell(
            self.metrics.models.of(model), self.metrics.versions.of(version_digest), CONDEMNED
        )

    def poisoned(self, model: str, version_digest: str, event: str) -> None:
        """Count an input that was condemned or refused, against its version."""
        metrics = self.metrics
        self._poisoned.add(metrics.models.of(model), metrics.versions.of(version_digest), event)

    def placed_by_fallback(self) -> None:
        self._fallback_placements.add()

    def rows_ended(self, model: str, count: int) -> None:
        """Count the rows of an answer."""
        self._rows.add(self.metrics.models.of(model), amount=count)

    def ended(self, request: RequestTelemetry, outcome: str, reason: str, clock: StageClock) -> None:
        """Count a request that ended, and write its line."""
        self._requests.add(request.received.face, outcome, reason, fault_of(reason))
        stages_us = _stages_us(clock)
        total_us = sum(stages_us)
        for stage_us, cell in zip(stages_us, self._stages, strict=True):
            cell.observe(stage_us / 1e6)
        self._e2e.observe(total_us / 1e6, outcome)
        if request.tenant:
            names = request.tenant_label, request.model_label
            self._by_tenant.add(*names, outcome)
            self._tokens.add(*names, "prompt", amount=request.usage.prompt_tokens)
            self._tokens.add(*names, "cached", amount=request.usage.cached_tokens)
            self._tokens.add(*names, "output", amount=request.usage.output_tokens)
        if self._lines is not None and self._lines.take():
            _write_line(request, outcome, reason, clock, total_us)

    def pace(self, request: RequestTelemetry) -> TokenPace:
        label = request.model_label
        return TokenPace(
            request.received.monotonic_s,
            request.latencies,
            self._ttft.cell(label),
            self._itl.cell(label),
            self._tpot.cell(label),
        )


class RequestTelemetry:
    """One request, from its receipt to its one end."""

    __slots__ = (
        "_log_s", "_owner", "_subject", "_trace", "changes", "fallback", "latencies", "model", "model_label",
        "received", "run", "tenant", "tenant_label", "usage",
    )  # fmt: skip

    def __init__(self, owner: GatewayTelemetry, received: Received) -> None:
        self._owner = owner
        self._trace = StageTrace.open(owner.tracing, received)
        self.received = received
        self.tenant = self.tenant_label = self.model = self.model_label = ""
        self.usage = NO_USAGE
        self.run = NO_RUN
        self._log_s = owner.slis.log_s()
        self.latencies = RequestLatencies()
        self._subject: SliSubject | None = None
        self.fallback = False
        self.changes = ""  # how the served request differs from the client's

    def timer(self) -> StageTimer:
        """Return the request's stage clock, started when it was received."""
        return StageTimer(self.received.unix_us, self.received.monotonic_s, self._trace)

    def addressed(self, tenant: str, model: str, priority: Priority) -> None:
        """The request is for a deployment that exists."""
        self._subject = SliSubject(SliKey(ArmKey(model, ""), tenant, priority, self._owner.slis.zone))

    def routed(self, tenant: str, route: Route, priority: Priority, session_key: str) -> None:
        """Its version was chosen: failures from here on, before it is accepted too, count against that."""
        key = SliKey(ArmKey(route.model, route.version_digest), tenant, priority, self._owner.slis.zone)
        self._subject = SliSubject(key)
        if route.step:
            self.compared_in(route.step, session_key)

    def compared_in(self, step: str, session_key: str) -> None:
        """It counts in the comparison of this step; a copy too, whose version is not drawn.

        It has no effect on a request whose model does not exist, or was deleted.
        """
        if self._subject is not None:
            session = session_hash(self._subject.key.tenant, session_key)
            self._subject = replace(self._subject, session=session, step=step)

    def accepted(self, tenant: str, spec: GenerationSpec) -> None:
        """The request was admitted, or is served by another version from now on."""
        arm = ArmKey(spec.model, spec.version_digest)
        key = SliKey(arm, tenant, spec.priority, self._owner.slis.zone)
        tokens = len(spec.prompt.ids)
        shapes = (RequestShape(tokens, 0, sampling_kind(spec.sampling)),) * spec.choices
        self.accepted_as(subject_of(key, spec.session_key, spec.step, tokens, shapes))

    def accepted_as(self, subject: SliSubject) -> None:
        """As ``accepted``, for a request of any kind."""
        metrics, key = self._owner.metrics, subject.key
        self.tenant, self.tenant_label = key.tenant, metrics.tenants.of(key.tenant)
        self.model, self.model_label = key.arm.model, metrics.models.of(key.arm.model)
        self._subject = subject

    def pace(self) -> TokenPace:
        """Return the token timing of one choice."""
        return self._owner.pace(self)

    def placed_again(self, cause: str) -> None:
        self._owner.placed_again(cause)

    def ran(self, run: RunFacts) -> None:
        """Note how it fared on the worker that ended it; of several choices the last to end counts."""
        self.run = run

    def degraded(self, degradations: Sequence[Degradation], *, anew: bool = True) -> None:
        """The request is served in degraded form. ``anew``: this is its first run, which is counted."""
        self.changes = ",".join(found.kind.value for found in degradations)
        for found in degradations if anew else ():
            self._owner.degraded(found.kind.value)

    def placed_by_fallback(self) -> None:
        """A choice is placed on a worker without a leader's grant."""
        self.fallback = True
        self._owner.placed_by_fallback()

    def finished(self, finished: Finished) -> None:
        self.usage = finished.usage
        self._end(FINISHED, faults.FINISHED, finished.clock, finished.resumes)

    def failed(self, error: FairwayError, clock: StageClock, usage: Usage) -> None:
        """``usage``: so far."""
        self.usage = usage
        self._end(FAILED, error.reason, clock, 0)

    def _end(self, outcome: str, reason: str, clock: StageClock, resumes: int) -> None:
        self._owner.ended(self, outcome, reason, clock)
        if self._subject is not None:
            self._owner.slis.ended(self._subject, RequestEnd(reason, self.usage, self.latencies))
            self._note(self._subject.key, reason, clock)
        if self._trace is not None:
            self._trace.close(
                self._owner.clock.monotonic_s(),
                {
                    "fairway.request_id": self.received.request_id,
                    "fairway.tenant": self.tenant,
                    "fairway.model": self.model,
                    "fairway.reason": reason,
                    "fairway.fallback": self.fallback,
                    "fairway.degraded": self.changes,
                    "fairway.output_tokens": self.usage.output_tokens,
                    "fairway.resumes": resumes,
                },
                error="" if outcome == FINISHED else reason,
            )

    def _note(self, key: SliKey, reason: str, clock: StageClock) -> None:
        if key.tenant != SHADOW_TENANT:
            received, arm, slis = self.received, key.arm, self._owner.slis
            slis.note(
                FinishedRequest(
                    received.request_id,
                    received.face,
                    key.tenant,
                    arm.model,
                    arm.version_digest,
                    key.priority,
                    reason,
                    clock,
                    self.usage,
                    slis.zone,
                    slis.gateway,
                    run=replace(self.run, log_us=round((slis.log_s() - self._log_s) * 1e6)),
                )
            )


class TokenPace:
    """The arrival times of one choice's tokens. Called once per frame: it must be cheap."""

    __slots__ = ("_first_s", "_itl", "_last_s", "_latencies", "_received_s", "_tpot", "_ttft")

    def __init__(
        self,
        received_s: float,
        latencies: RequestLatencies,
        ttft: HistogramCell,
        itl: HistogramCell,
        tpot: HistogramCell,
    ) -> None:
        self._received_s = received_s
        self._latencies = latencies
        self._ttft, self._itl, self._tpot = ttft, itl, tpot
        self._first_s = self._last_s = 0.0

    def tokens(self, count: int, now_s: float) -> None:
        """Record ``count`` tokens, at least one."""
        last_s, self._last_s = self._last_s, now_s
        if last_s:
            gap_s = (now_s - last_s) / count
            self._itl.observe(gap_s, count)
            self._latencies.gap(gap_s, count)
        elif count:
            self._first_s = now_s
            self._ttft.observe(now_s - self._received_s)
            self._latencies.ttft_s.append(now_s - self._received_s)

    def finished(self, output_tokens: int, now_s: float) -> None:
        if output_tokens > 1 and self._first_s:
            self._tpot.observe((now_s - self._first_s) / (output_tokens - 1))


def export_levels(
    metrics: Metrics,
    *,
    running: Callable[[], int],
    buffered_tokens: Callable[[], int],
    http_connections: ConnectionTable,
) -> None:
    """Export the state held for clients, and the connections closed in favour of others."""
    metrics.level(
        "fairway_gateway_requests_running",
        "Requests between receipt and terminal event",
        lambda: float(running()),
    )
    metrics.level(
        "fairway_gateway_buffered_tokens",
        "Output tokens received from workers and not yet taken by a client's transport",
        lambda: float(buffered_tokens()),
    )
    metrics.level(
        "fairway_gateway_http_connections",
        "Open HTTP client connections",
        lambda: float(len(http_connections)),
    )
    metrics.counted(
        "fairway_gateway_http_connections_cut_total",
        "HTTP connections closed at the limit: an idle one, or the new one",
        lambda: [
            (("idle",), float(http_connections.displaced)),
            (("new",), float(http_connections.refused)),
        ],
        ("which",),
    )


def export_upstream(
    metrics: Metrics,
    *,
    worker_streams: Callable[[], int],
    placements_pending: Callable[[], int],
    scheduler_connected: Callable[[], bool],
) -> None:
    """Export the state of the connections to workers and schedulers."""
    metrics.level(
        "fairway_gateway_worker_streams", "Open streams to workers", lambda: float(worker_streams())
    )
    metrics.level(
        "fairway_gateway_placements_pending",
        "Sequences that wait for a placement",
        lambda: float(placements_pending()),
    )
    metrics.level(
        "fairway_gateway_scheduler_connected",
        "1 while a stream to the leading scheduler is open, else 0",
        lambda: float(scheduler_connected()),
    )


def export_route_faults(metrics: Metrics, read: Callable[[], list[tuple[str, str]]]) -> None:
    """Export the routes that are not followed as they are stored."""
    metrics.gauge(
        "fairway_gateway_route_faults",
        "1 for a route that cannot be followed",
        lambda: [((metrics.models.of(model), fault), 1.0) for model, fault in read()],
        ("model", "fault"),
    )


def _write_line(
    request: RequestTelemetry, outcome: str, reason: str, clock: StageClock, total_us: int
) -> None:
    log.info(
        f"request.{outcome}",
        request_id=request.received.request_id,
        face=request.received.face,
        tenant=request.tenant,
        model=request.model,
        reason=reason,
        prompt_tokens=request.usage.prompt_tokens,
        cached_tokens=request.usage.cached_tokens,
        output_tokens=request.usage.output_tokens,
        total_ms=round(total_us / 1e3, 3),
        **{name: round(us / 1e3, 3) for name, us in zip(_STAGES_MS, _stages_us(clock), strict=True)},
    )


_stages_us: Final[Callable[[StageClock], tuple[int, ...]]] = attrgetter(
    *(f"{name}_us" for name in STAGE_NAMES)
)
_STAGES_MS: Final = tuple(f"{name}_ms" for name in STAGE_NAMES)
