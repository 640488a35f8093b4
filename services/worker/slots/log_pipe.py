"""The standard error of an engine process, as lines of the agent's log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Iterator
from typing import Final

import structlog

log = structlog.get_logger()

MAX_LOG_LINE_BYTES: Final = 65536


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
