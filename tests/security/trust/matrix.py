"""Every RPC and route of a live installation, with every credential and certificate that must not open it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf.descriptor import MethodDescriptor

from fairway.client.endpoints import tls_credentials
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, options_pb2
from services.core.records import KeyRole
from services.rpc.peers import callers_table
from tests.security.table.others import ROLES
from tests.support.certificates import authority_in, issued
from tests.support.credentials import spoiled_tokens
from tests.support.oidc_provider import OidcProvider
from tests.support.rpc_services import called, rpc_methods, rpc_services
from tests.support.stack import Stack, metadata
from tests.support.updating import admin_of

OWN, OTHER = "acme", "other"
REFUSED: Final = (401, 403)
_ACCESS: Final = {role: options_pb2.Access.Value(f"ACCESS_{role.name}") for role in KeyRole}
_AT_ONCE: Final = 8
_CODES: Final = grpc.StatusCode
_DENIED: Final = (_CODES.UNAUTHENTICATED, _CODES.PERMISSION_DENIED)
# A server closes a connection after many refused calls; those that it had are sent on another.
_TRIES: Final = 4


@dataclass(slots=True)
class Cells:
    count: int = 0
    unexpected: list[str] = field(default_factory=list)

    def add(self, held: bool, what: str) -> None:
        self.count += 1
        if not held:
            self.unexpected.append(what)


@dataclass(frozen=True, slots=True)
class Callers:
    """``good``: credentials with their roles, of the tenant ``OWN``; ``bad``: what opens nothing."""

    good: Mapping[str, tuple[str, KeyRole]]
    bad: Mapping[str, str]
    other: str  # a key of the other tenant's admin

    @classmethod
    async def created(cls, stack: Stack, provider: OidcProvider) -> Callers:
        """Make tenants, and keys and tokens of every role."""
        good: dict[str, tuple[str, KeyRole]] = {}
        async with admin_of(stack) as admin:
            for tenant in (OWN, OTHER):
                await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name=tenant)))

            async def key(name: str, role: KeyRole, tenant: str = OWN, **fields: Any) -> str:
                number = cp.KeyRole.Value(f"KEY_ROLE_{role.name}")
                owner = tenant if role.of_tenant else ""
                made = cp.Key(metadata=cp.Metadata(name=name), role=number, tenant=owner, **fields)
                return (await admin.keys.create(made)).secret

            for role in KeyRole:
                prefix = f"{OWN}." if role.of_tenant else ""
                good[f"key of {role}"] = await key(f"{prefix}drill-{role}", role), role
                good[f"token of {role}"] = provider.token(groups=[f"{role}s"], tenant=OWN), role
            soon = datetime.now(UTC) + timedelta(seconds=2)
            expired = await key("drill-expired", KeyRole.ADMIN, expire_time=soon)
            deleted = await key("drill-deleted", KeyRole.ADMIN)
            await admin.keys.delete("drill-deleted")
            other = await key(f"{OTHER}.lead", KeyRole.TENANT_ADMIN, OTHER)
            budget = cp.Budget(metadata=cp.Metadata(name=OWN), tenant=OWN, limit_micros=10**12)
            await admin.budgets.create(budget)
        bad = {"nothing": "", "garbage": "garbage", "expired key": expired, "deleted key": deleted}
        await asyncio.sleep(3.0)  # until the key has expired, and every role has received the others
        return cls(good, bad, other).renewed(provider)

    def renewed(self, provider: OidcProvider) -> Callers:
        """Return the same callers with tokens of the provider's present key."""
        good = {
            who: (provider.token(groups=[f"{role}s"], tenant=OWN) if who.startswith("token") else text, role)
            for who, (text, role) in self.good.items()
        }
        tokens = {f"token {name}": text for name, text in spoiled_tokens(provider).items()}
        return Callers(good, {**self.bad, **tokens}, self.other)


def addresses_of(stack: Stack) -> dict[str, str]:
    """Return host:port of the gRPC server of each process."""
    record = json.loads((stack.state / "fleet.json").read_text())["addresses"]
    return {ROLES[service]: record[ROLES[service]] for service in ROLES}


def _methods() -> Iterator[tuple[MethodDescriptor, str]]:
    for method in rpc_methods():
        if method.containing_service.name != "FollowerService":  # of an engine's ranks: none runs here
            yield method, ROLES[method.containing_service.name]


async def _code(channel: grpc.aio.Channel, method: MethodDescriptor, text: str) -> grpc.StatusCode:
    try:
        return await called(channel, method, metadata(text) if text else ())
    except TimeoutError:  # a stream that was let in waits for its caller
        return _CODES.OK


async def rpc_cells(stack: Stack, callers: Callers, cells: Cells) -> None:
    """Every method with every credential, from a client whose certificate is an operator's."""
    at = addresses_of(stack)
    gate = asyncio.Semaphore(_AT_ONCE)
    async with contextlib.AsyncExitStack() as opened:
        operator = tls_credentials(stack.state / "certs" / "operator")
        channels = {
            name: await opened.enter_async_context(grpc.aio.secure_channel(address, operator))
            for name, address in at.items()
        }

        async def one(
            method: MethodDescriptor, role: str, who: str, text: str, codes: Collection[grpc.StatusCode]
        ) -> None:
            async with gate:
                found, tries = _CODES.UNAVAILABLE, 0
                while found is _CODES.UNAVAILABLE and tries < _TRIES:
                    found = await _code(channels[role], method, text)
                    tries += 1
            cells.add(found in codes, f"{method.full_name} with {who}: {found.name}")

        async with asyncio.TaskGroup() as group:
            for method, role in _methods():
                rule = set(method.GetOptions().Extensions[options_pb2.access])
                # A role without callers of its own reads no keys: every credential is one of a wrong kind.
                closed = rule == {options_pb2.ACCESS_CERTIFICATE}  # An operator's certificate is not enough.
                codes = _DENIED if rule == {options_pb2.ACCESS_INTERNAL} or closed else _DENIED[:1]
                for who, text in callers.bad.items():
                    group.create_task(one(method, role, who, text, codes))
                for who, (text, of) in callers.good.items():
                    if _ACCESS[of] not in rule:
                        group.create_task(one(method, role, who, text, _DENIED[1:]))


async def certificate_cells(stack: Stack, cells: Cells, folder: Path) -> None:
    """A worker's certificate at every method that is not a worker's; certificates that open nothing."""
    internal = (stack.state / "secrets" / "internal_token").read_text().strip()
    admin, at = str(stack.endpoints["admin_key"]), addresses_of(stack)
    table = callers_table(each.descriptor for each in rpc_services())
    worker = tls_credentials(stack.state / "certs" / "worker-0")
    for method, role in _methods():
        path = f"/{method.containing_service.full_name}/{method.name}"
        texts = {"an admin's key": admin, "no key": ""}
        if "worker" not in table[path]:
            texts["the internal token"] = internal
        async with grpc.aio.secure_channel(at[role], worker) as channel:
            for who, text in texts.items():
                code = await _code(channel, method, text)
                cells.add(code in _DENIED, f"{path} with a worker's certificate and {who}: {code.name}")
    copy = folder / "certs"
    shutil.copytree(stack.state / "certs", copy)
    late = issued(authority_in(copy, days_ago=3), "operator", "late").folder
    stranger = issued(authority_in(folder / "foreign"), "operator").folder
    shutil.copy(copy / "operator" / "ca.crt", stranger / "ca.crt")
    roots = (copy / "operator" / "ca.crt").read_bytes()
    wrong: dict[str, grpc.ChannelCredentials | None] = {
        "an expired certificate": tls_credentials(late),
        "a stranger's certificate": tls_credentials(stranger),
        "no certificate": grpc.ssl_channel_credentials(roots),
        "no TLS": None,
    }
    first = {role: method for method, role in _methods()}
    for role, method in first.items():
        for what, credentials in wrong.items():
            if role == "gateway" and what != "no TLS":
                continue  # clients have none: their key alone opens a gateway
            options = (("grpc.use_local_subchannel_pool", 1),)
            opened = (
                grpc.aio.insecure_channel(at[role], options)
                if credentials is None
                else grpc.aio.secure_channel(at[role], credentials, options)
            )
            async with opened as channel:
                code = await _code(channel, method, admin)
            cells.add(code is _CODES.UNAVAILABLE, f"{role} with {what}: {code.name}")


# --- routes -------------------------------------------------------------------------------------


class Https:
    """Requests to the gateway's HTTP face, each on a connection of its own."""

    def __init__(self, stack: Stack) -> None:
        self._url = urlsplit(stack.http)
        self._roots = Path(stack.endpoints["tls_dir"]) / "ca.crt" if self._url.scheme == "https" else None

    def ask(
        self, method: str, path: str, key: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Return status and body. Blocks. Raises OSError."""
        assert self._url.hostname is not None
        opened: http.client.HTTPConnection
        if self._roots is None:
            opened = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=60)
        else:
            trusted = ssl.create_default_context(cafile=self._roots)
            opened = http.client.HTTPSConnection(
                self._url.hostname, self._url.port, timeout=60, context=trusted
            )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with contextlib.closing(opened):
            opened.request(
                method, path, body or None, {**headers, **({"content-type": kind} if body else {})}
            )
            answer = opened.getresponse()
            return answer.status, answer.read()


def route_cells(stack: Stack, callers: Callers, cells: Cells) -> None:
    """Every route of the document with every credential; what one tenant stored, by another's key."""
    face = Https(stack)
    own, _ = callers.good["key of tenant-admin"]
    document = json.loads(face.ask("GET", "/openapi.json", own)[1])
    stored = _stored(face, own, stack.model)
    for template, item in document["paths"].items():
        for method in (each.upper() for each in item):
            path = template.replace("{model}", "m").replace("{version}", "1")
            for name, value in stored.items():
                path = path.replace("{" + name + "}", value)
            public = "security" in item[method.lower()] and not item[method.lower()]["security"]
            refused = {**callers.bad}
            refused |= {who: text for who, (text, of) in callers.good.items() if not of.of_tenant}
            for who, text in refused.items():
                status, body = face.ask(method, path, text, b"{}" if method == "POST" else b"")
                held = status == 200 if public else status in REFUSED
                cells.add(held, f"{method} {template} with {who}: {status} {body[:80]!r}")
            if path != template and "/models/" not in path:
                status, body = face.ask(method, path, callers.other, b"{}" if method == "POST" else b"")
                cells.add(status == 404, f"{method} {template} by another tenant: {status} {body[:80]!r}")
    for listed in ("/v1/files", "/v1/batches"):
        status, body = face.ask("GET", listed, callers.other)
        seen = [value for value in stored.values() if value.encode() in body]
        cells.add(status == 200 and not seen, f"GET {listed} by another tenant: {status}, {seen}")


def _stored(face: Https, key: str, model: str) -> dict[str, str]:
    """Store one of each kind as the tenant and return their names, by the parameter of a path."""
    wanted = {"model": model, "input": "hi", "max_output_tokens": 4}
    response = json.loads(face.ask("POST", "/v1/responses", key, json.dumps(wanted).encode())[1])
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    data = json.dumps({**line, "body": {"model": model, "prompt": "a", "max_tokens": 2}}).encode()
    form = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--x--\r\n"
    )
    file = json.loads(face.ask("POST", "/v1/files", key, form, "multipart/form-data; boundary=x")[1])
    made = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = json.loads(face.ask("POST", "/v1/batches", key, json.dumps(made).encode())[1])
    return {"response_id": response["id"], "file_id": file["id"], "batch_id": batch["id"]}


# --- another tenant's resources in the control plane ---------------------------------------------


async def tenant_cells(stack: Stack, callers: Callers, cells: Cells) -> None:
    """What belongs to one tenant does not exist for the admin of another."""
    name = f"{OWN}.drill-{KeyRole.TENANT}"
    key = cp.Key(metadata=cp.Metadata(name=name), role=cp.KEY_ROLE_TENANT, tenant=OWN)
    stolen = cp.Key(metadata=cp.Metadata(name=f"{OWN}.stolen"), role=cp.KEY_ROLE_TENANT, tenant=OWN)
    raised = cp.Key(metadata=cp.Metadata(name=f"{OTHER}.root"), role=cp.KEY_ROLE_ADMIN)
    refused: dict[str, Any] = {
        "GetTenant": cp.GetTenantRequest(name=OWN),
        "GetKey": cp.GetKeyRequest(name=name),
        "UpdateKey": cp.UpdateKeyRequest(key=key),
        "DeleteKey": cp.DeleteKeyRequest(name=name),
        "RotateKey": cp.RotateKeyRequest(name=name),
        "GetBudget": cp.GetBudgetRequest(name=OWN),
    }
    listed: dict[str, Any] = {
        "ListTenants": cp.ListTenantsRequest(),
        "ListKeys": cp.ListKeysRequest(),
        "ListBudgets": cp.ListBudgetsRequest(),
        "ListUsage": cp.ListUsageRequest(),
    }
    async with stack.channel(addresses_of(stack)["controlplane"]) as channel:
        stub: Any = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)

        async def call(method: str, request: Any) -> tuple[str, bytes]:
            try:
                answer = await getattr(stub, method)(request, metadata=metadata(callers.other), timeout=20)
            except grpc.aio.AioRpcError as error:
                return error.code().name, b""
            return "OK", answer.SerializeToString()

        for method, request in refused.items():
            code, _ = await call(method, request)
            cells.add(code == "NOT_FOUND", f"{method} of another tenant: {code}")
        for key in (stolen, raised):
            code, _ = await call("CreateKey", cp.CreateKeyRequest(key=key))
            held = code in ("NOT_FOUND", "PERMISSION_DENIED", "INVALID_ARGUMENT")
            cells.add(held, f"CreateKey {key.metadata.name}: {code}")
        for method, request in listed.items():
            code, body = await call(method, request)
            cells.add(code == "OK" and OWN.encode() not in body, f"{method} of another tenant: {code}")
