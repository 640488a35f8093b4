"""What every interceptor needs: one `around` for all four shapes of RPC, a look at each request message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Call = Callable[[], Awaitable[Any]]


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Subclasses override ``around``, ``on_request``, or both.

    Whatever the shape, the inner behaviour becomes one awaitable: a streaming response is written by
    ``context.write`` inside it, so that its ``finally`` blocks run when the client goes away.
    """

    async def around(self, method: str, call: Call, context: Context) -> Any:
        """Run ``call`` and return its result. ``method`` is "/package.Service/Method"."""
        return await call()

    def on_request(self, method: str, message: Any) -> None:
        """Look at one request message before the behaviour gets it. Raise to end the RPC."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.request_streaming:
            wrapped = self._of_stream(method, handler.stream_stream or handler.stream_unary)
        else:
            wrapped = self._of_unary(method, handler.unary_stream or handler.unary_unary)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    @property
    def _looks(self) -> bool:
        """Whether the subclass looks at messages: a layer that does not costs a streamed message nothing."""
        return type(self).on_request is not AroundInterceptor.on_request

    def _of_unary(self, method: str, inner: Any) -> Any:
        async def behaviour(request: Any, context: Context) -> Any:
            async def call() -> Any:
                self.on_request(method, request)
                return await _run(inner(request, context), context)

            return await self.around(method, call, context)

        return behaviour

    def _of_stream(self, method: str, inner: Any) -> Any:
        async def behaviour(requests: AsyncIterator[Any], context: Context) -> Any:
            seen = self._looked_at(method, requests) if self._looks else requests

            async def call() -> Any:
                return await _run(inner(seen, context), context)

            return await self.around(method, call, context)

        return behaviour

    async def _looked_at(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in requests:
            self.on_request(method, message)
            yield message


async def _run(result: Any, context: Context) -> Any:
    """Await a coroutine; drain an async generator (third-party servicers have them) into the stream."""
    if not hasattr(result, "__aiter__"):
        return await result
    async for message in result:
        await context.write(message)
    return None
