"""What strangers may make a server hold: open streams, messages that grow, a bug's own text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairway.v1 import inference_pb2, inference_pb2_grpc
from services.core.errors import InternalError
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.connections import MAX_STREAMS_OF_SOURCE
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import from_rpc_error

AUTH = (("authorization", "Bearer key"),)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.failure: BaseException = InternalError("cannot read /srv/secret at 0x7f00")
        self.prompts: list[int] = []

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Any
    ) -> inference_pb2.CompleteResponse:
        self.prompts.append(len(request.generation.prompt))
        raise self.failure


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, Servicer]]:
    servicer = Servicer()  # type: ignore[abstract]
    service = RpcService(
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        inference_pb2_grpc.add_InferenceServiceServicer_to_server,
        servicer,
    )
    running = RpcServer(
        [service],
        listen="127.0.0.1:0",
        internal_token="i" * 32,
        new_incident=lambda: "inc_9",
        authenticate=lambda token: Principal("k", KeyRole.TENANT, "acme"),
    )
    await running.start()
    yield f"127.0.0.1:{running.port}", servicer
    await running.stop(0)


def complete(prompt: str = "x") -> inference_pb2.CompleteRequest:
    return inference_pb2.CompleteRequest(generation=inference_pb2.Generation(model="m", prompt=prompt))


async def refused(
    call: Callable[[inference_pb2_grpc.InferenceServiceAsyncStub], Any], address: str
) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(inference_pb2_grpc.InferenceServiceStub(channel))
    return caught.value


class Panic(BaseException):
    """What PyO3 raises where a native library panics."""


@pytest.mark.parametrize(
    "failure", [InternalError("cannot read /srv/secret"), OSError("/srv/secret"), Panic("/srv/secret")]
)
async def test_a_bug_tells_its_incident_and_nothing_else(
    server: tuple[str, Servicer], failure: BaseException
) -> None:
    address, servicer = server
    servicer.failure = failure
    error = from_rpc_error(await refused(lambda stub: stub.Complete(complete(), metadata=AUTH), address))
    assert isinstance(error, InternalError)
    assert "/srv" not in error.message
    assert error.metadata == {"incident": "inc_9"}


async def test_no_caller_may_compress(server: tuple[str, Servicer]) -> None:
    address, servicer = server
    bomb = complete("a" * (MAX_MESSAGE_BYTES + 1))
    error = await refused(
        lambda stub: stub.Complete(bomb, metadata=AUTH, compression=grpc.Compression.Gzip), address
    )
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert servicer.prompts == []


async def test_streams_without_credentials_are_counted_and_checks_go_on(
    server: tuple[str, Servicer],
) -> None:
    address, _ = server
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches: list[Any] = []
        async with asyncio.timeout(20):
            for _ in range(MAX_STREAMS_OF_SOURCE):  # in turn: few calls at once may wait for their message
                watches.append(stub.Watch(request))
                await watches[-1].read()
        async with grpc.aio.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        ) as other:
            another: Any = health_pb2_grpc.HealthStub(other)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await another.Watch(request).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await another.Check(request, timeout=5)
            watches.pop().cancel()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await another.Watch(request).read()
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.02)
                    else:
                        break
