"""Two gateways on one Redis, each with its gRPC and its HTTP face."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.adapters.redis.idempotency import RedisIdempotency
from services.core.generation import Principal
from services.core.records import KeyRole
from services.gateway.events import Received
from services.gateway.faces.grpc.servicer import InferenceServicer
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.openai.routes import build_app
from services.gateway.faces.openai.server import HttpServer
from services.gateway.faces.responses.background import ResponseParts
from services.gateway.responses.store import ResponseStore
from services.ports.idempotency import RecordLimits
from services.rpc.server import RpcServer, RpcService
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from services.runtime.ids import Ids
from tests.support.keyed_gateways import NAMES_SECRET, Fleet, Gateway, gateways
from tests.support.memory_batches import memory_batches
from tests.support.no_rows import NoRows

CLOCK = SystemClock()
AUTH = (("authorization", "Bearer key"),)


@dataclass
class Faces:
    """Two gateways, of each a gRPC and an HTTP face."""

    fleet: Fleet
    gateways: list[Gateway]
    stubs: list[inference_pb2_grpc.InferenceServiceAsyncStub]
    urls: list[str]

    async def post(self, gateway: int, path: str, body: Any, *keys: str) -> tuple[int, dict[str, str], bytes]:
        return await self.ask(gateway, "POST", path, json.dumps(body).encode(), *keys)

    async def ask(
        self, gateway: int, method: str, path: str, data: bytes | None = None, *keys: str
    ) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(self.urls[gateway] + path, data, method=method)
        request.add_header("authorization", "Bearer key")
        request.add_header("content-type", "application/json")
        for key in keys:
            request.add_unredirected_header("idempotency-key", key)

        def send() -> tuple[int, dict[str, str], bytes]:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, dict(answer.headers), answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, dict(error.headers), error.read()

        return await asyncio.to_thread(send)


class Caller:
    """Every key is the tenant's."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def authenticate(self, credentials: str | None) -> Principal:
        return Principal("k", KeyRole.TENANT, self._tenant)


@asynccontextmanager
async def keyed_faces(
    redis_url: str, *, audit: AuditRecorder | None = None, **options: Any
) -> AsyncIterator[Faces]:
    fleet = Fleet(audit=audit)
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(gateways(redis_url, fleet, 2, **options))
        stubs = [await stack.enter_async_context(_grpc(gateway)) for gateway in pair]
        urls = [await stack.enter_async_context(_http(gateway, redis_url)) for gateway in pair]
        yield Faces(fleet, pair, stubs, urls)


@asynccontextmanager
async def _grpc(gateway: Gateway) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    numbers = count()
    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["InferenceService"],
                inference_pb2_grpc.add_InferenceServiceServicer_to_server,
                InferenceServicer(
                    gateway.service,
                    NoRows(),
                    lambda: Received(CLOCK.monotonic_s(), 1, f"req_{gateway.name}_{next(numbers)}"),
                    heartbeat_s=5.0,
                ),
            )
        ],
        listen="127.0.0.1:0",
        internal_token="i" * 32,
        new_incident=lambda: "inc_2",
        authenticate=lambda token: Principal("k", KeyRole.TENANT, gateway.fleet.tenant),
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(0)


@asynccontextmanager
async def _http(gateway: Gateway, redis_url: str) -> AsyncIterator[str]:
    records = RedisIdempotency(redis_url, CLOCK, RecordLimits(lease_s=1.0), timeout_s=2.0)
    store = ResponseStore(records, NAMES_SECRET, gateway.name, CLOCK)
    app = build_app(
        gateway.service,
        NoRows(),
        memory_batches(),
        Caller(gateway.fleet.tenant),
        CLOCK,
        Ids(),
        ResponseParts(store, gateway.supervisor, lambda: "inc_1", remembered_s=86_400.0),
        event_secret=b"e" * 32,
        limits=HttpLimits(100_000),
    )
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop(0.5)
        await records.close()
