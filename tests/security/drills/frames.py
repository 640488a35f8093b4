"""HTTP/2 as frames: what a gRPC library would not send, from a loopback address of one's choice."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_CONNECT_S: Final = 5.0
_INITIAL_WINDOW: Final = 4
_MAX_FRAME_BYTES: Final = 16384
_CANCEL: Final = (8).to_bytes(4, "big")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header_block(fields: Sequence[tuple[str, str]]) -> bytes:
    """HPACK without its tables: every field a literal that is never indexed."""
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    raw = text.encode("latin-1")
    if len(raw) < 127:
        return bytes((len(raw),)) + raw
    size, rest = bytearray((127,)), len(raw) - 127
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes((*size, rest)) + raw


def message(payload: bytes, *, compressed: bool = False) -> bytes:
    """Return a gRPC message with its prefix."""
    return bytes((compressed,)) + struct.pack(">I", len(payload)) + payload


class Http2:
    """A client's connection. ``answered``: streams that got headers or a reset. ``closed``: by the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._next = 1
        self._initial_window = 65535
        self._windows: dict[int, int] = {0: 65535}
        self._room = asyncio.Event()
        self.answered: set[int] = set()
        self.resets = 0
        self.closed = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: str, source: str) -> AsyncIterator[Http2]:
        """Raises OSError, TimeoutError. What the server closes meanwhile is no error."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        connection = cls(reader, writer)
        writer.write(
            _PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big"))
        )
        task = asyncio.create_task(connection._read())
        try:
            yield connection
        finally:
            task.cancel()
            writer.transport.abort()
            await asyncio.wait((task,))

    async def open(self, path: str, *fields: tuple[str, str], end: bool = False) -> int:
        """Begin a call; return its stream. ``fields`` are metadata."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial_window
        block = header_block(
            (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "127.0.0.1"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *fields,
            )
        )
        pieces = [block[at : at + _MAX_FRAME_BYTES] for at in range(0, len(block), _MAX_FRAME_BYTES)]
        for number, piece in enumerate(pieces):
            last = END_HEADERS if number == len(pieces) - 1 else 0
            kind = CONTINUATION if number else HEADERS
            await self.write(frame(kind, last | (END_STREAM if end and not number else 0), stream, piece))
        return stream

    async def send(self, stream: int, payload: bytes, *, end: bool = True) -> None:
        """Send data as the server's windows allow; give up when the stream has its answer."""
        view, at = memoryview(payload), 0
        while at < len(view) and stream not in self.answered and not self.closed.is_set():
            room = min(self._windows[0], self._windows[stream], _MAX_FRAME_BYTES, len(view) - at)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            self._windows[0] -= room
            self._windows[stream] -= room
            last = END_STREAM if end and at + room == len(view) else 0
            await self.write(frame(DATA, last, stream, bytes(view[at : at + room])))
            at += room

    async def call(self, path: str, payload: bytes, *fields: tuple[str, str]) -> int:
        """Send a whole unary call; return its stream without waiting for the answer."""
        stream = await self.open(path, *fields)
        await self.send(stream, payload)
        return stream

    async def reset(self, stream: int) -> None:
        await self.write(frame(RST_STREAM, 0, stream, _CANCEL))

    async def write(self, data: bytes) -> None:
        """Nothing happens on a connection that the server closed."""
        if self.closed.is_set():
            return
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            self.closed.set()
            self._room.set()

    async def answers(self, count: int, timeout_s: float) -> None:
        """Return once so many streams have their answers, the connection is closed, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.answered) < count and not self.closed.is_set():
                    await asyncio.sleep(0.02)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
                self._take(
                    kind, flags, stream, await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                )
        except (OSError, EOFError):
            pass
        finally:
            self.closed.set()
            self._room.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == _INITIAL_WINDOW:
                    self._windows = {
                        each: room if not each else room + value - self._initial_window
                        for each, room in self._windows.items()
                    }
                    self._initial_window = value
            self.writer.write(frame(SETTINGS, ACK, 0))
        elif kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == PING and not flags & ACK:
            self.writer.write(frame(PING, ACK, 0, payload))
        elif kind in (HEADERS, RST_STREAM) and (kind == RST_STREAM or flags & END_STREAM):
            self.answered.add(stream)
            self.resets += kind == RST_STREAM
            self._windows.pop(stream, None)
        self._room.set()
