"""The stages of one request as child spans of its span. Only for a request whose trace is recorded."""

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind

from services.gateway.events import Received
from services.runtime.telemetry.tracing import Attributes, Tracing, parse_traceparent, traceparent_of


class StageTrace:
    """A span for the request, and below it one for each of its stages.

    Each choice has a fork. Forks share the span of the stage in which they were created; the first to leave
    it ends it.
    """

    __slots__ = ("_root", "_stage", "_tracing")

    def __init__(self, tracing: Tracing, root: Span, stage: Span | None) -> None:
        self._tracing = tracing
        self._root = root
        self._stage = stage

    @classmethod
    def open(cls, tracing: Tracing, received: Received) -> StageTrace | None:
        """Return the trace of a request, None when it is not recorded."""
        if not tracing.on:
            return None
        parent = parse_traceparent(received.traceparent) if received.traceparent else None
        root = tracing.start("request", received.monotonic_s, parent, kind=SpanKind.SERVER)
        return cls(tracing, root, None) if root.is_recording() else None

    @property
    def traceparent(self) -> str:
        """The trace context of the current stage for another process."""
        return traceparent_of(self._stage if self._stage is not None else self._root)

    def entered(self, stage: str, now_s: float) -> None:
        """End the previous stage's span and begin this stage's."""
        self.left(now_s)
        self._stage = self._tracing.start(stage, now_s, self._root.get_span_context())

    def left(self, now_s: float) -> None:
        if self._stage is not None:
            self._tracing.end(self._stage, now_s)
            self._stage = None

    def fork(self) -> StageTrace:
        return StageTrace(self._tracing, self._root, self._stage)

    def close(self, now_s: float, attributes: Attributes, *, error: str) -> None:
        """End the request's span."""
        self.left(now_s)
        self._tracing.end(self._root, now_s, attributes, error)
