"""grpc.aio's server, extended to answer calls of unregistered methods here.

grpc.aio decodes the name of such a method in the loop that accepts every call. A name that is not UTF-8 ends
that loop and with it the server, so one unauthenticated call could stop a role. Here that loop gets only
calls of registered methods.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
    refused: Callable[[str], None],
) -> grpc.aio.Server:
    """Return a server that rejects calls of methods that generated code has not registered.

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
        # As in the base class, with this module's type for its C server.
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), tuple(interceptors), tuple(options), None)
        self._server.refused = refused
