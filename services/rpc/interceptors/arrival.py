"""Arrival time of an RPC and its trace context. The outermost interceptor, so that the clock starts first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from services.ports.clock import Clock
from services.rpc.interceptors.base import AroundInterceptor

_MAX_TRACEPARENT: Final = 64
_MAX_ATTEMPT: Final = 1000
_ATTEMPT_KEYS: Final = ("x-fairway-attempt", "grpc-previous-rpc-attempts")


@dataclass(frozen=True, slots=True)
class RpcArrival:
    """``at_s``: monotonic, before the request message was read; None where an RPC carries many requests.

    ``attempt``: how often the caller sent it before, as reported by the caller or by gRPC's own retries.
    """

    at_s: float | None = None
    traceparent: str = ""
    attempt: int = 0


NOWHERE: Final = RpcArrival()
_arrival: ContextVar[RpcArrival] = ContextVar("arrival", default=NOWHERE)


def arrival() -> RpcArrival:
    """Return the arrival of the RPC of this task."""
    return _arrival.get()


def many_requests() -> None:
    """Mark the RPC of this task as a stream of requests that arrive when they are read."""
    _arrival.set(RpcArrival(None, _arrival.get().traceparent))


class NoteArrival(AroundInterceptor):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        # grpc.aio runs this and the handler in one task, so the variable belongs to the RPC.
        metadata = handler_call_details.invocation_metadata
        _arrival.set(RpcArrival(self._clock.monotonic_s(), _traceparent(metadata), _attempt(metadata)))
        return await continuation(handler_call_details)


def _traceparent(metadata: Any) -> str:
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str) and len(value) <= _MAX_TRACEPARENT:
            return value
    return ""


def _attempt(metadata: Any) -> int:
    """Return the larger of the client's count of attempts and gRPC's own."""
    found = [
        int(value)
        for key, value in metadata or ()
        if key in _ATTEMPT_KEYS and isinstance(value, str) and len(value) <= 6 and value.isdecimal()
    ]
    return min(_MAX_ATTEMPT, max(found, default=0))
