"""Streams of messages over the simulated network. Messages are passed as they are, without encoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

from services.core.errors import FairwayError
from services.ports.streams import ClientStream, MessageStream, StreamLost, StreamMethod
from simulator.kernel.connection import Broken, Silent, SimConnection
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process

In = TypeVar("In")
Out = TypeVar("Out")


class SimStreams:
    """Implements ``ports.message_stream.StreamClient`` for one process."""

    credentials = None

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def open(
        self, address: str, method: StreamMethod[Out, In], *, timeout_s: float
    ) -> ClientStream[Out, In]:
        try:
            connection = await self._network.connect(self._process, address + method.path, within_s=timeout_s)
        except Unreachable as error:
            raise StreamLost(str(error)) from None
        return SimStream(connection)


def serve_stream(
    process: Process,
    network: Network,
    address: str,
    method: StreamMethod[In, Out],
    handler: Callable[[MessageStream[Out, In]], Coroutine[Any, Any, None]],
) -> None:
    """Run the handler for each stream to the address, until the process crashes. Its end is the stream's."""

    async def serve(connection: SimConnection) -> None:
        error: FairwayError | None = None
        try:
            await handler(SimStream(connection))
        except FairwayError as failure:
            error = failure
        finally:
            connection.close(error)

    def accept(connection: SimConnection) -> None:
        process.spawn(method.path, serve(connection))

    network.listen(process, address + method.path, accept)


class SimStream(Generic[Out, In]):
    """Implements ``ports.message_stream.ClientStream``, for either end."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection

    async def write(self, message: Out) -> None:
        connection = self._connection
        if not connection.has_room:
            await connection.wait_room()
        try:
            connection.post(message)
        except Broken as broken:
            raise _end(broken) from None

    async def read(self, timeout_s: float) -> In:
        try:
            found: In = await self._connection.receive(timeout_s)
        except Silent:
            raise StreamLost(f"the peer was silent for {timeout_s:g} s") from None
        except Broken as broken:
            raise _end(broken) from None
        return found

    async def read_each(self, receive: Callable[[In], None]) -> NoReturn:
        ended: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

        def on_message(message: In) -> None:
            if not ended.done():
                try:
                    receive(message)
                except FairwayError as error:
                    ended.set_exception(error)

        def on_broken(broken: Broken) -> None:
            if not ended.done():
                ended.set_exception(_end(broken))

        self._connection.read_each(on_message, on_broken)
        await ended

    async def close(self) -> None:
        self._connection.close()


def _end(broken: Broken) -> Exception:
    """Return why the stream ended."""
    return broken.error if isinstance(broken.error, FairwayError) else StreamLost(broken.message)
