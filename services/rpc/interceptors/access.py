"""Access control by the (access) option of each method in the protos. Deny by default."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from fairway.v1 import options_pb2
from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    OverQuota,
    PermissionDenied,
    ShareExceeded,
    Unauthenticated,
    Unavailable,
)
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.connections import Connections, UnauthenticatedCalls, source_of
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.rpc.peers import PeerRules
from services.runtime.audit import begin_call
from services.runtime.identity import act_for
from services.runtime.process.tenant_turns import run_as

Authenticate = Callable[[str | None], Principal]

# Third-party services that every server has, and their rule.
PUBLIC_SERVICES: Final = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")

_PUBLIC_STREAMS: Final = (
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
# Limits of concurrent RPCs: of one tenant or operator, and of all. Services are bounded by their number.
MAX_CALLS_OF_CALLER: Final = 4096
MAX_CALLS: Final = 16_384

_ROLE_ACCESS: Final = {role: options_pb2.Access.Value(f"ACCESS_{role.name}") for role in KeyRole}
_caller: ContextVar[str | None] = ContextVar("caller", default=None)


def caller() -> str | None:
    """Return the key of the limits for the RPC of this task: "" for a service, None without credentials."""
    return _caller.get()


def may_call(who: Principal, method: MethodDescriptor) -> bool:
    """Return whether the access rule of a method has the caller's role."""
    return _ROLE_ACCESS[who.role] in method.GetOptions().Extensions[options_pb2.access]


def access_table(services: Iterable[ServiceDescriptor]) -> dict[str, frozenset[int]]:
    """Return "/service/method" to allowed access values. Raises ValueError for a method without a rule."""
    table: dict[str, frozenset[int]] = {}
    for service in services:
        for method in service.methods:
            allowed = frozenset(method.GetOptions().Extensions[options_pb2.access])
            if not allowed or options_pb2.ACCESS_UNSPECIFIED in allowed:
                raise ValueError(f"{method.full_name} has no access rule")
            if options_pb2.ACCESS_CERTIFICATE in allowed and len(allowed) > 1:
                raise ValueError(f"{method.full_name}: ACCESS_CERTIFICATE goes with no other rule")
            table[f"/{service.full_name}/{method.name}"] = allowed
    return table


class AccessControl(AroundInterceptor):
    """Identifies the caller by `authorization: Bearer <key or internal token>` and applies the table.

    With ``peers``, the certificate of the connection has to be one that may present this credential.
    """

    def __init__(
        self,
        table: Mapping[str, frozenset[int]],
        authenticate: Authenticate | None,
        internal_token: str,
        connections: Connections,
        unauthenticated: UnauthenticatedCalls,
        peers: PeerRules | None = None,
    ) -> None:
        super().__init__()
        if len(internal_token) < 32:
            raise ValueError("the internal token has less than 32 characters")
        self._table = table
        self._authenticate = authenticate
        self._internal = internal_token.encode()
        self._connections = connections
        self._unauthenticated = unauthenticated
        self._peers = peers
        self._running: dict[str, int] = {}
        self._all = 0

    async def around(self, method: str, call: Call, context: Context) -> Any:
        peer = context.peer()
        allowed = self._table.get(method)
        if self._is_public(method, allowed):
            (
                self._unauthenticated.enter_stream
                if method in _PUBLIC_STREAMS
                else self._unauthenticated.enter
            )(peer)
            try:
                return await call()
            except (DeadlineExceeded, OverQuota):  # its message did not arrive in time
                self._unauthenticated.refuse(peer)
                raise
        try:
            if allowed is None:
                raise PermissionDenied(f"{method} has no access rule")
            who = self._identify(method, context, allowed)
            if self._peers is not None:
                call = self._peers.checked(method, context, call, is_service=who is None)
        except FairwayError:
            self._unauthenticated.refused(peer)
            raise
        name = "" if who is None else who.tenant_id or who.key_id
        _caller.set(name)
        self._connections.begin(peer)
        try:
            return await (call() if who is None else self._counted(who, name, call))
        finally:
            self._connections.end(peer, name)

    def _is_public(self, method: str, allowed: frozenset[int] | None) -> bool:
        if allowed is None:
            return method[1:].rpartition("/")[0] in PUBLIC_SERVICES
        return options_pb2.ACCESS_PUBLIC in allowed

    async def _counted(self, who: Principal, name: str, call: Call) -> Any:
        """Run the call of a tenant or an operator within its share of concurrent calls."""
        mine = self._running.get(name, 0)
        if mine >= MAX_CALLS_OF_CALLER:
            text = f"{mine} calls of this caller are running, the most that may; wait until some have ended"
            raise ShareExceeded(text, retry_after_s=1.0, limit=MAX_CALLS_OF_CALLER)
        if self._all >= MAX_CALLS:
            text = f"{self._all} calls are running here, the most that may; send it later or elsewhere"
            raise Unavailable(text, retry_after_s=1.0)
        self._running[name] = mine + 1
        self._all += 1
        act_for(who)
        run_as(name)
        try:
            return await call()
        finally:
            self._all -= 1
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]

    def _identify(self, method: str, context: Context, allowed: frozenset[int]) -> Principal | None:
        """Return the caller, None for another service. Raises Unauthenticated or PermissionDenied.

        Where a certificate is enough, ``peers`` checks it.
        """
        if options_pb2.ACCESS_CERTIFICATE in allowed:
            if self._peers is None:
                raise PermissionDenied("only a certificate opens this method, and this port has no TLS")
            return None
        token = bearer_token(context.invocation_metadata())
        if token is None:
            raise Unauthenticated("send the API key or token as metadata `authorization: Bearer <key>`")
        if hmac.compare_digest(token.encode(), self._internal):
            if options_pb2.ACCESS_INTERNAL not in allowed:
                raise PermissionDenied("the internal token does not open this method")
            return None
        if self._authenticate is None:
            raise PermissionDenied("this service is internal: no API key opens it")
        who = self._authenticate(token)
        certificate = "" if self._peers is None else self._peers.identity(context)
        begin_call(short_method(method), who, peer_address(context.peer()), certificate)
        if _ROLE_ACCESS[who.role] not in allowed:
            raise PermissionDenied(f"the role {who.role} may not call this method", role=who.role)
        return who


def bearer_token(metadata: Any) -> str | None:
    """Return the token of the only `authorization` entry; None without one or with another scheme."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def peer_address(peer: str) -> str:
    """Return the source of a connection with this grpc name, as the audit log states it."""
    return source_of(peer).removeprefix("ipv4:")


def short_method(method: str) -> str:
    """Return "Service/Method" of "/package.Service/Method"."""
    service, _, name = method[1:].partition("/")
    return f"{service.rpartition('.')[2]}/{name}"
