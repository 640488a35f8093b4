"""Counts RPCs by method and status. Placed around the error mapping, to count the caller's status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from services.ports.clock import Clock
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.runtime.telemetry.metrics import Metrics

_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class RpcMetrics:
    """The instruments, shared by the servers of a process."""

    def __init__(self, metrics: Metrics) -> None:
        self.started = metrics.counter("fairway_rpc_started_total", "RPCs whose handler started", ("method",))
        self.handled = metrics.counter(
            "fairway_rpc_handled_total",
            "RPCs that ended, by status",
            ("method", "code"),
        )
        self.handling = metrics.histogram(
            "fairway_rpc_handling_seconds",
            "From when a unary RPC's handler starts until it returns",
            ("method",),
        )
        self.running: dict[str, int] = {}
        self.connections_shut = metrics.counter(
            "fairway_rpc_connections_shut_total",
            "Connections closed: surplus without credentials, above a source's share, or unread answers",
            ("reason",),
        )
        metrics.gauge(
            "fairway_rpc_running",
            "Running RPCs, open streams included",
            lambda: [((method,), float(count)) for method, count in self.running.items()],
            ("method",),
        )


class CountRpcs(AroundInterceptor):
    """``services``: their methods with one response are timed. Clients decide how long streams last."""

    def __init__(self, services: Iterable[ServiceDescriptor], instruments: RpcMetrics, clock: Clock) -> None:
        super().__init__()
        self._instruments = instruments
        self._clock = clock
        self._timed = frozenset(
            f"/{service.full_name}/{method.name}"
            for service in services
            for method in service.methods
            if not (method.client_streaming or method.server_streaming)
        )

    async def around(self, method: str, call: Call, context: Context) -> Any:
        instruments, name = self._instruments, method[1:]
        instruments.started.add(name)
        instruments.running[name] = instruments.running.get(name, 0) + 1
        began_s = self._clock.monotonic_s()
        code = "OK"
        try:
            return await call()
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except BaseException:
            code = status_name(context.code)
            raise
        finally:
            instruments.running[name] -= 1
            instruments.handled.add(name, code)
            if method in self._timed:
                instruments.handling.observe(self._clock.monotonic_s() - began_s, name)


def status_name(read: Callable[[], Any]) -> str:
    """Return the name of the status; without one the caller receives UNKNOWN."""
    found = read()
    if isinstance(found, grpc.StatusCode):
        return found.name
    return _NAMES.get(found, "UNKNOWN") if found else "UNKNOWN"
