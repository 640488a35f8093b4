"""The gRPC server of a role: interceptors, limits, health and reflection around its servicers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc._cython import cygrpc
from grpc.aio import _server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fairway.task_group import TaskGroup
from services.core.errors import FailedPrecondition, NotFound
from services.ports.clock import Clock
from services.ports.streams import StreamLost
from services.rpc.bounded_writes import BoundedWrites
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.connections import MAX_CONNECTIONS, Connections, UnauthenticatedCalls
from services.rpc.interceptors.access import PUBLIC_SERVICES, AccessControl, Authenticate, access_table
from services.rpc.interceptors.arrival import NoteArrival
from services.rpc.interceptors.audit import AuditRefusals, changes_of
from services.rpc.interceptors.base import AroundInterceptor
from services.rpc.interceptors.messages import ReadMessages
from services.rpc.interceptors.metrics import CountRpcs, RpcMetrics
from services.rpc.interceptors.outcome import ErrorStatus, LogContext, TraceRpcs
from services.rpc.message_size import MessageLimits, limits_of
from services.rpc.peers import PeerRules, callers_table, server_credentials
from services.runtime.audit import AuditRecorder
from services.runtime.certificates import Certificates
from services.runtime.process.machine import descriptor_limit
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.tracing import Tracing

In = TypeVar("In")


class GrpcServerStream(Generic[In]):
    """Implements ``ports.message_stream.MessageStream`` in a handler.

    gRPC cancels the handler when the client disconnects. An error that the handler raises ends the stream.
    """

    write: Callable[[Any], Coroutine[Any, Any, None]]  # the context's own: it is on the token path

    def __init__(self, requests: AsyncIterator[In], context: Any) -> None:
        self._requests = requests
        self.write = context.write

    async def read(self, timeout_s: float) -> In:
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self._requests)
        except TimeoutError:
            raise StreamLost(f"the client sent nothing for {timeout_s:g} s") from None
        except StopAsyncIteration:
            raise StreamLost("the client ended the stream") from None

    async def read_each(self, receive: Callable[[In], None]) -> NoReturn:
        async for request in self._requests:
            receive(request)
        raise StreamLost("the client ended the stream")


async def woken_within(woken: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set or after ``timeout_s``, and clear the event."""
    alarm = asyncio.get_running_loop().call_later(timeout_s, woken.set)
    try:
        await woken.wait()
    finally:
        alarm.cancel()
    woken.clear()


log = structlog.get_logger()

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 4096),
    # Bit 0 is identity. A decompressed message has no size bound, so compression is off.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Calls that wait until this process accepts them. None is dropped below the bound.
    ("grpc.server.max_pending_requests", 2048),
    ("grpc.server.max_pending_requests_hard_limit", 2048),
    # Windows that grow automatically reach megabytes, which a stream without a reader may then fill.
    ("grpc.http2.bdp_probe", 0),
    # grpc reads more at once the more a connection sends; its own bound is 4 MiB for each connection.
    ("grpc.experimental.tcp_max_read_chunk_size", 128 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # a client that is still there reconnects for its next call
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # No bound on pings. With a bound, grpc spends time that grows with the square of the pings received
    # before its rejection is written. Answering one takes a microsecond, and unsent answers are bounded.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class RpcTelemetry:
    """Telemetry of a server's RPCs. ``tracing`` creates a span of each; None for no spans.

    ``lines`` bounds the log lines about single RPCs.
    """

    instruments: RpcMetrics
    clock: Clock
    tracing: Tracing | None = None
    lines: LineBudget | None = None


@dataclass(frozen=True, slots=True)
class RpcService:
    """A servicer with its descriptor and the generated function that registers it."""

    descriptor: ServiceDescriptor
    register: Callable[[Any, grpc.aio.Server], None]
    servicer: object


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a server. ``from_roles``: callers present a certificate of the installation; otherwise none.

    ``refused`` is called with the reason of each call that is refused or ended for its certificate.
    """

    certificates: Certificates
    clock: Clock
    from_roles: bool = True
    refused: Callable[[str], None] = lambda reason: None

    def peers(self, callers: Mapping[str, frozenset[str]]) -> PeerRules | None:
        """Return the rules of callers' certificates, by method; None where callers present none."""
        return PeerRules(callers, self.certificates, self.clock, self.refused) if self.from_roles else None


def _watchers(descriptors: list[ServiceDescriptor], telemetry: RpcTelemetry) -> list[AroundInterceptor]:
    """Return the interceptors that cover an RPC from its arrival to the status that its caller gets."""
    clock, tracing = telemetry.clock, telemetry.tracing
    found = [NoteArrival(clock), CountRpcs(descriptors, telemetry.instruments, clock)]
    return found if tracing is None else [*found, TraceRpcs(descriptors, tracing, clock)]


def _limits(descriptors: list[ServiceDescriptor]) -> dict[str, MessageLimits]:
    return {
        f"/{each.full_name}/{method.name}": limits_of(method)
        for each in descriptors
        for method in each.methods
    }


class RpcServer:
    """Serves from ``start`` until ``stop``; NOT_SERVING until ``set_serving(True)``."""

    def __init__(
        self,
        services: Sequence[RpcService],
        *,
        listen: str,
        internal_token: str,
        new_incident: Callable[[], str],
        authenticate: Authenticate | None = None,
        telemetry: RpcTelemetry | None = None,
        audit: AuditRecorder | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """``audit`` records refused calls. Without ``tls`` it is plain.

        Raises ValueError when a method of ``services`` has no access rule, or is for services and names no
        callers.
        """
        self._services = services
        self._listen = listen
        self._tls = tls
        self._health = HealthServicer()
        self._parts: frozenset[str] = frozenset()
        table = access_table(service.descriptor for service in services)
        descriptors = [service.descriptor for service in services]
        callers = callers_table(descriptors)
        self._peers = None if tls is None else tls.peers(callers)
        changes = changes_of(descriptors)
        refusals = [] if audit is None else [AuditRefusals(audit, changes)]
        outermost = [] if telemetry is None else _watchers(descriptors, telemetry)
        shut = () if telemetry is None else (telemetry.instruments.connections_shut.add,)
        most = min(MAX_CONNECTIONS, descriptor_limit() // 2)
        self._connections = Connections(*shut, max_connections=most)
        unauthenticated = UnauthenticatedCalls(self._connections.close_soon)
        # Without grpc's own bound of RPCs: it counts an unauthenticated call before any interceptor runs.
        self._server = make_server(
            interceptors=(
                *outermost,
                LogContext(),
                ErrorStatus(new_incident, None if telemetry is None else telemetry.lines),
                *refusals,
                AccessControl(
                    table,
                    authenticate,
                    internal_token,
                    self._connections,
                    unauthenticated,
                    self._peers,
                ),
                ReadMessages(_limits(descriptors), changes=changes),
            ),
            options=(*_OPTIONS, ("grpc.max_allowed_incoming_connections", most)),
            refused=unauthenticated.refused,
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
            self.port = self._add_port()
        except RuntimeError as exc:
            raise FailedPrecondition(
                f"cannot listen on {self._listen}: the port is taken or the address is not this machine's; "
                "choose another with FAIRWAY_LISTEN",
                listen=self._listen,
            ) from exc
        await self._server.start()
        secured = self._tls is not None
        log.info("server.started", listen=self._listen, port=self.port, services=names, tls=secured)

    def _add_port(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(self._listen)
        credentials = server_credentials(self._tls.certificates, from_roles=self._tls.from_roles)
        return self._server.add_secure_port(self._listen, credentials)

    async def guard_connections(self, clock: Clock) -> None:
        """Enforce the bounds on connections, and end the open calls of certificates that are not valid any
        more, until cancelled."""
        async with TaskGroup() as group:
            if self._peers is not None:
                group.create_task(self._peers.guard())
            await self._connections.guard(clock, lambda: self.port)

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING, for the whole server and each service."""
        for name in ("", *(service.descriptor.full_name for service in self._services)):
            self._health.set(name, serving)

    async def set_parts(self, serving: Mapping[str, bool]) -> None:
        """Set the health of these names; a name that is no longer included becomes unknown."""
        for name in self._parts - serving.keys():
            self._health.set(name, None)
        for name, serves in serving.items():
            self._health.set(name, serves)
        self._parts = frozenset(serving)

    async def stop(self, grace_s: float) -> None:
        """Accept no new RPCs, let running ones finish within ``grace_s``, then cancel them."""
        self._connections.port_closes()
        await self._server.stop(grace_s)


Context = grpc.aio.ServicerContext[Any, Any]
_Response = health_pb2.HealthCheckResponse
_UNREAD_S = 10.0


class HealthServicer(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool | None) -> None:
        """Set the status of this name; None removes the name."""
        if self._serving.get(name) is serving:
            return
        if serving is None:
            del self._serving[name]
        else:
            self._serving[name] = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            raise NotFound("there is no such service here")
        return _response(self._serving[request.service])

    async def List(self, request: Any, context: Context) -> Any:  # newer than the published type stubs
        found = {name: _response(serving) for name, serving in self._serving.items()}
        return health_pb2.HealthListResponse(statuses=found)  # type: ignore[attr-defined]

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with BoundedWrites(context, _UNREAD_S) as writes:
            sent = None
            while True:
                changed, answer = self._changed, _response(self._serving.get(request.service))
                if answer != sent:
                    await writes.write(answer)
                    sent = answer
                await changed.wait()


def _response(serving: bool | None) -> health_pb2.HealthCheckResponse:
    if serving is None:
        return _Response(status=_Response.SERVICE_UNKNOWN)
    return _Response(status=_Response.SERVING if serving else _Response.NOT_SERVING)


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
    refused: Callable[[str], None],
) -> grpc.aio.Server:
    """Return a server that rejects calls of methods that generated code has not registered.

    grpc.aio decodes the name of such a method in the loop that accepts every call. A name that is not UTF-8
    ends that loop and with it the server, so one unauthenticated call could stop a role. Here that loop gets
    only calls of registered methods.

    ``refused`` is called with the peer of each such call, in the task that ends with the call.
    """
    return cast(grpc.aio.Server, _Server(interceptors, options, refused))


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    refused: Callable[[str], None]  # set before the server starts

    async def _request_call(self) -> Any:
        """Answer calls of unregistered methods until the server stops. Never returns a call."""
        loop = asyncio.get_running_loop()
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            task = loop.create_task(self._refuse(cygrpc._ServicerContext(call, None, None, loop)))
            answering.add(task)
            task.add_done_callback(answering.discard)

    async def _refuse(self, context: Any) -> None:
        self.refused(context.peer())
        # the caller has disconnected
        with contextlib.suppress(grpc.aio.AbortError, cygrpc.ExecuteBatchError):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")


class _Server(_server.Server):
    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        refused: Callable[[str], None],
    ) -> None:
        # This repeats the base class with this module's type for its C server.
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), tuple(interceptors), tuple(options), None)
        self._server.refused = refused
