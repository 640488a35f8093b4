"""Every RPC has a rule, and every rule holds on a real server, for every kind of caller."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairway.v1 import inference_pb2, options_pb2
from services.core.records import KeyRole
from services.rpc.interceptors.access import access_table
from services.rpc.server import RpcServer, RpcService
from tests.support.credentials import Credentials
from tests.support.oidc_provider import oidc_provider
from tests.support.rpc_services import called, rpc_methods, rpc_services
from tests.support.stack import ROOT
from tests.support.waiting import until

INTERNAL = "i" * 32
SERVICES = rpc_services()
METHODS = rpc_methods()
ROLES = {role: options_pb2.Access.Value(f"ACCESS_{role.name}") for role in KeyRole}
ALLOWED = {f"{kind} of {role}": access for role, access in ROLES.items() for kind in ("key", "token")}
ALLOWED["internal token"] = options_pb2.ACCESS_INTERNAL
# What only some roles may call in the control plane, the registry and the workers, by its verb and noun.
OF_TENANTS = {"GetTenant", "ListTenants", "GetKey", "ListKeys"}
OF_KEYS = {"CreateKey", "UpdateKey", "DeleteKey", "RotateKey"}
OF_USE = {"GetBudget", "ListBudgets", "ListUsage"}
OF_ADMINS = {f"{verb}{noun}" for verb in ("Create", "Update", "Delete") for noun in ("Tenant", "Budget")}
OF_ADMINS |= {"UpdateSignerPolicy"}
OF_ADMINS |= {"EraseTenant", "RotateTenantKey"}
OF_REQUESTS = {"ExplainPlacement", "ListQuarantined", "ListFinishedRequests"}
PUBLISHING = {"FindMissingChunks", "UploadChunk", "DownloadChunk", "SetTag", "CollectGarbage"}
READS = ("Get", "List", "Watch")
DATA_PLANE = ("InferenceService", "GRPCInferenceService")
INTERNAL_SERVICES = (
    "SchedulerService",
    "FollowerService",
    "ChunkService",
    "UsageService",
    "SliService",
    "ExternalScaler",
)


@pytest.fixture(scope="module")
def credentials() -> Iterator[Credentials]:
    with oidc_provider() as provider:
        yield Credentials(provider)


@pytest.fixture
async def channel(credentials: Credentials) -> AsyncIterator[Any]:
    """Every service of the protos, with the base servicers: what is let in answers UNIMPLEMENTED."""
    services = [RpcService(each.descriptor, each.register, each.servicer()) for each in SERVICES]
    server = RpcServer(
        services,
        listen="127.0.0.1:0",
        internal_token=INTERNAL,
        new_incident=lambda: "inc_1",
        authenticate=credentials.directory.authenticate,
    )
    await server.start()
    reading = asyncio.create_task(credentials.tokens.run())
    await until(lambda: not credentials.tokens.problem())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened
    await server.stop(0)
    reading.cancel()
    await asyncio.wait({reading})


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


def test_each_role_has_the_methods_that_are_its_own() -> None:
    """The rules in the protos by another description of them: what a role may call, and nothing else."""
    for method in METHODS:
        name, service = method.name, method.containing_service.name
        rule = {role for role, access in ROLES.items() if access in _rule(method)}
        of_tenant = {KeyRole.TENANT, KeyRole.TENANT_ADMIN}
        staff = {KeyRole.OPERATOR, KeyRole.ADMIN}
        auditors = {KeyRole.AUDITOR, KeyRole.ADMIN}
        if service in DATA_PLANE:
            expected = of_tenant
        elif service in INTERNAL_SERVICES or name in ("Execute", "ExchangeChunks"):
            expected = set()
        elif name == "GetCaller":
            expected = set(KeyRole)
        elif name in OF_ADMINS:
            expected = {KeyRole.ADMIN}
        elif name in OF_KEYS:
            expected = {KeyRole.ADMIN, KeyRole.TENANT_ADMIN}
        elif name in OF_TENANTS:
            expected = auditors | {KeyRole.TENANT_ADMIN}
        elif name in OF_USE:
            expected = auditors | of_tenant
        elif name in ("ListAuditEvents", "ExportAuditLog"):
            expected = auditors
        elif name == "DiagnoseLatency":
            expected = set(KeyRole)
        elif name in OF_REQUESTS:
            expected = staff | {KeyRole.AUDITOR}
        elif name not in PUBLISHING and name.startswith(READS):
            expected = staff | {KeyRole.AUDITOR, KeyRole.VIEWER}
        else:
            expected = staff
        assert rule == expected, method.full_name


def _rule(method: Any) -> set[int]:
    return set(method.GetOptions().Extensions[options_pb2.access])


@pytest.mark.parametrize("caller", ALLOWED)
async def test_a_caller_opens_what_its_rule_says_and_nothing_else(
    channel: Any, credentials: Credentials, caller: str
) -> None:
    text = INTERNAL if caller == "internal token" else credentials.good[caller][0]
    for method in METHODS:
        code = await called(channel, method, (("authorization", f"Bearer {text}"),))
        if ALLOWED[caller] in _rule(method):
            let_in = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
            assert code in let_in, method.full_name
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, method.full_name


async def test_no_spoiled_credential_opens_a_method(channel: Any, credentials: Credentials) -> None:
    """Every RPC with every key and token that is not valid, and without any."""
    cells = 0
    spoiled = {"nothing": None, "garbage": "garbage", **credentials.bad, **credentials.without_role}
    for method in METHODS:
        for name, text in spoiled.items():
            # Beyond the size of metadata the transport refuses; here is the size of a token.
            metadata = (("authorization", f"Bearer {text}"),) if text else ()
            code = await called(channel, method, metadata)
            # No key and no token is a credential where a certificate alone is one.
            denied = name in credentials.without_role or options_pb2.ACCESS_CERTIFICATE in _rule(method)
            expected = grpc.StatusCode.PERMISSION_DENIED if denied else grpc.StatusCode.UNAUTHENTICATED
            assert code is expected, (method.full_name, name)
            cells += 1
    print(f"{cells} cells of {len(METHODS)} methods")


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Bearer"),),
        (("authorization", "Basic TENANT"),),
        (("authorization", "Bearer TENANT"), ("authorization", "Bearer ADMIN")),
        (("authorization", "Bearer TENANTTENANT"),),
        (("x-api-key", "TENANT"),),
    ],
)
@pytest.mark.parametrize("kind", ["key", "token"])
async def test_odd_credentials_open_nothing(
    channel: Any, credentials: Credentials, metadata: tuple[tuple[str, str], ...], kind: str
) -> None:
    """TENANT and ADMIN stand for valid credentials."""
    texts = {role.name: credentials.good[f"{kind} of {role}"][0] for role in (KeyRole.TENANT, KeyRole.ADMIN)}
    metadata = tuple(
        (name, value.replace("TENANT", texts["TENANT"]).replace("ADMIN", texts["ADMIN"]))
        for name, value in metadata
    )
    method = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name["ListModels"]
    assert await called(channel, method, metadata) is grpc.StatusCode.UNAUTHENTICATED


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
