"""Reads, measures, decodes and checks a request message, after its caller is authenticated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from services.core.errors import DeadlineExceeded, InvalidInput, OverQuota
from services.rpc import bounds
from services.rpc.interceptors.access import caller
from services.rpc.interceptors.audit import note_request
from services.rpc.interceptors.base import Context, run_behaviour
from services.rpc.message_size import MALFORMED, PUBLIC, MessageLimits, check_raw

# In these streams an invalid entry fails alone, so their servicers check the messages themselves.
CHECKED_BY_SERVICER: Final = frozenset(
    {
        "/fairway.v1.InferenceService/Session",
        "/fairway.v1.SchedulerService/Connect",
        "/fairway.v1.WorkerService/Execute",
        "/inference.GRPCInferenceService/ModelStreamInfer",
    }
)
MESSAGE_WITHIN_S: Final = 10.0
# Calls of one caller whose message has not arrived yet. Each may hold the transport's largest message. All
# unauthenticated callers count as one, so they have few. A message usually arrives with its call.
MAX_WAITING: Final = 128
MAX_WAITING_UNAUTHENTICATED: Final = 8
MAX_WAITING_SERVICES: Final = 4096
MAX_PUBLIC_MESSAGES: Final = 256


class PendingMessages:
    """The calls that wait for a message, by caller. Above the bound, the one that has waited longest ends."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._by_caller: dict[str | None, dict[asyncio.Timeout, None]] = {}

    async def read(self, context: Context) -> Any:
        """Return the encoded message, or EOF.

        Raises DeadlineExceeded, or OverQuota when another call took its place.
        """
        who = caller()
        most = MAX_WAITING_UNAUTHENTICATED if who is None else MAX_WAITING if who else MAX_WAITING_SERVICES
        waiting = self._by_caller.setdefault(who, {})
        if len(waiting) >= most:
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.reschedule(0.0)
        place = asyncio.timeout(self._within_s)
        evicted = False
        try:
            async with place:
                waiting[place] = None
                try:
                    return await context.read()
                finally:
                    evicted = place not in waiting
                    waiting.pop(place, None)
                    if not waiting and self._by_caller.get(who) is waiting:
                        del self._by_caller[who]
        except TimeoutError:
            if evicted:
                text = f"more than {most} calls of this caller wait for their messages"
                raise OverQuota(text, retry_after_s=1.0) from None
            raise DeadlineExceeded(f"no request message came within {self._within_s:g} s") from None


class ReadMessages(grpc.aio.ServerInterceptor):
    """The innermost interceptor.

    It declares every method to grpc.aio as a stream of bytes. So the interceptors around it run once the
    headers have arrived, and the message of a caller that they reject is neither read nor decoded.
    """

    def __init__(
        self,
        limits: Mapping[str, MessageLimits],
        *,
        changes: frozenset[str] = frozenset(),
    ) -> None:
        """``limits`` by "/package.Service/Method"; methods without limits are public and take small ones.

        ``changes``: methods whose requests are noted for the audit log.
        """
        self._limits = limits
        self._changes = changes
        self._waiting = PendingMessages(MESSAGE_WITHIN_S)
        self._handlers: dict[str, Any] = {}  # handlers by method, so their number is bounded

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            found = self._handlers[method] = self._of(method, handler)
        return found

    def _of(self, method: str, handler: Any) -> Any:
        decode = self._decoder(method, handler.request_deserializer)
        if not handler.request_streaming:
            behaviour = self._of_unary(handler.unary_stream or handler.unary_unary, decode)
        else:
            messages = self._decoded if method in self._limits else self._decoded_unauthenticated
            behaviour = _of_stream(handler.stream_stream or handler.stream_unary, messages, decode)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(behaviour, None, handler.response_serializer)

    def _decoder(self, method: str, deserialize: Any) -> Callable[[bytes], Any]:
        limits = self._limits.get(method, PUBLIC)
        bounded = method in self._limits and method not in CHECKED_BY_SERVICER
        noted = method in self._changes

        def decode(raw: bytes) -> Any:
            check_raw(raw, limits)
            try:
                message = deserialize(raw)
            except DecodeError:
                raise InvalidInput(MALFORMED) from None
            if bounded:
                bounds.check(message)
            if noted:
                note_request(message)
            return message

        return decode

    def _of_unary(self, inner: Any, decode: Callable[[bytes], Any]) -> Any:
        async def behaviour(_requests: AsyncIterator[bytes], context: Context) -> Any:
            raw = await self._waiting.read(context)
            if raw is grpc.aio.EOF:
                raise InvalidInput("the call has no request message")
            return await run_behaviour(inner(decode(raw), context), context)

        return behaviour

    async def _decoded(
        self, requests: AsyncIterator[bytes], _context: Context, decode: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        async for raw in requests:
            yield decode(raw)

    async def _decoded_unauthenticated(
        self, _requests: AsyncIterator[bytes], context: Context, decode: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        for _ in range(MAX_PUBLIC_MESSAGES):
            raw = await self._waiting.read(context)
            if raw is grpc.aio.EOF:
                return
            yield decode(raw)
        raise OverQuota(f"the stream had {MAX_PUBLIC_MESSAGES} messages: open another")


def _of_stream(inner: Any, messages: Any, decode: Callable[[bytes], Any]) -> Any:
    async def behaviour(requests: AsyncIterator[bytes], context: Context) -> Any:
        return await run_behaviour(inner(messages(requests, context, decode), context), context)

    return behaviour
