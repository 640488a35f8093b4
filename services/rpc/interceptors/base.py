"""The base of every interceptor: one `around` for all four shapes of RPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Call = Callable[[], Awaitable[Any]]


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Subclasses override ``around``.

    For every shape the inner behaviour is one awaitable. It writes a streaming response by ``context.write``,
    so that its ``finally`` blocks run when the client disconnects.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # handlers by method, so their number is bounded

    async def around(self, method: str, call: Call, context: Context) -> Any:
        """Run ``call`` and return its result. ``method`` is "/package.Service/Method"."""
        return await call()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming:
            inner = handler.stream_stream or handler.stream_unary
        else:
            inner = handler.unary_stream or handler.unary_unary
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrapped = make(self._wrap(method, inner), handler.request_deserializer, handler.response_serializer)
        self._handlers[method] = wrapped
        return wrapped

    def _wrap(self, method: str, inner: Any) -> Any:
        async def behaviour(request: Any, context: Context) -> Any:
            async def call() -> Any:
                return await run_behaviour(inner(request, context), context)

            return await self.around(method, call, context)

        return behaviour


async def run_behaviour(result: Any, context: Context) -> Any:
    """Await a coroutine; drain an async generator (third-party servicers have them) into the stream."""
    if not hasattr(result, "__aiter__"):
        return await result
    async for message in result:
        await context.write(message)
    return None
