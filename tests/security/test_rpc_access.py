"""Every RPC has a rule, and every rule holds on a real server, for every kind of caller."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    options_pb2,
    registry_pb2,
    registry_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.interceptors.access import access_table
from services.rpc.server import RpcServer, Service

INTERNAL = "i" * 32
KEYS = {
    "tenant-key": Principal("t", KeyRole.TENANT, "acme"),
    "admin-key": Principal("a", KeyRole.ADMIN),
}
MODULES = (
    (inference_pb2, inference_pb2_grpc),
    (v2_pb2, v2_pb2_grpc),
    (scheduler_pb2, scheduler_pb2_grpc),
    (worker_pb2, worker_pb2_grpc),
    (registry_pb2, registry_pb2_grpc),
    (controlplane_pb2, controlplane_pb2_grpc),
)
METHODS = [
    (service, method)
    for messages, _ in MODULES
    for service in messages.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
CALLERS = {
    "nobody": None,
    "garbage": "garbage",
    "tenant": "tenant-key",
    "admin": "admin-key",
    "internal": INTERNAL,
}
ALLOWED = {
    "tenant": options_pb2.ACCESS_TENANT,
    "admin": options_pb2.ACCESS_ADMIN,
    "internal": options_pb2.ACCESS_INTERNAL,
}


def authenticate(token: str | None) -> Principal:
    if token not in KEYS:
        raise Unauthenticated("the API key is not valid")
    return KEYS[token]


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    """Every service of the protos, with the base servicers: what is let in answers UNIMPLEMENTED."""
    services = []
    for messages, stubs in MODULES:
        for name, descriptor in messages.DESCRIPTOR.services_by_name.items():
            register = getattr(stubs, f"add_{name}Servicer_to_server")
            services.append(Service(descriptor, register, getattr(stubs, f"{name}Servicer")()))
    server = RpcServer(
        services,
        listen="127.0.0.1:0",
        internal_token=INTERNAL,
        new_incident=lambda: "inc_1",
        authenticate=authenticate,
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened
    await server.stop(0)


async def call(channel: Any, method: Any, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with asyncio.timeout(30):
        if method.client_streaming:  # no message: for the client a write after the refusal is INTERNAL
            stream = channel.stream_stream(path)(metadata=metadata)
            code: grpc.StatusCode = await stream.code()
            return code
        try:
            await channel.unary_stream(path)(b"", metadata=metadata).read()
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_every_method_has_a_rule() -> None:
    table = access_table({service.full_name: service for service, _ in METHODS}.values())
    assert len(table) == len(METHODS)
    assert all(rule and options_pb2.ACCESS_UNSPECIFIED not in rule for rule in table.values())


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_caller_opens_what_its_rule_says_and_nothing_else(channel: Any, caller: str) -> None:
    key = CALLERS[caller]
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    for _, method in METHODS:
        code = await call(channel, method, metadata)
        rule = method.GetOptions().Extensions[options_pb2.access]
        if caller in ("nobody", "garbage"):
            assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), (
                method.full_name
            )
        elif ALLOWED[caller] in rule:
            let_in = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
            assert code in let_in, method.full_name
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, method.full_name


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Bearer"),),
        (("authorization", "Basic tenant-key"),),
        (("authorization", "Bearer tenant-key"), ("authorization", "Bearer admin-key")),
        (("authorization", "Bearer tenant-keytenant-key"),),
        (("x-api-key", "tenant-key"),),
    ],
)
async def test_odd_credentials_open_nothing(channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
    method = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name["ListModels"]
    assert await call(channel, method, metadata) is grpc.StatusCode.UNAUTHENTICATED


async def test_health_answers_everybody(channel: Any) -> None:
    answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    assert answer == b"\x08\x02"  # NOT_SERVING until the role says otherwise


async def test_reflection_lists_every_service(channel: Any) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    named = {service.name for service in answer.list_services_response.service}
    assert {service.full_name for service, _ in METHODS} <= named


async def test_an_unknown_method_is_unimplemented_not_open(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/fairway.v1.InferenceService/Nope")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
