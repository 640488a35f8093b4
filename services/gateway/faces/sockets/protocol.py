"""One WebSocket of the HTTP server: uvicorn's protocol over ``websockets``, with additional limits.

uvicorn starts to read only messages that are complete, counts neither the frames of a message nor control
frames, handles a whole read of the event loop at once, answers each ping of a client that reads nothing,
closes a slow client whose answer to a ping is late, and waits without limit for a client that it closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request

from services.core.errors import FairwayError
from services.runtime.connections import ConnectionTable, accepted_bytes, source_of
from services.runtime.process.tenant_turns import LoopTurns

# Interval of pings; a connection without an answer or other bytes in that time is closed.
PING_S: Final = 20.0
MESSAGE_S: Final = 60.0  # longest time from the first byte of a message to its last
CLOSE_S: Final = 10.0  # time after which a client that does not close is cut
_QUIET_S: Final = 0.5  # silence after which a client that failed is cut
# Continuations and control frames since the last message or ping of the server.
MAX_FRAMES: Final = 1024
# Bytes that are parsed in one iteration of the event loop: at most some 1,400 frames.
_SLICE_BYTES: Final = 8 * 1024
SLICES_PER_TURN: Final = 4  # slices of all sockets in one turn; each socket has at most one that waits
_TOO_MUCH: Final = 1008
_TRY_AGAIN: Final = 1013
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
EXTENSION: Final = "fairway.socket"  # names the connection in the extensions of its scope


class SocketProtocol(WebSocketsSansIOProtocol):
    """Reads as much as the application takes, and at most a slice at a time.

    The application finds it as ``scope["extensions"][EXTENSION]``. It may be ``draining``: the server stops.
    """

    def __init__(
        self, table: ConnectionTable, starts: LoopTurns, slices: LoopTurns, *, draining: bool, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._table = table
        self._starts = starts
        self._slices = slices
        self._hold: Callable[[int], None] = lambda _size: None
        self._message_bytes = 0  # size of the message that is being received or handled
        self._frames = 0
        self._pong = b""  # the answer to the newest ping, while the client does not read
        self._read_bytes = 0
        self._moved = (0, 0)  # bytes in both directions when the wait for the answer to a ping began
        self._unread = bytearray()
        self._feeding = False  # a slice is scheduled
        self._known = False
        self._failed = False  # closed for a fault of the client
        self._late: asyncio.TimerHandle | None = None  # deadline of the message that is being received
        self._end: asyncio.TimerHandle | None = None
        self._on_drain: Callable[[], None] | None = None
        self.draining = draining
        self.closed = asyncio.Event()

    # Offered to the application.

    def cut(self) -> None:
        self.transport.abort()

    def authenticated(self) -> None:
        """The client has a valid credential."""
        self._known = True
        self.set_busy(False)

    def set_busy(self, busy: bool) -> None:
        """Whether the client waits for this process. An idle connection may be closed for a new one."""
        self._table.update(self.transport, busy=busy, authenticated=self._known)

    def account(self, hold: Callable[[int], None]) -> None:
        """Call ``hold`` with the bytes of the message that is being received; its error closes the socket."""
        self._hold = hold

    def on_drain(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the server begins to stop."""
        self._on_drain = act

    async def turn(self) -> None:
        """Return once a request may start."""
        await self._starts.turn(source_of(self.client))

    def accepted_bytes(self) -> int:
        return accepted_bytes(self.transport)

    # Called by the server.

    def drain(self) -> None:
        """Let the application end the connection. Idempotent."""
        if not self.draining:
            self.draining = True
            if self._on_drain is not None:
                self._on_drain()

    # Called by the event loop.

    def data_received(self, data: bytes) -> None:
        self._read_bytes += len(data)
        if not self.handshake_initiated:
            super().data_received(data)  # the head, as the HTTP protocol has read it
            if not self.handshake_initiated:
                self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
                self.transport.close()
                self._close_later()
        elif self._failed:
            self._close_when_quiet()
        elif not self.handshake_complete:
            self.transport.abort()  # a client waits for the answer to its handshake
        else:
            self._unread += data
            self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self._message_over()
        self._unread.clear()
        self._on_drain = None
        self._table.remove(self.transport)
        self.closed.set()
        super().connection_lost(exc)
        # Both refer to themselves: without that a closed connection is freed without the cycle collector.
        self.scope = cast(Any, None)
        self.conn.parser.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pong and self.conn.close_sent is None:
            self.transport.write(self._pong)
        self._pong = b""

    async def receive(self) -> Any:
        """Return the next message. The one before it has been handled."""
        self._message_over()
        self._hold(0)
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._read_on()
        return message

    async def send(self, message: Any) -> None:
        """Send an event once the connection accepts more. Raises OSError when it is closed."""
        while not self.writable.is_set():  # One of several that wait may fill it again.
            await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self._close_later()

    # Parts of uvicorn's protocol.

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            offered: dict[str, Any] = self.scope["extensions"]
            offered[EXTENSION] = self
        else:
            self._close_later()

    def handle_cont(self, event: Frame) -> None:
        if self._counted():
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer only the newest of several pings that come while the client does not read (RFC 6455,
        5.5.3)."""
        if self._counted():
            self._between_messages()
            if self.writable.is_set() or self.conn.close_sent is not None:
                super().handle_ping()
            elif answers := self.conn.data_to_send():
                self._pong = answers[-1]

    def handle_pong(self, event: Frame) -> None:
        if self._counted():
            self._between_messages()
            super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        self._frames = 0
        self._stop_late()
        super().send_receive_event_to_app()

    def send_keepalive_ping(self) -> None:
        self._frames = 0
        self._moved = self._moved_bytes()
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        """Close the connection unless bytes move: a client reads all that was sent before a ping first."""
        moved = self._moved_bytes()
        if moved != self._moved and not self.close_sent and not self.transport.is_closing():
            self._moved = moved
            self.pong_timer = self.loop.call_later(self.ping_timeout or PING_S, self.keepalive_timeout)
            return
        super().keepalive_timeout()
        self._close_later()

    def _moved_bytes(self) -> tuple[int, int]:
        return self._read_bytes, self.accepted_bytes()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._close_later()

    def handle_parser_exception(self) -> None:
        """End after a fault of the client. What it still sends is read, or it would lose the reason."""
        sent = self.conn.close_sent
        if sent is None:
            self.transport.abort()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self._failed = True
        self._message_over()
        self._unread.clear()
        self._hold(0)
        self._close_when_quiet()
        self._close_later()
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def shutdown(self) -> None:
        super().shutdown()
        self._close_later()

    def _read_on(self) -> None:
        """Read what is still there, unless a message waits for the application."""
        if self.read_paused or self._feeding or self._failed or self.transport.is_closing():
            return
        if self._unread:
            self._feeding = True
            self.transport.pause_reading()
            self._slices.add(source_of(self.client), self._feed)
        else:
            self.transport.resume_reading()

    def _feed(self) -> None:
        """Parse a slice of what was read, unless a message waits for the application."""
        self._feeding = False
        if self.transport.is_closing() or self.read_paused or self._failed:
            return
        part = bytes(self._unread[:_SLICE_BYTES])
        del self._unread[:_SLICE_BYTES]
        self._message_bytes += len(part)
        if self._late is None:
            self._late = self.loop.call_later(MESSAGE_S, self._fail, _TOO_MUCH, "a message took too long")
        try:
            self._hold(self._message_bytes)
        except FairwayError as error:
            self._fail(_TRY_AGAIN, error.message)
            return
        try:
            super().data_received(part)
        except InvalidState:  # a fault of the client behind its own close: no reason can be sent any more
            self.transport.abort()
            return
        self._read_on()

    def _between_messages(self) -> None:
        """A control frame was read: it is no part of a message, unless fragments of one are there."""
        if not self.frames:
            self._message_over()

    def _message_over(self) -> None:
        self._message_bytes = 0
        self._stop_late()

    def _stop_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _counted(self) -> bool:
        """Count a frame that completes no message. Return whether it may be handled."""
        if self.close_sent:
            return True
        self._frames += 1
        if self._frames > MAX_FRAMES:
            self._fail(_TOO_MUCH, "too many frames without a message")
            return False
        return True

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _close_when_quiet(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(_QUIET_S, self.transport.close)

    def _close_later(self) -> None:
        """Cut the connection unless it ends by itself: a close waits for the client to read."""
        if self._end is None:
            self._end = self.loop.call_later(CLOSE_S, self.transport.abort)
