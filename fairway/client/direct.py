"""A generation on its own RPC."""

from __future__ import annotations

import asyncio

import grpc

from fairway.client import convert
from fairway.client.attempts import Attempts, Core
from fairway.client.delivery import DeliveryPositions
from fairway.client.endpoints import Endpoint, Metadata
from fairway.client.errors import connection_lost, from_rpc
from fairway.client.values import Event
from fairway.v1 import inference_pb2 as pb


class DirectCarrier:
    """Opens a Generate RPC per attempt."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def open(
        self, generation: pb.Generation, attempts: Attempts, positions: DeliveryPositions
    ) -> DirectAttempt:
        endpoint = await attempts.begin()
        return DirectAttempt(self._core, endpoint, attempts.deadline_s, generation, attempts.metadata)


class DirectAttempt:
    """Holds its endpoint from construction until ``aclose``."""

    def __init__(
        self,
        core: Core,
        endpoint: Endpoint,
        deadline_s: float,
        generation: pb.Generation,
        metadata: Metadata,
    ) -> None:
        self.endpoint = endpoint
        self._core = core
        self._deadline_s = deadline_s
        self._open = True
        self._call = endpoint.stub.Generate(
            pb.GenerateRequest(generation=generation),
            timeout=max(0.0, deadline_s - core.now()),
            metadata=metadata,
        )

    async def receive(self) -> Event:
        while True:
            message = await self._read()
            kind = message.WhichOneof("event")
            if kind == "chunk":
                return convert.tokens(message.chunk)
            if kind == "accepted":
                return convert.accepted(message.accepted)
            if kind == "finished":
                return convert.finished(message.finished)

    def consumed(self, choice: int, tokens: int) -> None:
        """Do nothing: HTTP/2 flow control stops the stream of a reader that does not read."""

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._call.cancel()
            self._core.pool.release(self.endpoint)

    async def _read(self) -> pb.GenerateResponse:
        silence_s = self._core.options.silence_timeout_s
        try:
            async with asyncio.timeout(min(silence_s, self._deadline_s - self._core.now())):
                message = await self._call.read()
        except TimeoutError:
            if self._core.now() >= self._deadline_s:
                raise
            raise connection_lost(f"the gateway was silent for {silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if not isinstance(message, pb.GenerateResponse):
            raise connection_lost("the stream ended without its terminal event")
        return message
