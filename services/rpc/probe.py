"""Health probe of a role for containers: ``python -P -m services.rpc.probe HOST:PORT``.

Exits 0 for SERVING, and 1 with the reason on stderr for everything else. A server that rejects the probe
because it has too many calls is alive and serves authenticated callers. It counts as healthy, since a restart
would only help an attacker.
"""

from __future__ import annotations

import sys
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

TIMEOUT_S: Final = 3.0
# grpc itself returns CANCELLED to calls that it cannot queue.
REFUSED: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def health_problem(address: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return "" when the health service at host:port answers SERVING or is flooded, else the reason."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
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


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -P -m services.rpc.probe HOST:PORT")
    sys.exit(health_problem(sys.argv[1]) or 0)


if __name__ == "__main__":
    main()
