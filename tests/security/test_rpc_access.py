"""Every RPC has a rule, and every rule holds on a real server, for every kind of caller."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairway.v1 import inference_pb2, options_pb2
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.interceptors.access import access_table
from services.rpc.server import RpcServer, RpcService
from tests.support.rpc_services import rpc_methods, rpc_services
from tests.support.stack import ROOT

INTERNAL = "i" * 32
KEYS = {
    "tenant-key": Principal("t", KeyRole.TENANT, "acme"),
    "admin-key": Principal("a", KeyRole.ADMIN),
}
SERVICES = rpc_services()
METHODS = rpc_methods()
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
    services = [RpcService(each.descriptor, each.register, each.servicer()) for each in SERVICES]
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
    table = access_table(each.descriptor for each in SERVICES)
    assert len(table) == len(METHODS)
    assert all(rule and options_pb2.ACCESS_UNSPECIFIED not in rule for rule in table.values())


def test_reports_of_use_and_of_objectives_are_internal() -> None:
    table = access_table(each.descriptor for each in SERVICES)
    for method in ("/fairway.v1.UsageService/ReportUsage", "/fairway.v1.SliService/ReportSlis"):
        assert table[method] == {options_pb2.ACCESS_INTERNAL}, method


def test_the_roles_serve_these_services_and_no_other() -> None:
    """What a role registers is named by its descriptor: a service outside the protos would have no test."""
    roles = "".join(path.read_text() for path in (ROOT / "services/app/roles").glob("*.py"))
    registered = re.findall(r'services_by_name\["(\w+)"\]', roles)
    assert len(registered) == len(re.findall(r"\bRpcService\($", roles, re.MULTILINE))
    assert sorted(registered) == sorted(each.descriptor.name for each in SERVICES)


def test_a_service_without_a_rule_is_found() -> None:
    """Neither the table nor, with it, a server is built of one."""
    file = descriptor_pb2.FileDescriptorProto(name="planted.proto", package="planted")
    file.message_type.add(name="Request")
    file.service.add(name="Planted").method.add(
        name="Open", input_type=".planted.Request", output_type=".planted.Request"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    planted = pool.FindServiceByName("planted.Planted")
    with pytest.raises(ValueError, match=r"planted.Planted.Open has no access rule"):
        access_table([*(each.descriptor for each in SERVICES), planted])


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_caller_opens_what_its_rule_says_and_nothing_else(channel: Any, caller: str) -> None:
    key = CALLERS[caller]
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    for method in METHODS:
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
    assert {each.descriptor.full_name for each in SERVICES} <= named


async def test_an_unknown_method_is_unimplemented_not_open(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/fairway.v1.InferenceService/Nope")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
