"""Who may call what, by the (access) option beside each method in the protos. Deny by default."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor

from fairway.v1 import options_pb2
from services.core.errors import OverQuota, PermissionDenied, Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.interceptors.base import AroundInterceptor, Call, Context

Authenticate = Callable[[str | None], Principal]

# Third-party services that every server carries, and their rule.
PUBLIC_SERVICES: Final = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")

MAX_PUBLIC_CALLS: Final = 256

_ROLE_ACCESS: Final = {
    KeyRole.TENANT: options_pb2.ACCESS_TENANT,
    KeyRole.ADMIN: options_pb2.ACCESS_ADMIN,
}
_principal: ContextVar[Principal] = ContextVar("principal")


def principal() -> Principal:
    """Return who calls the RPC that runs in this task. Raises Unauthenticated outside of one."""
    found = _principal.get(None)
    if found is None:
        raise Unauthenticated("no API key was given")
    return found


def access_table(services: Iterable[ServiceDescriptor]) -> dict[str, frozenset[int]]:
    """Return "/service/method" to allowed access values. Raises ValueError for a method without a rule."""
    table: dict[str, frozenset[int]] = {}
    for service in services:
        for method in service.methods:
            allowed = frozenset(method.GetOptions().Extensions[options_pb2.access])
            if not allowed or options_pb2.ACCESS_UNSPECIFIED in allowed:
                raise ValueError(f"{method.full_name} has no access rule")
            table[f"/{service.full_name}/{method.name}"] = allowed
    return table


class AccessControl(AroundInterceptor):
    """Identifies the caller by `authorization: Bearer <key or internal token>` and applies the table."""

    def __init__(
        self, table: Mapping[str, frozenset[int]], authenticate: Authenticate | None, internal_token: str
    ) -> None:
        if len(internal_token) < 32:
            raise ValueError("the internal token has less than 32 characters")
        self._table = table
        self._authenticate = authenticate
        self._internal = internal_token.encode()
        self._public_calls = 0

    async def around(self, method: str, call: Call, context: Context) -> Any:
        if method[1:].rpartition("/")[0] in PUBLIC_SERVICES:
            return await self._public(call)
        allowed = self._table.get(method)
        if allowed is None:
            raise PermissionDenied(f"{method} has no access rule")
        if options_pb2.ACCESS_PUBLIC in allowed:
            return await call()
        who = self._identify(bearer_token(context.invocation_metadata()), allowed)
        if who is None:
            return await call()
        token = _principal.set(who)
        try:
            return await call()
        finally:
            _principal.reset(token)

    async def _public(self, call: Call) -> Any:
        """Run a call that needs no credentials. Its streams may stay open, so they are counted."""
        if self._public_calls >= MAX_PUBLIC_CALLS:
            raise OverQuota(f"{MAX_PUBLIC_CALLS} calls without credentials are running", retry_after_s=1.0)
        self._public_calls += 1
        try:
            return await call()
        finally:
            self._public_calls -= 1

    def _identify(self, token: str | None, allowed: frozenset[int]) -> Principal | None:
        """Return the caller, None for another service. Raises Unauthenticated or PermissionDenied."""
        if token is None:
            raise Unauthenticated("send the API key as metadata `authorization: Bearer <key>`")
        if hmac.compare_digest(token.encode(), self._internal):
            if options_pb2.ACCESS_INTERNAL not in allowed:
                raise PermissionDenied("the internal token does not open this method")
            return None
        if self._authenticate is None:
            raise PermissionDenied("this service is internal: no API key opens it")
        who = self._authenticate(token)
        if _ROLE_ACCESS[who.role] not in allowed:
            raise PermissionDenied(f"a key of role {who.role} does not open this method", role=who.role)
        return who


def bearer_token(metadata: Any) -> str | None:
    """Return the token of the only `authorization` entry; None without one or with another scheme."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
