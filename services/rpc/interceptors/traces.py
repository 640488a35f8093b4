"""A span per RPC, and the fields that the log events of an RPC carry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from opentelemetry.trace import SpanKind
from structlog.contextvars import bound_contextvars

from services.ports.clock import Clock
from services.rpc.interceptors.arrival import arrival
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.rpc.interceptors.metrics import status_name
from services.runtime.telemetry.logging import clean_id
from services.runtime.telemetry.tracing import Tracing, parse_traceparent


class LogContext(AroundInterceptor):
    """Log events of an RPC carry its method and the caller's request id."""

    async def around(self, method: str, call: Call, context: Context) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        client_id = clean_id(metadata.get("x-request-id", ""))
        names = {"client_request_id": client_id} if client_id else {}
        with bound_contextvars(rpc=method, **names):
            return await call()


class TraceRpcs(AroundInterceptor):
    """A span per RPC, for services whose RPCs are the work itself. A gateway records its own spans.

    ``services``: their methods with one response are traced. Clients decide how long streams last."""

    def __init__(self, services: Iterable[ServiceDescriptor], tracing: Tracing, clock: Clock) -> None:
        super().__init__()
        self._tracing = tracing
        self._clock = clock
        self._traced = frozenset(
            f"/{service.full_name}/{method.name}"
            for service in services
            for method in service.methods
            if not method.server_streaming
        )

    async def around(self, method: str, call: Call, context: Context) -> Any:
        if method not in self._traced:
            return await call()
        arrived = arrival()
        began_s = self._clock.monotonic_s() if arrived.at_s is None else arrived.at_s
        parent = parse_traceparent(arrived.traceparent) if arrived.traceparent else None
        span = self._tracing.start(method[1:], began_s, parent, kind=SpanKind.SERVER)
        error = ""
        try:
            return await call()
        except asyncio.CancelledError:
            error = "CANCELLED"
            raise
        except BaseException:
            error = status_name(context.code)
            raise
        finally:
            self._tracing.end(span, self._clock.monotonic_s(), error=error)
