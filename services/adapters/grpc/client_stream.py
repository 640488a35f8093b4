"""The client's end of streams over gRPC. Waits for messages are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, NoReturn, TypeVar

import grpc

from services.core.errors import FairwayError
from services.ports.streams import ClientStream, StreamLost, StreamMethod
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.status import from_rpc_error
from services.runtime.certificates import Certificates

In = TypeVar("In")
Out = TypeVar("Out")
_STATUS_S: Final = 1.0
_DETAILS: Final = "grpc-status-details-bin"
_CLOSED: Final = "the stream was closed on this side"


class GrpcStreams:
    """Implements ``ports.message_stream.StreamClient``: each stream has its own channel."""

    def __init__(self, token: str, certificates: Certificates | None = None) -> None:
        self._metadata = auth_metadata(token)
        self._certificates = certificates

    @property
    def credentials(self) -> object:
        return None if self._certificates is None else self._certificates.current()

    async def open(
        self, address: str, method: StreamMethod[Out, In], *, timeout_s: float
    ) -> ClientStream[Out, In]:
        """Return at once; the first write waits for the connection."""
        channel = open_channel(address, method.role, self._certificates)
        request, response = method.request, method.response
        call = channel.stream_stream(
            method.path,
            request_serializer=request.SerializeToString,  # type: ignore[attr-defined]
            response_deserializer=response.FromString,  # type: ignore[attr-defined]
        )(metadata=self._metadata)
        return GrpcClientStream(channel, call)


class GrpcClientStream(Generic[Out, In]):
    """Implements ``ports.message_stream.ClientStream``."""

    def __init__(self, channel: grpc.aio.Channel, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._channel = channel
        self._call = call

    async def write(self, message: Out) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end(error) from None

    async def read(self, timeout_s: float) -> In:
        try:
            async with asyncio.timeout(timeout_s):
                message: Any = await self._call.read()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise StreamLost(_CLOSED) from None
        except TimeoutError:
            raise StreamLost(f"the peer was silent for {timeout_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end(error) from None
        if message is grpc.aio.EOF:
            raise await self._end()
        found: In = message
        return found

    async def read_each(self, receive: Callable[[In], None]) -> NoReturn:
        try:
            async for message in self._call:
                receive(message)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise StreamLost(_CLOSED) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end(error) from None
        raise await self._end()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _end(self, error: BaseException | None = None) -> FairwayError | StreamLost:
        """Return why the stream ended, from its status."""
        if isinstance(error, grpc.aio.AioRpcError):
            return _error_of(error)
        call = self._call
        try:
            async with asyncio.timeout(_STATUS_S):
                code, details = await call.code(), await call.details()
        except TimeoutError:
            return StreamLost("the stream stalled")
        if code is grpc.StatusCode.OK:
            return StreamLost("the peer ended the stream")
        return _error_of(
            grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)
        )


def _error_of(error: grpc.aio.AioRpcError) -> FairwayError | StreamLost:
    """Return the error that the server raised, StreamLost for a status of the transport."""
    found = from_rpc_error(error)
    if any(key == _DETAILS for key, _ in error.trailing_metadata() or ()):
        return found
    return StreamLost(found.message)


def _is_cancelled() -> bool:
    """Whether this task is cancelled; grpc.aio also cancels the reader of a stream that is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
