"""The worker's RPCs: one muxed stream per gateway, and the operators' calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog

from fairway.mirror import Mirror
from fairway.task_group import TaskGroup
from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.core.errors import InvalidInput
from services.core.generation import NotAdmittedReason
from services.ports.clock import Clock
from services.ports.streams import MessageStream, StreamLost, WorkerStream, WorkerStreams
from services.rpc import bounds
from services.rpc.bounded_writes import send_headers
from services.rpc.convert.inference import seconds_of
from services.rpc.convert.rows import row_from_proto
from services.rpc.convert.worker import LOADED, frame_to_proto, start_from_proto
from services.rpc.server import GrpcServerStream, woken_within
from services.worker.agent.agent import VersionStatus, WorkerAgent, WorkerStatus

log = structlog.get_logger()
HEARTBEAT_S: Final = 1.0
# How long an acceptance waits for its first tokens, which would otherwise wait for its write.
ACCEPTED_S: Final = 0.002
HEARTBEAT: Final = worker_pb2.ExecuteResponse(heartbeat=worker_pb2.ExecuteResponse.Heartbeat())
_VERSION: Final = Mirror(VersionStatus, worker_pb2.LoadedVersion, {"record": LOADED})
_STATUS: Final = Mirror(WorkerStatus, worker_pb2.GetWorkerResponse, {"versions": _VERSION.each("versions")})


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, host: WorkerStreams, worker: WorkerAgent, clock: Clock) -> None:
        self._host = host
        self._worker = worker
        self._clock = clock

    async def Execute(  # type: ignore[override]  # the stubs type generators only
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> None:
        await send_headers(context)
        await self.serve_gateway(GrpcServerStream(request_iterator, context))

    async def serve_gateway(
        self, stream: MessageStream[worker_pb2.ExecuteResponse, worker_pb2.ExecuteRequest]
    ) -> None:
        """Run the gateway's sequences until it ends the stream; those that still run are then cancelled."""
        wake = asyncio.Event()
        sequences = self._host.open(wake.set)
        try:
            async with TaskGroup() as group:
                writer = _Writer(sequences, wake, stream)
                group.create_task(writer.run())
                group.create_task(writer.beat(self._clock))
                await stream.read_each(lambda request: apply(request, sequences))
        except BaseExceptionGroup as errors:  # the first ended the stream; the rest are cancellations
            if not isinstance(errors.exceptions[0], StreamLost):
                raise errors.exceptions[0] from None
        finally:
            sequences.close()

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: Any
    ) -> worker_pb2.GetWorkerResponse:
        return _STATUS.to_proto(self._worker.status())

    async def ReadSteps(
        self, request: worker_pb2.ReadStepsRequest, context: Any
    ) -> worker_pb2.ReadStepsResponse:
        return self._worker.recorder.read(request.request_id, request.first_step)

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: Any
    ) -> worker_pb2.DrainWorkerResponse:
        timeout = request.timeout
        remaining = await self._worker.drain(seconds_of(timeout))
        return worker_pb2.DrainWorkerResponse(remaining=remaining)


def apply(request: worker_pb2.ExecuteRequest, stream: WorkerStream) -> None:
    """Apply one message: cancels first, since they free blocks for its starts.

    A start or a row out of bounds is rejected alone; the stream continues. Raises InvalidInput if another
    part of the message is out of bounds.
    """
    bounds.check_but(request, "starts", "rows")
    if request.cancels:
        stream.cancel(request.cancels)
    for start in request.starts:
        if _within_bounds(start, stream):
            stream.start(start.handle, start_from_proto(start))
    for row in request.rows:
        if _within_bounds(row, stream):
            stream.start_row(row.handle, row_from_proto(row))
    if request.credit.handles:
        stream.credit(request.credit.handles, request.credit.tokens)


def _within_bounds(start: worker_pb2.StartSequence | worker_pb2.StartRow, stream: WorkerStream) -> bool:
    try:
        bounds.check(start, "start.")
    except InvalidInput as error:
        log.error("start.out_of_bounds", field=error.metadata["field"], request_id=start.request_id[:64])
        stream.refuse(start.handle, NotAdmittedReason.INVALID)
        return False
    return True


class _Writer:
    """The only task that writes to the stream; all changes since its last write form one message."""

    def __init__(
        self,
        sequences: WorkerStream,
        wake: asyncio.Event,
        stream: MessageStream[worker_pb2.ExecuteResponse, worker_pb2.ExecuteRequest],
    ) -> None:
        self._sequences = sequences
        self._wake = wake
        self._stream = stream
        self._silent = False
        self._beat_due = False

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._sequences.only_accepted:
                await woken_within(self._wake, ACCEPTED_S)
            while (frame := self._sequences.take()) is not None:
                self._silent = False
                await self._stream.write(frame_to_proto(frame))
            if self._beat_due:
                self._beat_due = False
                await self._stream.write(HEARTBEAT)

    async def beat(self, clock: Clock) -> None:
        """Request a heartbeat after each second without another message."""
        while True:
            self._silent = True
            await clock.sleep(HEARTBEAT_S)
            if self._silent:
                self._beat_due = True
                self._wake.set()
