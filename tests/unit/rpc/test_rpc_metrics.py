"""RPCs are counted by what their callers get, streams among them, and arrive before their message is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairway.v1 import inference_pb2
from services.core.errors import QueueFull
from services.rpc.interceptors.arrival import NoteArrival, RpcArrival, arrival, many_requests
from services.rpc.interceptors.metrics import CountRpcs, RpcMetrics
from services.rpc.interceptors.outcome import ErrorStatus, TraceRpcs
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from services.runtime.telemetry.tracing import Tracing
from tests.support.waiting import until

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
COMPLETE, SESSION = f"{SERVICE.full_name}/Complete", f"{SERVICE.full_name}/Session"
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class Rig:
    """A server whose methods do what the test says."""

    def __init__(self) -> None:
        self.instruments = RpcMetrics(Metrics())
        self.arrived: list[RpcArrival] = []
        self.fail: Exception | None = None
        self.spans = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        clock = SystemClock()
        self.server = grpc.aio.server(
            interceptors=(
                NoteArrival(clock),
                CountRpcs([SERVICE], self.instruments, clock),
                TraceRpcs([SERVICE], Tracing(clock, provider.get_tracer("test")), clock),
                ErrorStatus(lambda: "inc_1"),
            )
        )
        empty: Any = {
            "request_deserializer": empty_pb2.Empty.FromString,
            "response_serializer": empty_pb2.Empty.SerializeToString,
        }
        handlers = {
            "Complete": grpc.unary_unary_rpc_method_handler(self._complete, **empty),
            "Session": grpc.stream_stream_rpc_method_handler(self._session, **empty),
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),)
        )
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _complete(self, request: Any, context: Any) -> Any:
        self.arrived.append(arrival())
        if self.fail is not None:
            raise self.fail
        return empty_pb2.Empty()

    async def _session(self, requests: Any, context: Any) -> None:
        many_requests()
        async for message in requests:
            self.arrived.append(arrival())
            await context.write(message)
        await asyncio.Event().wait()  # until the client's leaving cancels it

    def codes(self) -> dict[tuple[str, ...], float]:
        return {values: cell.value for values, cell in self.instruments.handled._cells.items()}

    async def settled(self, method: str) -> None:
        await until(lambda: not self.instruments.running.get(method))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.server.start()
    yield rig
    await rig.server.stop(0)


def channel_to(rig: Rig) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}")


CODEC: Any = {
    "request_serializer": empty_pb2.Empty.SerializeToString,
    "response_deserializer": empty_pb2.Empty.FromString,
}


async def test_a_call_is_counted_timed_and_has_its_trace(rig: Rig) -> None:
    async with channel_to(rig) as channel:
        await channel.unary_unary(f"/{COMPLETE}", **CODEC)(
            empty_pb2.Empty(), metadata=(("traceparent", TRACE),)
        )
    await rig.settled(COMPLETE)
    assert rig.codes() == {(COMPLETE, "OK"): 1.0}
    (span,) = rig.spans.get_finished_spans()
    assert (span.name, span.status.description) == (COMPLETE, None)
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == "1" * 32 + "-" + "2" * 16
    assert sum(rig.instruments.handling.cell(COMPLETE).counts) == 1
    (arrived,) = rig.arrived
    assert arrived.traceparent == TRACE
    assert arrived.at_s is not None


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("full"), "UNAVAILABLE"), (ZeroDivisionError(), "INTERNAL")]
)
async def test_an_error_is_counted_as_the_caller_gets_it(rig: Rig, error: Exception, code: str) -> None:
    rig.fail = error
    async with channel_to(rig) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{COMPLETE}", **CODEC)(empty_pb2.Empty())
    assert caught.value.code().name == code
    await rig.settled(COMPLETE)
    assert rig.codes() == {(COMPLETE, code): 1.0}
    (span,) = rig.spans.get_finished_spans()
    assert (span.name, span.status.description, span.parent) == (COMPLETE, code, None)
    assert not span.events, "an exception's text may hold what a client sent"


async def test_a_stream_is_open_while_it_is_and_its_requests_arrive_one_by_one(rig: Rig) -> None:
    async with channel_to(rig) as channel:
        call = channel.stream_stream(f"/{SESSION}", **CODEC)(metadata=(("traceparent", TRACE),))
        await call.write(empty_pb2.Empty())
        await call.read()
        assert rig.instruments.running[SESSION] == 1
        await call.write(empty_pb2.Empty())
        await call.read()
        call.cancel()
        await rig.settled(SESSION)
    assert rig.codes() == {(SESSION, "CANCELLED"): 1.0}
    assert [found.at_s for found in rig.arrived] == [None, None]
    assert {found.traceparent for found in rig.arrived} == {TRACE}
    assert rig.instruments.handling._cells == {}
    assert not rig.spans.get_finished_spans()
