"""Traces over OTLP: the work of one request by process and duration. They contain no prompts and no outputs.

Off unless an endpoint is set; then a request costs one comparison per stage. The process that a client calls
decides by a draw whether to record a request; those behind it follow. Spans wait in a bounded queue for a
thread that sends them: a slow or unavailable collector costs only spans, which are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:  # the SDK is imported only where an endpoint is set
    from services.runtime.telemetry.otlp import SpanQueue

_BEHIND_A_GATEWAY: Final = ("scheduler", "worker")
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

Attributes = Mapping[str, str | int | float | bool]


def parse_traceparent(text: str) -> SpanContext | None:
    """Return the context of a W3C traceparent; None for an invalid one."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & 1))
    return context if context.is_valid else None


def traceparent_of(span: Span) -> str:
    """Return the traceparent for a callee; empty for a span that is not recorded."""
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


class Tracing:
    """Creates spans and passes them to the exporter. Times are the clock's monotonic seconds."""

    def __init__(
        self, clock: Clock, tracer: trace.Tracer | None = None, queue: SpanQueue | None = None
    ) -> None:
        self._clock = clock
        self._tracer = tracer
        self._queue = queue

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def start(
        self, name: str, began_s: float, parent: SpanContext | None, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        """Return a span that began at ``began_s``; the caller ends it with ``end``."""
        assert self._tracer is not None, "tracing is off"
        context = None if parent is None else trace.set_span_in_context(NonRecordingSpan(parent))
        return self._tracer.start_span(
            name, context, kind, start_time=self._unix_ns(began_s), record_exception=False
        )

    def end(self, span: Span, ended_s: float, attributes: Attributes | None = None, error: str = "") -> None:
        """End a span; ``error`` is a reason of the error tree."""
        if not span.is_recording():
            return
        if attributes:
            span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._unix_ns(ended_s))

    def record(
        self,
        name: str,
        parent: str,
        times_s: tuple[float, float],
        *,
        attributes: Attributes | None = None,
        error: str = "",
    ) -> str:
        """Record a span that has already ended. Returns its traceparent, for child spans."""
        context = parse_traceparent(parent) if self.on and parent else None
        if context is None:
            return ""
        span = self.start(name, times_s[0], context)
        self.end(span, times_s[1], attributes, error)
        return traceparent_of(span)

    def close(self) -> None:
        """Send the waiting spans, for a bounded time. Blocks: call it in a thread."""
        if self._queue is not None:
            self._queue.shutdown()

    def fates(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how many spans ended, by outcome."""
        queue = self._queue
        return [
            (("exported",), queue.exported if queue else 0),
            (("dropped_queue_full",), queue.dropped_full if queue else 0),
            (("dropped_not_taken",), queue.dropped_failed if queue else 0),
        ]

    def _unix_ns(self, monotonic_s: float) -> int:
        return round((self._clock.unix_s() - self._clock.monotonic_s() + monotonic_s) * 1e9)


def open_tracing(
    clock: Clock, metrics: Metrics, *, endpoint: str, ratio: float, role: str, rng: Random
) -> Tracing:
    """Return tracing to an OTLP collector at ``endpoint`` over gRPC; off for an empty endpoint.

    A process behind a gateway records what its callers record. A process that clients call decides itself, so
    that a client's id and flags cannot make it record more.
    """
    tracing = Tracing(clock)
    if endpoint:
        # Imported here: a process without traces does not pay for it at its start.
        from services.runtime.telemetry.otlp import connect

        follows = role in _BEHIND_A_GATEWAY
        tracing = Tracing(clock, *connect(endpoint, ratio=ratio, role=role, follows=follows, rng=rng))
    metrics.counted(
        "fairway_runtime_spans_total",
        "Spans that ended in this process, by outcome",
        tracing.fates,
        ("outcome",),
    )
    return tracing
