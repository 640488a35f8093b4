"""The server's end of a stream over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

from services.ports.streams.message_stream import StreamLost

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
