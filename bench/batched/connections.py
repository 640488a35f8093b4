"""Connections of the load generator: one request at a time each, as little work of this process as possible.

A client that costs a tenth of a core for each thousand requests would be the bottleneck on two cores. These
write bytes that were encoded before, and look only for the end of the answer and whether it is an error.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

Answered = Callable[[bytes], None]


class Failed(Exception):
    """A server answered with an error, or ended the connection."""


class Connection(Protocol):
    """``send`` is called again after ``on_answer`` was called with the answer."""

    on_answer: Answered

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class _Connected(asyncio.Protocol):
    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.on_answer: Answered = lambda _: None
        self._on_failure = on_failure
        self._closing = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            self._on_failure(f"the server closed a connection: {exc}")

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None, "not connected"
        self._transport.write(data)


class HttpConnection(_Connected):
    """HTTP/1.1 with keep-alive; a message is a whole request."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        super().__init__(on_failure)
        self._received = b""
        self._wanted = 0  # bytes of the answer, once its head was received

    def send(self, message: bytes) -> None:
        self._received, self._wanted = b"", 0
        self._write(message)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._wanted:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._received[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                self._on_failure(self._received[:400].decode(errors="replace"))
                return
            at = head.find(b"content-length:")
            if at < 0 and b"chunked" in head:
                if self._received.endswith(_LAST_CHUNK):
                    self.on_answer(self._received)
                return
            if at < 0:
                self._on_failure("the answer has no Content-Length")
                return
            self._wanted = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self._received) >= self._wanted:
            self.on_answer(self._received)


_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"  # of an answer of unstated length

# Frames of HTTP/2 (RFC 9113).
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK: Final = 0x1
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_INITIAL_WINDOW: Final = 4  # the setting
_LARGEST_WINDOW: Final = 2**31 - 1
_FIRST_WINDOW: Final = 65535
_FRAME_BYTES: Final = 16384
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PREFIX: Final = struct.Struct(">BI")  # of a message of gRPC


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def header_block(headers: Sequence[tuple[str, str]]) -> bytes:
    """Return headers as HPACK literals, neither indexed nor Huffman coded."""
    parts = []
    for name, value in headers:
        parts.append(b"\x00")
        for text in (name.encode(), value.encode()):
            assert len(text) < 127, "a longer text has a longer length"
            parts += [bytes((len(text),)), text]
    return b"".join(parts)


class GrpcStream(_Connected):
    """One HTTP/2 connection with one bidirectional call of gRPC; a message is an encoded proto."""

    def __init__(
        self, on_failure: Callable[[str], None], path: str, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(on_failure)
        self._headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "bench"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self._received = bytearray()
        self._message = bytearray()
        self._unsent: list[bytes] = []
        self._room = self._stream_room = self._initial = _FIRST_WINDOW

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        settings = struct.pack(">HI", _INITIAL_WINDOW, _LARGEST_WINDOW)
        more = (_LARGEST_WINDOW - _FIRST_WINDOW).to_bytes(4, "big")
        self._write(
            _PREFACE
            + frame(_SETTINGS, 0, 0, settings)
            + frame(_WINDOW_UPDATE, 0, 0, more)
            + frame(_HEADERS, _END_HEADERS, 1, header_block(self._headers))
        )

    def send(self, message: bytes) -> None:
        whole = _PREFIX.pack(0, len(message)) + message
        self._unsent += [whole[at : at + _FRAME_BYTES] for at in range(0, len(whole), _FRAME_BYTES)]
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._received += data
        at, buffer = 0, self._received
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            self._frame(buffer[at + 3], buffer[at + 4], bytes(buffer[at + 9 : at + 9 + size]), buffer[at + 8])
            at += 9 + size
        del buffer[:at]

    def _frame(self, kind: int, flags: int, payload: bytes, stream: int) -> None:
        if kind == _DATA:
            self._message += payload
            self._messages()
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._stream_room += more
            else:
                self._room += more
            self._flush()
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            for place in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, place)
                if name == _INITIAL_WINDOW:
                    self._stream_room += value - self._initial
                    self._initial = value
            self._write(frame(_SETTINGS, _ACK, 0, b""))
            self._flush()
        elif self._closing:
            return
        elif kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            self._on_failure(f"the server ended a stream: frame {kind}, {payload[:200]!r}")

    def _messages(self) -> None:
        message = self._message
        while len(message) >= _PREFIX.size:
            _, size = _PREFIX.unpack_from(message)
            if len(message) < _PREFIX.size + size:
                return
            found = bytes(message[_PREFIX.size : _PREFIX.size + size])
            del message[: _PREFIX.size + size]
            self.on_answer(found)

    def _flush(self) -> None:
        while self._unsent and len(self._unsent[0]) <= min(self._room, self._stream_room):
            part = self._unsent.pop(0)
            self._room -= len(part)
            self._stream_room -= len(part)
            self._write(frame(_DATA, 0, 1, part))


def http_request(path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return a whole request. ``headers``: beside the length."""
    named = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\n{named}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
