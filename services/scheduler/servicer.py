"""SchedulerService over gRPC: converts the streams of the service. Each stream has one writer, its
handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

import grpc
import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.core.errors import InvalidInput, first_failure
from services.ports.clock import Clock
from services.ports.report_stream import ReportAnswer
from services.rpc import bounds
from services.rpc.bounded_writes import send_headers
from services.rpc.convert.decisions import decision_to_proto, timestamp, worker_to_proto
from services.rpc.convert.queues import pool_to_proto
from services.rpc.convert.scheduler import (
    counters_to_proto,
    frame_to_proto,
    leadership,
    place_from_proto,
    report_from_proto,
)
from services.scheduler.service import GatewayPlacementStream, SchedulerService, WorkerReportStream

log = structlog.get_logger()
Context = grpc.aio.ServicerContext[Any, Any]

_HELLO_S: Final = 10.0
_ANSWER_S: Final = 0.05  # reports of one worker within this time share an answer


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self, service: SchedulerService, clock: Clock, *, leader_id: str, heartbeat_s: float = 1.0
    ) -> None:
        self._service = service
        self._clock = clock
        self._leader_id = leader_id
        self._heartbeat_s = heartbeat_s

    async def Connect(  # type: ignore[override]  # a coroutine that writes
        self, request_iterator: AsyncIterator[scheduler_pb2.ConnectRequest], context: Context
    ) -> None:
        hello = await _hello(request_iterator)
        woken = asyncio.Event()
        stream = self._service.open(hello.gateway_id, woken.set, zone=hello.zone)
        try:
            await send_headers(context)
            async with TaskGroup() as group:
                reading = group.create_task(_read_places(request_iterator, stream))
                reading.add_done_callback(lambda _: woken.set())
                await self._write_outcomes(stream, reading, woken, context)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            stream.close()

    async def Report(  # type: ignore[override]  # a coroutine that writes
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Context
    ) -> None:
        woken = asyncio.Event()
        stream = self._service.open_report(woken.set)
        try:
            await send_headers(context)
            async with TaskGroup() as group:
                # Leadership is written before the first report is read, so that a worker opens its streams in
                # the same order as this server.
                await context.write(self._heard(ReportAnswer(stream.epoch)))
                reading = group.create_task(_read_reports(request_iterator, stream))
                reading.add_done_callback(lambda _: woken.set())
                await self._write_answers(stream, reading, woken, context)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            stream.close()

    async def ListPools(
        self, request: scheduler_pb2.ListPoolsRequest, context: Context
    ) -> scheduler_pb2.ListPoolsResponse:
        epoch, pools, following = self._service.pools(
            size=request.page_size, token=request.page_token, tenant=request.tenant
        )
        return scheduler_pb2.ListPoolsResponse(
            pools=[pool_to_proto(pool) for pool in pools],
            next_page_token=following,
            leadership=leadership(epoch, self._leader_id),
        )

    async def Explain(
        self, request: scheduler_pb2.ExplainRequest, context: Context
    ) -> scheduler_pb2.ExplainResponse:
        epoch, decisions, since_unix_s = self._service.explain(request.request_id)
        return scheduler_pb2.ExplainResponse(
            decisions=[decision_to_proto(decision) for decision in decisions],
            leadership=leadership(epoch, self._leader_id),
            since=timestamp(since_unix_s),
        )

    async def ListReporters(
        self, request: scheduler_pb2.ListReportersRequest, context: Context
    ) -> scheduler_pb2.ListReportersResponse:
        epoch, workers, following = self._service.workers(size=request.page_size, token=request.page_token)
        return scheduler_pb2.ListReportersResponse(
            reporters=[worker_to_proto(worker) for worker in workers],
            next_page_token=following,
            leadership=leadership(epoch, self._leader_id),
        )

    async def _write_outcomes(
        self,
        stream: GatewayPlacementStream,
        reading: asyncio.Task[None],
        woken: asyncio.Event,
        context: Context,
    ) -> None:
        """Write leadership, then outcomes and heartbeats until the gateway closed its side.

        A message with leadership contains the pressures of all pools; a heartbeat repeats the last ones.
        """
        beat = scheduler_pb2.ConnectResponse(leadership=leadership(stream.epoch, self._leader_id))
        await context.write(beat)
        beat_s = self._clock.monotonic_s()
        while not reading.done():
            # The leader's own message is due first. Gateways accept a silence of several heartbeats.
            due_s = beat_s + 1.5 * self._heartbeat_s - self._clock.monotonic_s()
            if due_s <= 0:
                await context.write(beat)
                beat_s = self._clock.monotonic_s()
                continue
            await _wait(woken, due_s)
            while (frame := stream.take()) is not None:
                message = frame_to_proto(frame)
                if frame.pressures is not None:
                    message.leadership.CopyFrom(beat.leadership)
                    del beat.pressures[:]
                    beat.pressures.extend(message.pressures)
                    beat_s = self._clock.monotonic_s()
                await context.write(message)

    async def _write_answers(
        self, stream: WorkerReportStream, reading: asyncio.Task[None], woken: asyncio.Event, context: Context
    ) -> None:
        """Write answers, each for several reports, and heartbeats, until the worker closed its side."""
        answered = 0
        while not reading.done():
            await _wait(woken, self._heartbeat_s)
            answer = stream.take() or ReportAnswer(stream.epoch, answered)
            answered = answer.report
            await context.write(self._heard(answer))
            await self._clock.sleep(_ANSWER_S)

    def _heard(self, answer: ReportAnswer) -> scheduler_pb2.ReportResponse:
        return scheduler_pb2.ReportResponse(
            leadership=leadership(answer.epoch, self._leader_id),
            report=answer.report,
            counters=counters_to_proto(answer.counters),
        )


async def _hello(requests: AsyncIterator[scheduler_pb2.ConnectRequest]) -> scheduler_pb2.GatewayHello:
    """Return the gateway's first message. Raises InvalidInput when it is no hello or does not arrive in
    time."""
    try:
        async with asyncio.timeout(_HELLO_S):
            first = await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise InvalidInput("a gateway must send hello first", field="hello") from None
    if not first.HasField("hello") or first.places or first.HasField("cancel"):
        raise InvalidInput("a gateway's first message must contain only hello", field="hello")
    return first.hello


def _within_bounds(
    places: Iterable[scheduler_pb2.PlaceRequest], stream: GatewayPlacementStream
) -> Iterator[scheduler_pb2.PlaceRequest]:
    """Yield the valid placements; each invalid one is refused alone."""
    for place in places:
        try:
            bounds.check(place, "place.")
        except InvalidInput as error:
            log.error("place.out_of_bounds", field=error.metadata["field"], request_id=place.request_id[:64])
            stream.refuse(place.placement_id, error)
        else:
            yield place


async def _read_places(
    requests: AsyncIterator[scheduler_pb2.ConnectRequest], stream: GatewayPlacementStream
) -> None:
    async for message in requests:
        if message.HasField("hello"):
            raise InvalidInput("a gateway must send hello only once", field="hello")
        bounds.check_but(message, "places")
        if message.places:
            stream.submit([place_from_proto(place) for place in _within_bounds(message.places, stream)])
        if message.HasField("cancel"):
            stream.cancel(message.cancel.placement_ids)


async def _read_reports(
    requests: AsyncIterator[scheduler_pb2.ReportRequest], stream: WorkerReportStream
) -> None:
    expected = 1
    async for message in requests:
        if message.report != expected:
            raise InvalidInput(f"report {message.report} received, {expected} expected", field="report")
        expected += 1
        stream.report(message.report, report_from_proto(message))


async def _wait(woken: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set or after ``timeout_s``, and clear the event; pending data stays in the
    stream."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await woken.wait()
    woken.clear()
