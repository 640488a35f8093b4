"""Port of a bidirectional stream of messages between two processes: over gRPC, or simulated.

Every stream has a connection of its own. Each end has one task that writes and one that reads. A message
belongs to the receiver once it is written: the sender does not change it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class StreamLost(Exception):
    """The stream is over without an error of the peer: it ended, is unreachable, or the connection broke."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Request, Response]):
    """A streaming RPC: its path, "/package.Service/Method", and the types of its messages."""

    path: str
    request: type[Request]
    response: type[Response]


class MessageStream(Protocol[Out_contra, In_co]):
    """One end of an open stream. After its end every call raises why: StreamLost, or the FairwayError with
    which the server ended it."""

    async def write(self, message: Out_contra, /) -> None:
        """Return once the transport accepted the message, which may wait for the peer to read."""

    async def read(self, timeout_s: float) -> In_co:
        """Return the next message. Raises StreamLost when none is received in time, which ends the stream."""

    async def read_each(self, receive: Callable[[In_co], None]) -> NoReturn:
        """Call ``receive`` for each message until the stream ends. ``receive`` must not block; a FairwayError
        that it raises ends the call."""


class ClientStream(MessageStream[Out_contra, In_co], Protocol[Out_contra, In_co]):
    """The client's end. It is read by ``read`` or by ``read_each``, not by both."""

    async def close(self) -> None:
        """End the stream for both ends; a waiting reader raises StreamLost. Idempotent."""


class StreamClient(Protocol):
    async def open(
        self, address: str, method: StreamMethod[Request, Response], *, timeout_s: float
    ) -> ClientStream[Request, Response]:
        """Return a stream to the address, which the caller closes.

        Raises StreamLost when the peer is not reached in time. A transport may return before it reached the
        peer; the stream then reports the failure.
        """
