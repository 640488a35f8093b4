"""The OpenTelemetry SDK behind ``runtime/telemetry/tracing.py``: sampler, bounded queue, exporter."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Tracer, TraceState
from opentelemetry.util.types import Attributes

log = structlog.get_logger()

MAX_QUEUED: Final = 4096
_BATCH: Final = 512
_PERIOD_S: Final = 1.0
_EXPORT_TIMEOUT_S: Final = 3.0


class DrawnShare(Sampler):
    """Samples a share of the traces by a random draw. Clients choose ids and flags, so these do not count."""

    def __init__(self, ratio: float, rng: Random) -> None:
        self._ratio = ratio
        self._rng = rng

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        taken = self._rng.random() < self._ratio
        return SamplingResult(Decision.RECORD_AND_SAMPLE if taken else Decision.DROP)

    def get_description(self) -> str:
        return f"DrawnShare({self._ratio:g})"


def sampler_of(*, ratio: float, follows: bool, rng: Random) -> Sampler:
    """Return the sampler: the caller's decision where the process ``follows``, else a draw per request."""
    if follows:
        return ParentBased(ALWAYS_OFF)
    share = DrawnShare(ratio, rng)
    return ParentBased(share, remote_parent_sampled=share, remote_parent_not_sampled=share)


def connect(
    endpoint: str, *, ratio: float, role: str, follows: bool, rng: Random
) -> tuple[Tracer, SpanQueue]:
    """Return a tracer whose spans go to the collector, and the queue in which they wait."""
    insecure = not endpoint.startswith("https://")
    # A collector without TLS is inside the fleet; one with TLS may be a vendor's, behind a proxy.
    direct: Any = (("grpc.enable_http_proxy", 0),) if insecure else None
    exporter = OTLPSpanExporter(
        endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S, channel_options=direct
    )
    queue = SpanQueue(exporter)
    resource = Resource({"service.name": f"fairway-{role}", "service.namespace": "fairway"})
    sampler = sampler_of(ratio=ratio, follows=follows, rng=rng)
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    return provider.get_tracer("fairway"), queue


class SpanQueue(SpanProcessor):
    """The bounded queue between the code that ends spans and the thread that sends them."""

    def __init__(self, exporter: SpanExporter, *, max_queued: int = MAX_QUEUED) -> None:
        self._exporter = exporter
        self._spans: deque[ReadableSpan] = deque()
        self._max_queued = max_queued
        self._closing = threading.Event()
        self.exported = 0
        self.dropped_full = 0
        self.dropped_failed = 0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, or drop it when the queue is full. Never blocks."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._spans) >= self._max_queued:
            self.dropped_full += 1
        else:
            self._spans.append(span)

    def shutdown(self) -> None:
        """Send the waiting spans; returns within twice the export's timeout."""
        self._closing.set()
        self._thread.join(2 * _EXPORT_TIMEOUT_S)

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return not self._spans

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            while self._send():
                pass
        while self._send():
            pass
        self._exporter.shutdown()

    def _send(self) -> bool:
        """Send one batch; return whether the collector accepted it. A rejected batch is dropped."""
        batch = [self._spans.popleft() for _ in range(min(_BATCH, len(self._spans)))]
        if not batch:
            return False
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # no failure of the collector may affect this process
            taken = False
        if taken:
            self.exported += len(batch)
        else:
            self.dropped_failed += len(batch)
        if taken == self._failing:
            self._failing = not taken
            log.info("traces.collector_back") if taken else log.warning("traces.collector_lost")
        return taken
