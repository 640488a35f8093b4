"""SchedulerService over gRPC: converts the streams of the service. Each stream has one writer, its
handler."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.core.errors import InvalidInput, first_failure
from services.ports.clock import Clock
from services.ports.streams import MessageStream, ReportAnswer, ReportStream, StreamLost
from services.rpc import bounds
from services.rpc.bounded_writes import send_headers
from services.rpc.convert.scheduler import (
    counters_to_proto,
    decision_to_proto,
    explained_from_proto,
    explanation_to_proto,
    frame_to_proto,
    leadership,
    place_from_proto,
    pool_to_proto,
    report_from_proto,
    slots_from_proto,
    timestamp,
    worker_to_proto,
)
from services.rpc.server import GrpcServerStream, woken_within
from services.scheduler.service import GatewayPlacementStream, SchedulerService

log = structlog.get_logger()
Context = grpc.aio.ServicerContext[Any, Any]
GatewayMessages: TypeAlias = MessageStream[scheduler_pb2.ConnectResponse, scheduler_pb2.ConnectRequest]
WorkerMessages: TypeAlias = MessageStream[scheduler_pb2.ReportResponse, scheduler_pb2.ReportRequest]

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
        await send_headers(context)
        await self.serve_gateway(GrpcServerStream(request_iterator, context))

    async def Report(  # type: ignore[override]  # a coroutine that writes
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Context
    ) -> None:
        await send_headers(context)
        await self.serve_worker(GrpcServerStream(request_iterator, context))

    async def serve_gateway(self, stream: GatewayMessages) -> None:
        """Place for the gateway until its stream ends; what it still has queued is then withdrawn."""
        hello = await _hello(stream)
        woken = asyncio.Event()
        placements = self._service.open(hello.gateway_id, woken.set, zone=hello.zone)
        try:
            await _read_and_write(
                stream.read_each(_Places(placements).read),
                self._write_outcomes(placements, woken, stream),
            )
        finally:
            placements.close()

    async def serve_worker(self, stream: WorkerMessages) -> None:
        """Apply the worker's reports until its stream ends."""
        woken = asyncio.Event()
        reports = self._service.open_report(woken.set)
        try:
            # Leadership is written before the first report is read, so that a worker opens its streams in
            # the same order as this server.
            await stream.write(self._answer(ReportAnswer(reports.epoch)))
            await _read_and_write(
                stream.read_each(_Reports(reports).read), self._write_answers(reports, woken, stream)
            )
        finally:
            reports.close()

    async def ListPools(
        self, request: scheduler_pb2.ListPoolsRequest, context: Context
    ) -> scheduler_pb2.ListPoolsResponse:
        size, token = request.page_size, request.page_token
        if request.only_load:
            epoch, pools, following = self._service.loads(size=size, token=token)
        else:
            epoch, pools, following = self._service.pools(size=size, token=token, tenant=request.tenant)
        return scheduler_pb2.ListPoolsResponse(
            pools=[pool_to_proto(pool) for pool in pools],
            next_page_token=following,
            leadership=leadership(epoch, self._leader_id),
        )

    async def Explain(
        self, request: scheduler_pb2.ExplainRequest, context: Context
    ) -> scheduler_pb2.ExplainResponse:
        epoch, decisions, since_unix_s = self._service.explain(request.request_id)
        rows = () if decisions else await self._service.explain_rows(request.request_id)
        return scheduler_pb2.ExplainResponse(
            decisions=[decision_to_proto(decision) for decision in decisions],
            leadership=leadership(epoch, self._leader_id),
            since=timestamp(since_unix_s),
            rows=map(explanation_to_proto, rows),
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
        self, placements: GatewayPlacementStream, woken: asyncio.Event, stream: GatewayMessages
    ) -> NoReturn:
        """Write leadership, then outcomes and heartbeats.

        A message with leadership contains the pressures of all pools; a heartbeat repeats the last ones.
        """
        pressures: Iterable[scheduler_pb2.PoolPressure] = ()
        beat_s = -math.inf
        while True:
            # The leader's own message is due first. Gateways accept a silence of several heartbeats.
            due_s = beat_s + 1.5 * self._heartbeat_s - self._clock.monotonic_s()
            if due_s <= 0:
                leader = leadership(placements.epoch, self._leader_id)
                await stream.write(scheduler_pb2.ConnectResponse(leadership=leader, pressures=pressures))
                beat_s = self._clock.monotonic_s()
                continue
            await woken_within(woken, due_s)
            while (frame := placements.take()) is not None:
                message = frame_to_proto(frame)
                if frame.pressures is not None:
                    message.leadership.CopyFrom(leadership(placements.epoch, self._leader_id))
                    pressures = message.pressures
                    beat_s = self._clock.monotonic_s()
                await stream.write(message)

    async def _write_answers(
        self, reports: ReportStream, woken: asyncio.Event, stream: WorkerMessages
    ) -> NoReturn:
        """Write answers, each for several reports, and heartbeats."""
        answered = 0
        while True:
            await woken_within(woken, self._heartbeat_s)
            answer = reports.take() or ReportAnswer(reports.epoch, answered)
            answered = answer.report
            await stream.write(self._answer(answer))
            await self._clock.sleep(_ANSWER_S)

    def _answer(self, answer: ReportAnswer) -> scheduler_pb2.ReportResponse:
        return scheduler_pb2.ReportResponse(
            leadership=leadership(answer.epoch, self._leader_id),
            report=answer.report,
            counters=counters_to_proto(answer.counters),
        )


async def _read_and_write(
    reading: Coroutine[Any, Any, NoReturn], writing: Coroutine[Any, Any, NoReturn]
) -> None:
    """Read and write until the peer ends the stream. Raises the error that ended it instead."""
    try:
        async with TaskGroup() as group:
            group.create_task(reading)
            await writing
    except BaseExceptionGroup as failures:
        failure = first_failure(failures)
        if not isinstance(failure, StreamLost):
            raise failure from None


async def _hello(stream: GatewayMessages) -> scheduler_pb2.GatewayHello:
    """Return the gateway's first message. Raises InvalidInput when it is no hello or does not arrive in
    time."""
    try:
        first = await stream.read(_HELLO_S)
    except StreamLost:
        raise InvalidInput("a gateway must send hello first", field="hello") from None
    if {field.name for field, _ in first.ListFields()} != {"hello"}:
        raise InvalidInput("a gateway's first message must contain only hello", field="hello")
    return first.hello


class _Places:
    """Reads the messages of a gateway."""

    def __init__(self, placements: GatewayPlacementStream) -> None:
        self._placements = placements

    def read(self, message: scheduler_pb2.ConnectRequest) -> None:
        if message.HasField("hello"):
            raise InvalidInput("a gateway must send hello only once", field="hello")
        bounds.check_but(message, "places")
        if message.places:
            self._placements.submit([place_from_proto(place) for place in self._valid(message.places)])
        if message.HasField("cancel"):
            self._placements.cancel(message.cancel.placement_ids)
        if message.slot_demands or message.slot_returns:
            self._placements.demand(*slots_from_proto(message))
        for request_id, found in explained_from_proto(message).items():
            self._placements.explained(request_id, found)

    def _valid(self, places: Iterable[scheduler_pb2.PlaceRequest]) -> Iterator[scheduler_pb2.PlaceRequest]:
        """Yield the valid placements; each invalid one is refused alone."""
        for place in places:
            try:
                bounds.check(place, "place.")
            except InvalidInput as error:
                field, request_id = error.metadata["field"], place.request_id[:64]
                log.error("place.out_of_bounds", field=field, request_id=request_id)
                self._placements.refuse(place.placement_id, error)
            else:
                yield place


class _Reports:
    """Reads the reports of a worker."""

    def __init__(self, reports: ReportStream) -> None:
        self._reports = reports
        self._expected = 1

    def read(self, message: scheduler_pb2.ReportRequest) -> None:
        if message.report != self._expected:
            text = f"report {message.report} received, {self._expected} expected"
            raise InvalidInput(text, field="report")
        self._expected += 1
        self._reports.report(message.report, report_from_proto(message))
