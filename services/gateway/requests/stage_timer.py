"""The stage clock of one request: time is always in exactly one stage, so the stages sum to the latency."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from opentelemetry.trace import Span, SpanKind

from services.core.generation import StageClock
from services.gateway.events import Received
from services.runtime.telemetry.tracing import Attributes, Tracing, parse_traceparent, traceparent_of


class Stage(IntEnum):
    """The stages in the order of the fields of ``StageClock``."""

    VALIDATE = 0
    ADMIT = 1
    QUEUE = 2
    DISPATCH = 3
    ENGINE_WAIT = 4
    PREFILL = 5
    DECODE = 6
    SEND = 7


STAGE_NAMES: Final = tuple(stage.name.lower() for stage in Stage)


class StageTimer:
    """Measures the stages; entering a stage again (after a loss) adds to it."""

    __slots__ = ("_seconds", "_trace", "_unix_us", "current", "entered_s")

    def __init__(self, received_unix_us: int, now_s: float, trace: StageTrace | None = None) -> None:
        """``trace``: records a span per stage, None for a request that is not recorded."""
        self._trace = trace
        if trace is not None:
            trace.entered(STAGE_NAMES[Stage.VALIDATE], now_s)
        self._unix_us = received_unix_us
        self.current = Stage.VALIDATE
        self.entered_s = now_s  # when the current stage began, monotonic seconds
        self._seconds = [0.0] * len(STAGE_NAMES)

    def enter(self, stage: Stage, now_s: float) -> None:
        """Charge the time since the last change to the stage that ends."""
        self._seconds[self.current] += now_s - self.entered_s
        if self._trace is not None and stage is not self.current:
            self._trace.entered(STAGE_NAMES[stage], now_s)
        self.current, self.entered_s = stage, now_s

    def fork(self) -> StageTimer:
        """Return a separate timer for one choice, with the stages measured so far."""
        child = StageTimer(self._unix_us, self.entered_s)
        child._trace = None if self._trace is None else self._trace.fork()
        child.current = self.current
        child._seconds = self._seconds.copy()
        return child

    def split_wait(self, engine_wait_s: float) -> None:
        """Divide accepted-to-first-token by the worker's measurement.

        The wait before the prefill is the worker's figure, never more than was observed here; the rest is
        prefill and the transfer to the gateway.
        """
        observed_s = self._seconds[Stage.ENGINE_WAIT] + self._seconds[Stage.PREFILL]
        wait_s = min(max(engine_wait_s, 0.0), observed_s)
        self._seconds[Stage.ENGINE_WAIT] = wait_s
        self._seconds[Stage.PREFILL] = observed_s - wait_s

    @property
    def traceparent(self) -> str:
        """The current stage's trace context for another process; empty for an unrecorded request."""
        return "" if self._trace is None else self._trace.traceparent

    def leave(self, now_s: float) -> None:
        """End the span of the current stage."""
        if self._trace is not None:
            self._trace.left(now_s)

    def finish(self, now_s: float) -> StageClock:
        """Return the clock as of ``now_s``."""
        self.enter(self.current, now_s)
        return StageClock(self._unix_us, *[round(seconds * 1e6) for seconds in self._seconds])


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

    @property
    def trace_id(self) -> str:
        """The id under which a collector has the trace, in hex."""
        return f"{self._root.get_span_context().trace_id:032x}"

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
