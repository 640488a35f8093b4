"""The public inference protocol v2 over gRPC: thin handlers over the rows service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, first_failure
from services.core.generation import Principal
from services.gateway.events import Received
from services.gateway.faces.predict.codecs import (
    EXTENSIONS,
    NAME,
    VERSION,
    infer_request,
    infer_response,
    metadata_of,
    require_ready,
)
from services.gateway.rows.service import RowsService
from services.rpc import bounds
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.interceptors.access import principal
from services.rpc.interceptors.arrival import many_requests

Context = Any  # grpc's own type is for servicers of this project's protocol only
MAX_STREAM_REQUESTS: Final = 64  # requests of one stream that run or wait for their turn to be answered
WRITE_TIMEOUT_S: Final = 30.0

_Answer = v2_pb2.ModelStreamInferResponse


class PredictServicer(v2_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(
        self, service: RowsService, received: Callable[[], Received], not_ready: Callable[[], str]
    ) -> None:
        self._service = service
        self._received = received
        self._not_ready = not_ready

    async def ServerLive(
        self, request: v2_pb2.ServerLiveRequest, context: Context
    ) -> v2_pb2.ServerLiveResponse:
        return v2_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: v2_pb2.ServerReadyRequest, context: Context
    ) -> v2_pb2.ServerReadyResponse:
        return v2_pb2.ServerReadyResponse(ready=not self._not_ready())

    async def ModelReady(
        self, request: v2_pb2.ModelReadyRequest, context: Context
    ) -> v2_pb2.ModelReadyResponse:
        named = inference_pb2.InferRequest(model=request.name, version=request.version)
        route, _ = await self._service.describe(principal(), named)
        require_ready(route)
        return v2_pb2.ModelReadyResponse(ready=True)

    async def ServerMetadata(
        self, request: v2_pb2.ServerMetadataRequest, context: Context
    ) -> v2_pb2.ServerMetadataResponse:
        return v2_pb2.ServerMetadataResponse(name=NAME, version=VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: v2_pb2.ModelMetadataRequest, context: Context
    ) -> v2_pb2.ModelMetadataResponse:
        named = inference_pb2.InferRequest(model=request.name, version=request.version)
        route, signature = await self._service.describe(principal(), named)
        return v2_pb2.ModelMetadataResponse(**metadata_of(route, signature))

    async def ModelInfer(
        self, request: v2_pb2.ModelInferRequest, context: Context
    ) -> v2_pb2.ModelInferResponse:
        return await self._infer(principal(), request, context.time_remaining())

    async def ModelStreamInfer(  # type: ignore[override]  # the stubs support generators only
        self, request_iterator: AsyncIterator[v2_pb2.ModelInferRequest], context: Context
    ) -> None:
        many_requests()
        who = principal()
        # Bounds the requests of the stream: its reader waits while the queue is full.
        running: asyncio.Queue[asyncio.Task[_Answer] | None] = asyncio.Queue(MAX_STREAM_REQUESTS)
        try:
            with BoundedWrites(context, WRITE_TIMEOUT_S) as writes:
                await writes.open()
                async with TaskGroup() as group:

                    async def read() -> None:
                        async for request in request_iterator:
                            left_s = context.time_remaining()
                            await running.put(group.create_task(self._answer(who, request, left_s)))
                        await running.put(None)

                    group.create_task(read())
                    while (task := await running.get()) is not None:
                        await writes.write(await task)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _answer(
        self, who: Principal, request: v2_pb2.ModelInferRequest, left_s: float | None
    ) -> _Answer:
        """Return the answer of one request of a stream, its error included."""
        try:
            bounds.check(request)
            return _Answer(infer_response=await self._infer(who, request, left_s))
        except FairwayError as error:
            named = v2_pb2.ModelInferResponse(id=request.id[:256])
            return _Answer(error_message=f"{error.reason}: {error.message}", infer_response=named)

    async def _infer(
        self, who: Principal, request: v2_pb2.ModelInferRequest, left_s: float | None
    ) -> v2_pb2.ModelInferResponse:
        found = await self._service.infer(
            who, infer_request(request), received=self._received(), timeout_s=left_s
        )
        return infer_response(request, found)
