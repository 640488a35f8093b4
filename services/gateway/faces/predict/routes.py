"""The public inference protocol v2 over HTTP and gRPC: thin handlers over the rows service."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, InvalidInput, first_failure
from services.core.generation import Principal
from services.gateway.events import Received
from services.gateway.faces.openai.errors import public_message
from services.gateway.faces.openai.exchange import (
    BYTES,
    JSON,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    Handler,
    HttpLimits,
    rate_headers,
    read_body,
    unless_disconnected,
)
from services.gateway.faces.openai.rows import replay_headers
from services.gateway.faces.openai.server import model_of
from services.gateway.faces.predict.codecs import (
    EXTENSIONS,
    NAME,
    VERSION,
    InferCall,
    infer_answer,
    infer_call,
    infer_request,
    infer_response,
    metadata_of,
)
from services.gateway.rows.service import RowsService
from services.rpc import bounds
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.interceptors.arrival import many_requests
from services.runtime.identity import principal

_encode: Final = msgspec.json.Encoder().encode
_HEAD_LENGTH: Final = b"inference-header-content-length"
_INFERS: Final = "an inference request of the protocol v2"
_KINDS: Final = (JSON, BYTES)
_VERSION: Final = ("x-model-version",)
_INFER_HEADERS: Final = (
    "idempotency-key",
    "x-request-timeout-s",
    "x-session-key",
    "inference-header-content-length",
)
_NUMBER: Final = re.compile(rb"\d{1,9}")
_MODEL: Final = "/v2/models/{model:path}"


class PredictError(msgspec.Struct, frozen=True):
    """An error as the protocol has it."""

    error: str


def predict_error(error: FairwayError) -> bytes:
    """Return the JSON of an error."""
    return _encode(PredictError(public_message(error)))


class PredictFace:
    """The handlers of the routes."""

    def __init__(
        self, service: RowsService, limits: HttpLimits, bodies: BodyReader, not_ready: Callable[[], str]
    ) -> None:
        self._service = service
        self._limits = limits
        self._bodies = bodies
        self._not_ready = not_ready

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        """The longer paths come first: a model's name may contain a slash."""
        tenant, public = Access.TENANT, Access.PUBLIC
        routes: list[tuple[str, str, Access, Handler, str, dict[str, Any]]] = [
            ("GET", "/v2/health/live", public, self.live, "no body; 200 while the process runs", {}),
            ("GET", "/v2/health/ready", public, self.ready, "no body; 200, or 503 with the reason", {}),
        ]
        # A version in the path precedes that of the header.
        for path, named in ((_MODEL + "/versions/{version}", ()), (_MODEL, _VERSION)):
            own: dict[str, Any] = {"headers": named}
            infer = {"takes": _KINDS, "returns": _KINDS, "headers": (*_INFER_HEADERS, *named)}
            ready = "no body; 200 while a replica serves it, or a request starts one"
            routes += [
                ("POST", path + "/infer", tenant, self.infer, _INFERS, infer),
                ("GET", path + "/ready", tenant, self.model_ready, ready, own),
                ("GET", path, tenant, self.model, "no body; the tensors of a fixed-cost model", own),
            ]
        routes.append(("GET", "/v2", tenant, self.server, "no body; what the server supports", {}))
        errors: dict[str, Any] = {"error_body": predict_error, "error": PredictError}
        return tuple(
            ApiEndpoint(method, path, access, handler, accepts, **errors, **declared)
            for method, path, access, handler, accepts, declared in routes
        )

    async def live(self, exchange: Exchange) -> None:
        await exchange.reply.json(200, b'{"live":true}')

    async def ready(self, exchange: Exchange) -> None:
        reason = self._not_ready()
        await exchange.reply.json(503 if reason else 200, _encode({"ready": not reason}))

    async def server(self, exchange: Exchange) -> None:
        await exchange.reply.json(200, _encode({"name": NAME, "version": VERSION, "extensions": EXTENSIONS}))

    async def model(self, exchange: Exchange) -> None:
        route, signature = await self._service.describe(exchange.caller, _named(exchange))
        found = metadata_of(route, signature)
        await exchange.reply.json(200, _encode(found))

    async def model_ready(self, exchange: Exchange) -> None:
        await self._service.require_ready(exchange.caller, _named(exchange))
        await exchange.reply.json(200, b'{"ready":true}')

    async def infer(self, exchange: Exchange) -> None:
        call = await self._read(exchange)
        message, named = call.message, _named(exchange)
        message.model, message.version = named.model, named.version
        message.idempotency_key = exchange.headers.idempotency_key()
        message.session_key = exchange.headers.session_key() or ""
        work = self._service.infer(
            exchange.caller, message, received=exchange.received, timeout_s=exchange.headers.timeout_s()
        )
        found = await unless_disconnected(exchange.receive, exchange.reply, work)
        body, head_bytes = infer_answer(call, found)
        for header in (*rate_headers(found.answer), *replay_headers(found.answer)):
            exchange.reply.add_header(*header)
        if head_bytes is None:
            await exchange.reply.json(200, body)
            return
        exchange.reply.add_header(_HEAD_LENGTH, str(head_bytes).encode())
        await exchange.reply.json(200, body, content_type=b"application/octet-stream")

    async def _read(self, exchange: Exchange) -> InferCall:
        length = exchange.headers.one(_HEAD_LENGTH)
        if length is not None and not _NUMBER.fullmatch(length):
            raise InvalidInput("inference-header-content-length must be a number of bytes")
        head_bytes = None if length is None else int(length)
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            body = await read_body(exchange.headers, exchange.receive, self._limits, hold, is_binary=True)

            def parse(data: bytes) -> InferCall:
                return infer_call(data, head_bytes)

            return await self._bodies.parse(parse, body)


def _named(exchange: Exchange) -> inference_pb2.InferRequest:
    """Return a request for the model and version of the path, or the version of the header."""
    names: dict[str, Any] = exchange.scope["path_params"]
    version = names.get("version") or exchange.headers.model_version()
    return inference_pb2.InferRequest(model=model_of(exchange.scope), version=version)


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
        await self._service.require_ready(principal(), named)
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
