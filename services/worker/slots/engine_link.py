"""The agent's ends of its connections to an engine: the message socket and the pipe of log lines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Final, cast

import structlog

from services.worker.engine_protocol import LENGTH_PREFIX, MAX_MESSAGE_BYTES, Event, decode_event

log = structlog.get_logger()

MAX_SEND_BUFFER_BYTES: Final = 2 * MAX_MESSAGE_BYTES
MAX_LOG_LINE_BYTES: Final = 65536


class EngineLink(asyncio.Protocol):
    """The agent's end of the socket: splits the bytes into messages. Any fault ends the connection."""

    def __init__(self, on_event: Callable[[Event], None], on_fault: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_fault = on_fault
        self._buffer = bytearray()
        self._faulty = False
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream server's transport can write; uvloop's does not derive from asyncio.Transport.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=MAX_SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._faulty:
            return
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= LENGTH_PREFIX.size:
                (length,) = LENGTH_PREFIX.unpack_from(buffer, at)
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                end = at + LENGTH_PREFIX.size + length
                if end > len(buffer):
                    break
                with memoryview(buffer) as view:
                    event = decode_event(bytes(view[at + LENGTH_PREFIX.size : end]))
                self._on_event(event)
                at = end
        except Exception as exc:  # a fault in this engine or its handler ends the engine, not the agent
            log.exception("engine.event_refused")
            self._faulty = True
            self._on_fault(f"the engine's message could not be handled: {type(exc).__name__}")
            return
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class Refusal(asyncio.Protocol):
    """Closes every connection after the first: an engine has one connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class LogPipe:
    """The engine's stderr. It is not an asyncio subprocess pipe: with that, the end of a process is reported
    only after its children closed theirs."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport, write_fd: int) -> None:
        self._reader = reader
        self._transport = transport
        self._write_fd = write_fd

    @staticmethod
    async def open() -> LogPipe:
        read_fd, write_fd = os.pipe()
        reader = asyncio.StreamReader(limit=MAX_LOG_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(read_fd)
        )
        return LogPipe(reader, transport, write_fd)

    @contextlib.contextmanager
    def write_end(self) -> Iterator[int]:
        """Yield the write end for the process; the agent's copy is closed on exit."""
        try:
            yield self._write_fd
        finally:
            os.close(self._write_fd)
            self._write_fd = -1

    async def copy(self, pid: int) -> None:
        """Log each line until the last writer has closed the pipe."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:  # a line above the limit; asyncio dropped that many bytes of it
                continue
            if not line:
                return
            # Other output is what a library, the interpreter or a crash wrote.
            is_event = line.startswith(b"{") and b'"event"' in line
            event = "engine.logged" if is_event else "engine.stderr_written"
            log.info(event, pid=pid, line=line.decode("utf-8", "replace").rstrip())

    def close(self) -> None:
        self._transport.close()
        if self._write_fd >= 0:
            os.close(self._write_fd)
