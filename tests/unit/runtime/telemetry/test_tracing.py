"""Trace contexts as clients send them; a queue that never blocks; lines within their budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from services.runtime.clock import SystemClock
from services.runtime.telemetry.logging import LineBudget, clean_id
from services.runtime.telemetry.otlp import SpanQueue, sampler_of
from services.runtime.telemetry.tracing import Tracing, parse_traceparent, traceparent_of

GOOD = "00-" + "4b" * 16 + "-" + "00f067aa0ba902b7" + "-01"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GOOD.upper(),
        GOOD + "-x",
        "01" + GOOD[2:],
        "00-" + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + "-01",
    ],
)
def test_what_is_no_trace_context_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_trace_context_is_read() -> None:
    context = parse_traceparent(GOOD)
    assert context is not None
    assert f"{context.trace_id:032x}" == "4b" * 16
    assert context.trace_flags.sampled


class Stuck(SpanExporter):
    """A collector that answers when it is told to, and then refuses."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go_on.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        return None


def test_a_collector_that_does_not_answer_costs_spans_and_nothing_else() -> None:
    exporter = Stuck()
    queue = SpanQueue(exporter, max_queued=8)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracing = Tracing(SystemClock(), provider.get_tracer("test"), queue)
    clock = SystemClock()

    def end_one() -> None:
        span = tracing.start("x", clock.monotonic_s(), None)
        assert parse_traceparent(traceparent_of(span)) is not None
        tracing.end(span, clock.monotonic_s(), {"a": 1}, "INTERNAL")

    end_one()
    assert exporter.asked.wait(30)
    for _ in range(20):
        end_one()
    assert queue.dropped_full == 12
    exporter.go_on.set()
    tracing.close()
    assert queue.dropped_failed == 9
    assert queue.exported == 0


def test_what_waits_is_sent_when_the_process_ends() -> None:
    exporter = InMemorySpanExporter()
    queue = SpanQueue(exporter)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracing = Tracing(SystemClock(), provider.get_tracer("test"), queue)
    for _ in range(1500):
        tracing.end(tracing.start("x", 0.0, None), 1.0)
    tracing.close()
    assert queue.exported == len(exporter.get_finished_spans()) == 1500


def recorded(parents: list[SpanContext | None], *, ratio: float, follows: bool) -> list[bool]:
    """Return for each parent whether a span below it is recorded, and a span of a stage below that."""
    provider = TracerProvider(sampler_of(ratio=ratio, follows=follows, rng=Random(7)), shutdown_on_exit=False)
    tracing = Tracing(SystemClock(), provider.get_tracer("test"))
    found = []
    for parent in parents:
        root = tracing.start("request", 0.0, parent)
        stage = tracing.start("stage", 0.0, root.get_span_context())
        assert stage.is_recording() is root.is_recording()
        found.append(root.is_recording())
    return found


def remote(trace_id: int, *, sampled: bool) -> SpanContext:
    return SpanContext(trace_id, 1, is_remote=True, trace_flags=TraceFlags(int(sampled)))


def test_a_client_neither_makes_a_gateway_record_nor_keeps_it_from_it() -> None:
    flagged: list[SpanContext | None] = [remote(number, sampled=True) for number in range(1, 1001)]
    assert not any(recorded(flagged, ratio=0.0, follows=False))
    # Low ids are the ones that a sampler by id takes first.
    assert 60 <= sum(recorded(flagged, ratio=0.1, follows=False)) <= 140
    unflagged: list[SpanContext | None] = [remote(number, sampled=False) for number in range(1, 1001)]
    assert 60 <= sum(recorded(unflagged, ratio=0.1, follows=False)) <= 140
    assert 60 <= sum(recorded([None] * 1000, ratio=0.1, follows=False)) <= 140
    assert all(recorded([*unflagged[:5], None], ratio=1.0, follows=False))


def test_what_is_behind_a_gateway_follows_it() -> None:
    parents = [remote(5, sampled=True), remote(5, sampled=False), None]
    assert recorded(parents, ratio=1.0, follows=True) == [True, False, False]


def test_tracing_that_is_off_records_nothing() -> None:
    tracing = Tracing(SystemClock())
    assert not tracing.on
    assert tracing.record("x", GOOD, (0.0, 1.0)) == ""


def test_lines_are_bounded_and_what_is_missing_is_counted() -> None:
    now = [100.0]
    budget = LineBudget(lambda: now[0], 2.0)
    assert [budget.take() for _ in range(4)] == [True, True, False, False]
    assert budget.suppressed == 2
    now[0] += 0.5
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] += 3600.0
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_less_than_a_line_a_second_is_some() -> None:
    now = [100.0]
    budget = LineBudget(lambda: now[0], 0.5)
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] += 2.0
    assert [budget.take() for _ in range(2)] == [True, False]
    none = LineBudget(lambda: now[0], 0.0)
    now[0] += 1000.0
    assert not none.take()


@pytest.mark.parametrize("text", ["a\nb", "x" * 129, "", 'a"b', None, b"bytes", "{}"])
def test_a_clients_id_that_could_forge_a_line_is_left_out(text: object) -> None:
    assert clean_id(text) == ""


def test_a_harmless_clients_id_stays() -> None:
    assert clean_id("Trace.7:a_b-c") == "Trace.7:a_b-c"
