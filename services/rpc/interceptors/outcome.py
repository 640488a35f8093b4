"""The outermost interceptors of an RPC: its span, the fields of its log events, and the status of its error.

Domain errors become rich statuses, and bugs INTERNAL with an incident id and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc._cython import cygrpc
from opentelemetry.trace import SpanKind
from structlog.contextvars import bound_contextvars

from services.core.errors import FairwayError, InternalError, Unimplemented
from services.ports.clock import Clock
from services.rpc.interceptors.arrival import arrival
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.rpc.interceptors.metrics import status_name
from services.rpc.status import to_grpc_status
from services.runtime.telemetry.logging import LineBudget, clean_id
from services.runtime.telemetry.tracing import Tracing, parse_traceparent

log = structlog.get_logger()
_NOT_OURS: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class ErrorStatus(AroundInterceptor):
    def __init__(self, new_incident: Callable[[], str], lines: LineBudget | None = None) -> None:
        """``lines`` bounds the log lines about rejections, because any client can cause them."""
        super().__init__()
        self._new_incident = new_incident
        self._lines = lines

    async def around(self, method: str, call: Call, context: Context) -> Any:
        try:
            return await self._answered(method, call, context)
        except cygrpc.ExecuteBatchError:
            # The caller has disconnected, and grpc has not cancelled this task yet: grpc would log the error.
            if self._lines is None or self._lines.take():
                log.info("rpc.undelivered", method=method)
            raise asyncio.CancelledError from None

    async def _answered(self, method: str, call: Call, context: Context) -> Any:
        try:
            return await call()
        except FairwayError as error:
            if isinstance(error, InternalError) and "incident" not in error.metadata:
                await self._crashed(method, error, context)
            if self._lines is None or self._lines.take():
                log.info("rpc.rejected", method=method, reason=error.reason)
            await context.abort_with_status(to_grpc_status(error))
        except (grpc.aio.AbortError, grpc.aio.UsageError, cygrpc.ExecuteBatchError, *_NOT_OURS):
            raise
        except NotImplementedError:  # raised by the generated base class
            await context.abort_with_status(to_grpc_status(Unimplemented(f"{method} is not implemented")))
        except BaseException as error:  # a native library's panic is not an Exception
            await self._crashed(method, error, context)

    async def _crashed(self, method: str, error: BaseException, context: Context) -> None:
        """End the RPC with an incident id, which is logged with the error. Always raises."""
        incident = self._new_incident()
        log.error("rpc.crashed", method=method, incident=incident, exc_info=error)
        bug = InternalError("internal error; quote the incident id to the operator", incident=incident)
        await context.abort_with_status(to_grpc_status(bug))


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
