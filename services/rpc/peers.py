"""Certificates of connections: the one that a server presents, and those that open a method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from fairway.tls import Leaf, TlsIdentity, parsed_leaf
from fairway.v1 import options_pb2
from services.core.errors import FairwayError, PermissionDenied, Unauthenticated
from services.ports.clock import Clock
from services.rpc.interceptors.base import Call
from services.runtime.certificates import Certificates

OPERATOR: Final = "operator"  # the role of the certificates of people
REFUSALS: Final = ("none", "expired", "revoked", "domain", "role")  # reasons of refused certificates
LOOK_S: Final = 1.0  # interval of the checks of open calls


def callers_table(services: Iterable[ServiceDescriptor]) -> dict[str, frozenset[str]]:
    """Return "/service/method" to the roles whose certificates open it for a service.

    Raises ValueError for a method that services may call and that names none, and for one that names some
    without being for services.
    """
    table: dict[str, frozenset[str]] = {}
    for service in services:
        for method in service.methods:
            options = method.GetOptions()
            named = options.Extensions[options_pb2.callers]
            access = options.Extensions[options_pb2.access]
            by_role = options_pb2.ACCESS_INTERNAL in access or options_pb2.ACCESS_CERTIFICATE in access
            if by_role != bool(named) or options_pb2.CALLER_UNSPECIFIED in named:
                rules = "ACCESS_INTERNAL or ACCESS_CERTIFICATE"
                raise ValueError(f"{method.full_name}: {rules} and the option (callers) go together")
            names = (options_pb2.Caller.Name(each) for each in named)
            table[f"/{service.full_name}/{method.name}"] = frozenset(
                name.removeprefix("CALLER_").lower() for name in names
            )
    return table


class PeerRules:
    """Decides whether the certificate of a connection may present the credential of a call.

    The internal token needs the certificate of a role that the method names, and so does a call without a
    credential where a certificate is enough; a key needs that of an operator. The handshake has verified the
    signature and the expiry; a connection may outlive both. gRPC for Python checks no list of revoked
    certificates, so that it is checked here. Open calls end with their certificate, so that a stream costs
    nothing per message.
    """

    def __init__(
        self,
        callers: Mapping[str, frozenset[str]],
        certificates: Certificates,
        clock: Clock,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``refused`` is called with the reason of each refusal, one of ``REFUSALS``."""
        self._callers = callers
        self._certificates = certificates
        self._clock = clock
        self._refused = refused
        self._open: dict[asyncio.Timeout, Leaf] = {}

    @staticmethod
    def identity(context: Any) -> str:
        """Return the identity in the certificate of a call's connection; empty without one."""
        pem = context.auth_context().get("x509_pem_cert")
        return str(parsed_leaf(bytes(pem[0])).id or "") if pem else ""

    def checked(self, method: str, context: Any, call: Call, *, is_service: bool) -> Call:
        """Return the call if it is permitted. It ends with the certificate of its connection.

        Both raise Unauthenticated or PermissionDenied.
        """
        pem = context.auth_context().get("x509_pem_cert")
        if not pem:
            text = "this port needs a client certificate; `fairway certs issue` makes one"
            raise self._counted("none", Unauthenticated(text))
        leaf = parsed_leaf(bytes(pem[0]))
        found = self._ended(leaf) or self._not_for(leaf, method, is_service)
        if found is not None:
            raise self._counted(*found)

        async def run() -> Any:
            end = asyncio.timeout(None)
            self._open[end] = leaf
            try:
                async with end:
                    return await call()
            except TimeoutError:
                if end.expired() and (found := self._ended(leaf)):
                    raise self._counted(*found) from None
                raise
            finally:
                del self._open[end]

        return run

    async def guard(self) -> None:
        """End the open calls of certificates that were revoked or have expired, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            for end, leaf in self._open.items():
                if not end.expired() and self._ended(leaf):
                    end.reschedule(0.0)

    def _counted(self, reason: str, error: FairwayError) -> FairwayError:
        self._refused(reason)
        return error

    def _ended(self, leaf: Leaf) -> tuple[str, FairwayError] | None:
        """Return why the certificate is not valid now, whatever it is presented for."""
        if text := leaf.problem(self._clock.unix_s()):
            return "expired", Unauthenticated(text)
        if leaf.serial in self._certificates.current().revoked:
            return "revoked", Unauthenticated(f"{leaf} was revoked; `fairway certs issue` makes another")
        return None

    def _not_for(self, leaf: Leaf, method: str, is_service: bool) -> tuple[str, FairwayError] | None:
        own = self._certificates.current().id
        if leaf.id is None or leaf.id.trust_domain != own.trust_domain:
            text = f"{leaf} is not of the trust domain {own.trust_domain}"
            return "domain", Unauthenticated(text)
        allowed = self._callers.get(method, frozenset()) if is_service else frozenset((OPERATOR,))
        if leaf.id.role not in allowed:
            names = " or ".join(sorted(allowed)) or "no role"
            credential = "the internal token" if is_service else "a key"
            text = f"{leaf} does not open this method: {credential} is presented here by {names}"
            return "role", PermissionDenied(text, role=leaf.id.role)
        return None


def server_credentials(certificates: Certificates, *, from_roles: bool) -> grpc.ServerCredentials:
    """Return credentials with the present certificate at each handshake.

    ``from_roles``: clients present a certificate of the installation too. gRPC for Python cannot request one
    without requiring it.
    """
    used = certificates.current()

    def replaced() -> Any:  # None for no change, which the type stubs lack
        nonlocal used
        found = certificates.current()
        if found is used:
            return None
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), replaced, from_roles)


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key_pem, identity.chain_pem)], identity.roots_pem
    )
