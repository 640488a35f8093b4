"""The gRPC server of a role: interceptors, limits, health and reflection around its servicers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from services.core.errors import FailedPrecondition
from services.ports.clock import Clock
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.interceptors.access import PUBLIC_SERVICES, AccessControl, Authenticate, access_table
from services.rpc.interceptors.arrival import NoteArrival
from services.rpc.interceptors.base import AroundInterceptor
from services.rpc.interceptors.bounds import RequestBounds
from services.rpc.interceptors.errors import ErrorStatus
from services.rpc.interceptors.log_context import LogContext
from services.rpc.interceptors.metrics import CountRpcs, RpcMetrics
from services.rpc.interceptors.traces import TraceRpcs
from services.runtime.tracing import Tracing

log = structlog.get_logger()

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 4),
    ("grpc.so_reuseport", 0),
)
_MAX_RPCS: Final = 16_384


@dataclass(frozen=True, slots=True)
class RpcTelemetry:
    """What a server tells of its RPCs. ``tracing``: what makes a span of each, None where nothing does."""

    instruments: RpcMetrics
    clock: Clock
    tracing: Tracing | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer with its descriptor and the generated function that registers it."""

    descriptor: ServiceDescriptor
    register: Callable[[Any, grpc.aio.Server], None]
    servicer: object


def _watchers(descriptors: list[ServiceDescriptor], telemetry: RpcTelemetry) -> list[AroundInterceptor]:
    """Return what looks at an RPC from outside: from when it arrives to the status that its caller gets."""
    clock, tracing = telemetry.clock, telemetry.tracing
    found = [NoteArrival(clock), CountRpcs(descriptors, telemetry.instruments, clock)]
    return found if tracing is None else [*found, TraceRpcs(descriptors, tracing, clock)]


class RpcServer:
    """Serves from ``start`` until ``stop``; NOT_SERVING until ``set_serving(True)``."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        listen: str,
        internal_token: str,
        new_incident: Callable[[], str],
        authenticate: Authenticate | None = None,
        telemetry: RpcTelemetry | None = None,
    ) -> None:
        """Raises ValueError when a method of ``services`` has no access rule."""
        self._services = services
        self._listen = listen
        self._health = HealthServicer()
        self._parts: dict[str, bool] = {}
        table = access_table(service.descriptor for service in services)
        descriptors = [service.descriptor for service in services]
        outermost = [] if telemetry is None else _watchers(descriptors, telemetry)
        self._server = grpc.aio.server(
            interceptors=(
                *outermost,
                LogContext(),
                ErrorStatus(new_incident),
                AccessControl(table, authenticate, internal_token),
                RequestBounds(),
            ),
            options=_OPTIONS,
            maximum_concurrent_rpcs=_MAX_RPCS,
        )
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition when the address cannot be bound."""
        names = [service.descriptor.full_name for service in self._services]
        for service in self._services:
            service.register(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*names, *PUBLIC_SERVICES), self._server)
        await self.set_serving(False)
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError as exc:
            raise FailedPrecondition(
                f"cannot listen on {self._listen}: the port is taken or the address is not this machine's; "
                "choose another with FAIRWAY_LISTEN",
                listen=self._listen,
            ) from exc
        await self._server.start()
        log.info("server.started", listen=self._listen, port=self.port, services=names)

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING, for the whole server and each service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *(service.descriptor.full_name for service in self._services)):
            await self._health.set(name, status)

    async def set_parts(self, serving: Mapping[str, bool]) -> None:
        """Answer health checks of these names so; a name that is no longer there is unknown."""
        statuses = health_pb2.HealthCheckResponse
        for name in [name for name in self._parts if name not in serving]:
            del self._parts[name]
            await self._health.set(name, statuses.SERVICE_UNKNOWN)
        for name, serves in serving.items():
            if self._parts.get(name) is not serves:
                self._parts[name] = serves
                await self._health.set(name, statuses.SERVING if serves else statuses.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new RPCs, give running ones ``grace_s``, then cancel them."""
        await self._server.stop(grace_s)
