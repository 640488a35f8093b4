"""Certificates of connections: the one that a server presents, and those that open a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from fairway.tls import TlsIdentity, parsed_leaf
from fairway.v1 import options_pb2
from services.core.errors import FairwayError, PermissionDenied, Unauthenticated
from services.ports.clock import Clock
from services.runtime.certificates import Certificates

OPERATOR: Final = "operator"  # the role of the certificates of people


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
            is_internal = options_pb2.ACCESS_INTERNAL in options.Extensions[options_pb2.access]
            if is_internal != bool(named) or options_pb2.CALLER_UNSPECIFIED in named:
                raise ValueError(f"{method.full_name}: ACCESS_INTERNAL and the option (callers) go together")
            names = (options_pb2.Caller.Name(each) for each in named)
            table[f"/{service.full_name}/{method.name}"] = frozenset(
                name.removeprefix("CALLER_").lower() for name in names
            )
    return table


class PeerRules:
    """Decides whether the certificate of a connection may present the credential of a call.

    The internal token needs the certificate of a role that the method names, a key that of an operator. The
    handshake has verified the signature and the expiry; a connection may outlive both. gRPC for Python checks
    no list of revoked certificates, so that it is checked here.
    """

    def __init__(
        self,
        callers: Mapping[str, frozenset[str]],
        certificates: Certificates,
        clock: Clock,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``refused`` is called with the reason of each refusal: none, expired, revoked, domain or role."""
        self._callers = callers
        self._certificates = certificates
        self._clock = clock
        self._refused = refused

    @staticmethod
    def identity(context: Any) -> str:
        """Return the identity in the certificate of a call's connection; empty without one."""
        pem = context.auth_context().get("x509_pem_cert")
        return str(parsed_leaf(bytes(pem[0])).id or "") if pem else ""

    def check(self, method: str, context: Any, *, is_service: bool) -> None:
        """Return if the call is permitted. Raises Unauthenticated or PermissionDenied."""
        found = self._problem(context.auth_context().get("x509_pem_cert"), method, is_service)
        if found is not None:
            reason, error = found
            self._refused(reason)
            raise error

    def _problem(
        self, pem: tuple[bytes, ...] | None, method: str, is_service: bool
    ) -> tuple[str, FairwayError] | None:
        if not pem:
            text = "this port needs a client certificate; `fairway certs issue` makes one"
            return "none", Unauthenticated(text)
        leaf, own = parsed_leaf(bytes(pem[0])), self._certificates.current()
        if text := leaf.problem(self._clock.unix_s()):
            return "expired", Unauthenticated(text)
        if leaf.serial in own.revoked:
            return "revoked", Unauthenticated(f"{leaf} was revoked; `fairway certs issue` makes another")
        if leaf.id is None or leaf.id.trust_domain != own.id.trust_domain:
            text = f"{leaf} is not of the trust domain {own.id.trust_domain}"
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
