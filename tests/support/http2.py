"""Just enough HTTP/2 to misbehave with: frames as bytes, which no client library would send."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE: Final = 4
CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def call(stream: int, path: str | bytes, *metadata: tuple[str, str]) -> bytes:
    """Return the headers of a gRPC call whose message is still to come."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "attacker"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    return frame(HEADERS, END_HEADERS, stream, b"".join(_literal(name, value) for name, value in fields))


def calls(path: str, count: int, *metadata: tuple[str, str], first: int = 1) -> bytes:
    return b"".join(call(stream, path, *metadata) for stream in range(first, first + 2 * count, 2))


def message(stream: int, body: bytes, *, compressed: int = 0, end: bool = True) -> bytes:
    """Return one gRPC message as data frames, the last of which ends the stream by default."""
    whole = struct.pack(">BI", compressed, len(body)) + body
    parts = [whole[at : at + 16_384] for at in range(0, len(whole), 16_384)]
    last = len(parts) - 1
    return b"".join(
        frame(DATA, END_STREAM if end and number == last else 0, stream, part)
        for number, part in enumerate(parts)
    )


def settings(**values: int) -> bytes:
    known = {"initial_window": INITIAL_WINDOW_SIZE}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", known[n], v) for n, v in values.items()))


def _literal(name: str, value: str | bytes) -> bytes:
    """Return a header that enters no table."""
    return b"\0" + _text(name) + _text(value)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        length, rest = length + bytes((rest & 127 | 128,)), rest >> 7
    return length + bytes((rest,)) + data


class Attacker:
    """One connection: it sends what it is given, reads on request, and answers pings on request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._windows: dict[int, int] = {}  # bytes that may be sent: 0 is the connection, others its streams
        self._window_grew = asyncio.Event()

    @classmethod
    async def connect(cls, port: int, *, source: str = "127.0.0.1", **values: int) -> Attacker:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(PREFACE + settings(**values) + frame(SETTINGS, ACK, 0))
        return cls(reader, writer)

    async def send(self, *parts: bytes) -> None:
        """Return once the kernel took everything, or the server has closed the connection."""
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
        except ConnectionError:
            return

    async def send_body(self, stream: int, data: bytes) -> None:
        """Send bytes of a message within the windows, while ``answer_pings`` runs beside."""
        at = 0
        while at < len(data):
            room = min(self._windows.setdefault(each, 65_535) for each in (0, stream))
            part = data[at : at + min(room, 16_384)]
            if not part:
                self._window_grew.clear()
                await self._window_grew.wait()
                continue
            at += len(part)
            for each in (0, stream):
                self._windows[each] -= len(part)
            await self.send(frame(DATA, 0, stream, part))

    async def answer_pings(self) -> None:
        """Read until the server closes the connection, so that its keepalive is content."""
        try:
            while True:
                head = await self.reader.readexactly(9)
                body = await self.reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == PING and not head[4] & ACK:
                    await self.send(frame(PING, ACK, 0, body))
                elif head[3] == WINDOW_UPDATE:
                    stream = int.from_bytes(head[5:9])
                    self._windows[stream] = self._windows.get(stream, 65_535) + int.from_bytes(body)
                    self._window_grew.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self.writer.transport.abort()


def close_all(attackers: Iterable[Attacker]) -> None:
    for attacker in attackers:
        attacker.close()
