"""Health probe of a role for containers: ``python -P -m services.rpc.probe HOST:PORT``.

Exits 0 for SERVING, and 1 with the reason on stderr for everything else. A server that rejects the probe
because it has too many calls is alive and serves authenticated callers. It counts as healthy, since a restart
would only help an attacker. The certificate is the role's own, as its environment configures it.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from fairway.tls import TlsIdentity
from services.rpc.channel import channel_credentials
from services.runtime.certificates import FolderCertificates, WorkloadCertificates
from services.runtime.clock import SystemClock
from services.runtime.config import ConfigError, Settings, load

TIMEOUT_S: Final = 3.0
# grpc itself returns CANCELLED to calls that it cannot queue.
REFUSED: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def health_problem(address: str, identity: TlsIdentity | None = None, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return "" when the health service at host:port answers SERVING or is flooded, else the reason.

    ``identity``: the certificate of the role that serves there; None: it serves without TLS.
    """
    with _channel(address, identity) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as exc:
            if exc.code() in REFUSED:
                return ""
            return f"no answer on {address} ({exc.code().name})"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"{address} answers {status}"


def _channel(address: str, identity: TlsIdentity | None) -> grpc.Channel:
    options: tuple[tuple[str, Any], ...] = (("grpc.enable_http_proxy", 0),)
    if identity is None:
        return grpc.insecure_channel(address, options=options)
    options = (*options, ("grpc.ssl_target_name_override", identity.id.server_name))
    return grpc.secure_channel(address, channel_credentials(identity), options=options)


def own_identity(settings: Settings) -> TlsIdentity | None:
    """Return the certificate of the role that these settings are for; None if its gRPC server is plain.

    Raises ConfigError and CertificateProblem.
    """
    clock = SystemClock()
    if settings.spiffe_socket:
        identity = WorkloadCertificates(settings.spiffe_socket, first_s=TIMEOUT_S).current()
    elif settings.tls_dir is not None:
        identity = FolderCertificates(settings.tls_dir, clock).current()
    else:
        return None
    is_plain = identity.id.role == "gateway" and not settings.secures(settings.client_tls, settings.listen)
    return None if is_plain else identity


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -P -m services.rpc.probe HOST:PORT")
    try:
        sys.exit(health_problem(sys.argv[1], own_identity(load())) or 0)
    except ConfigError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
