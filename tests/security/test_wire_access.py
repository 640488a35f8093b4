"""Certificates of connections: every method times every role, and certificates that are not valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from fairway.cli.authority import ROLES, Authority
from fairway.tls import TlsIdentity, read_folder
from fairway.v1 import options_pb2
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.peers import OPERATOR, callers_table
from services.rpc.server import RpcServer, RpcService, ServerTls
from services.runtime.clock import SystemClock
from tests.support.certificates import HeldCertificates, authority_in, identity_of, secured_channel
from tests.support.rpc_services import rpc_methods, rpc_services

INTERNAL = "i" * 32
METHODS = rpc_methods()
TABLE = callers_table(each.descriptor for each in rpc_services())
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
LET_IN = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
METHOD = "/fairway.v1.SchedulerService/ListPools"


class LateClock(SystemClock):
    ahead_s = 0.0

    def unix_s(self) -> float:
        return super().unix_s() + self.ahead_s


class Served:
    """A server with every service of the protos: what is let in answers UNIMPLEMENTED."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority_in(folder)
        self.certificates = HeldCertificates(identity_of(self.authority, "scheduler", "server"))
        self.clock = LateClock()
        self.refused: list[str] = []
        self.server = RpcServer(
            [RpcService(each.descriptor, each.register, each.servicer()) for each in rpc_services()],
            listen="127.0.0.1:0",
            internal_token=INTERNAL,
            new_incident=lambda: "inc_1",
            authenticate=lambda token: Principal("a", KeyRole.ADMIN),
            tls=ServerTls(self.certificates, self.clock, refused=self.refused.append),
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def channel(self, identity: TlsIdentity) -> grpc.aio.Channel:
        return secured_channel(self.address, identity)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    found = Served(tmp_path / "certs")
    await found.server.start()
    yield found
    await found.server.stop(0)


async def call(channel: Any, path: str, key: str = INTERNAL, *, streams: bool = False) -> tuple[Any, str]:
    """Return the status and the text of a call with this credential."""
    metadata = (("authorization", f"Bearer {key}"),)
    async with asyncio.timeout(30):
        if streams:
            stream = channel.stream_stream(path)(metadata=metadata)
            return await stream.code(), await stream.details()
        try:
            await channel.unary_stream(path)(b"", metadata=metadata).read()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("role", ROLES)
async def test_a_certificate_opens_the_methods_of_its_role_and_no_other(served: Served, role: str) -> None:
    async with served.channel(identity_of(served.authority, role)) as channel:
        for method in METHODS:
            path = f"/{method.containing_service.full_name}/{method.name}"
            access = method.GetOptions().Extensions[options_pb2.access]
            code, _ = await call(channel, path, streams=method.client_streaming)
            assert code in (LET_IN if role in TABLE[path] else DENIED), (path, code)
            code, _ = await call(channel, path, "admin-key", streams=method.client_streaming)
            is_open = role == OPERATOR and options_pb2.ACCESS_ADMIN in access
            is_open |= options_pb2.ACCESS_CERTIFICATE in access and role in TABLE[path]
            assert code in (LET_IN if is_open else DENIED), (path, "with a key", code)


def test_every_internal_method_names_its_callers() -> None:
    internal = [
        method
        for method in METHODS
        if {options_pb2.ACCESS_INTERNAL, options_pb2.ACCESS_CERTIFICATE}
        & {*method.GetOptions().Extensions[options_pb2.access]}
    ]
    assert len(internal) == sum(map(bool, TABLE.values())) > 0
    assert {role for roles in TABLE.values() for role in roles} <= set(ROLES)


def test_an_internal_method_without_callers_is_no_server() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="uncalled.proto", package="uncalled")
    file.message_type.add(name="Request")
    method = file.service.add(name="Planted").method.add(
        name="Open", input_type=".uncalled.Request", output_type=".uncalled.Request"
    )
    method.options.Extensions[options_pb2.access].append(options_pb2.ACCESS_INTERNAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    planted = pool.FindServiceByName("uncalled.Planted")
    with pytest.raises(ValueError, match=r"uncalled.Planted.Open: .*callers"):
        callers_table([planted])
    service = RpcService(planted, lambda servicer, server: None, object())
    with pytest.raises(ValueError, match="callers"):
        RpcServer([service], listen="", internal_token=INTERNAL, new_incident=lambda: "")


async def test_the_refusal_of_a_role_names_those_that_may(served: Served) -> None:
    async with served.channel(identity_of(served.authority, "worker", "w-0")) as channel:
        code, text = await call(channel, METHOD)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "spiffe://fairway.internal/worker/w-0" in text
    assert "controlplane" in text
    assert served.refused == ["role"]


async def test_health_is_for_every_role(served: Served) -> None:
    for role in ("worker", "operator"):
        async with served.channel(identity_of(served.authority, role)) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=10) == b"\x08\x02"


async def test_a_revoked_certificate_opens_nothing_from_the_next_call_on(served: Served) -> None:
    identity = identity_of(served.authority, "controlplane")
    async with served.channel(identity) as channel:
        assert (await call(channel, METHOD))[0] in LET_IN
        served.authority.revoke(identity.leaf.serial)
        served.certificates.identity = _read_again(served.authority)
        code, text = await call(channel, METHOD)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "was revoked; `fairway certs issue`" in text
        async with served.channel(identity_of(served.authority, "controlplane")) as fresh:
            assert (await call(fresh, METHOD))[0] in LET_IN
    assert served.refused == ["revoked"]


async def test_a_certificate_that_expires_during_a_connection_opens_nothing_more(served: Served) -> None:
    async with served.channel(identity_of(served.authority, "controlplane")) as channel:
        assert (await call(channel, METHOD))[0] in LET_IN
        served.clock.ahead_s = 2 * 86400.0
        code, text = await call(channel, METHOD)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "expired" in text
    assert "`fairway certs rotate`" in text
    assert served.refused == ["expired"]


async def test_handshakes_refuse_what_no_trusted_authority_vouches_for(
    served: Served, tmp_path: Path
) -> None:
    foreign = authority_in(tmp_path / "foreign")
    trusting = _with_roots(identity_of(foreign, "controlplane"), served.certificates.identity)
    late = authority_in(tmp_path / "certs", days_ago=3)
    expired = identity_of(late, "controlplane", "late", days=1)
    for identity in (trusting, expired):
        async with served.channel(identity) as channel:
            code, _ = await call(channel, METHOD)
            assert code is grpc.StatusCode.UNAVAILABLE
    bare = grpc.ssl_channel_credentials(served.certificates.identity.roots_pem)
    async with grpc.aio.secure_channel(served.address, bare) as channel:
        assert (await call(channel, METHOD))[0] is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(served.address) as channel:
        assert (await call(channel, METHOD))[0] is grpc.StatusCode.UNAVAILABLE
    assert served.refused == []


async def test_an_authority_issues_only_for_its_trust_domain(served: Served, tmp_path: Path) -> None:
    """A second authority of another domain may be trusted for stores: its identities open nothing."""
    other = Authority(tmp_path / "other", served.authority._now)
    other.create("other.example")
    stranger = identity_of(other, "controlplane")
    served.certificates.identity = _with_roots(served.certificates.identity, stranger, both=True)
    async with served.channel(_with_roots(stranger, served.certificates.identity)) as channel:
        code, text = await call(channel, METHOD)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "not of the trust domain fairway.internal" in text
    assert served.refused == ["domain"]


def _read_again(authority: Authority) -> TlsIdentity:
    return read_folder(authority.root / "server")


def _with_roots(identity: TlsIdentity, trusted: TlsIdentity, *, both: bool = False) -> TlsIdentity:
    roots = identity.roots_pem + trusted.roots_pem if both else trusted.roots_pem
    return TlsIdentity(identity.leaf, identity.chain_pem, identity.key_pem, roots)
