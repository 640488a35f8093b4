"""HTTP as bytes: what a library would not send, and an event stream without one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

_MAX_LINE_BYTES: Final = 1 << 20


def head(
    path: str, key: str = "", *lines: str, method: str = "POST", host: str = "127.0.0.1", version: str = "1.1"
) -> bytes:
    """Return a request's head with ``lines`` as further header lines, taken as they are."""
    authorization = [f"authorization: Bearer {key}"] if key else []
    kind = ["content-type: application/json"] if method == "POST" else []
    text = [f"{method} {path} HTTP/{version}", f"host: {host}", *kind, *authorization, *lines, "", ""]
    return "\r\n".join(text).encode("latin-1")


def post(path: str, body: bytes, key: str = "") -> bytes:
    """Return a whole request, the last one of its connection."""
    return head(path, key, f"content-length: {len(body)}", "connection: close") + body


@contextlib.asynccontextmanager
async def connected(
    address: str, source: str = "", *, receive_bytes: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to host:port, from a loopback address of one's choice.

    ``receive_bytes``: what the client's kernel takes of an answer before anything reads it. 0: as it likes.
    """
    host, _, port = address.rpartition(":")
    opened = socket.socket()
    try:
        opened.setblocking(False)
        if receive_bytes:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if source:
            opened.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(opened, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=opened, limit=_MAX_LINE_BYTES)
    except BaseException:
        opened.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def status_of(
    address: str, request: bytes, *, source: str = "", timeout_s: float = 20.0, answer_bytes: int = 4096
) -> tuple[int, bytes]:
    """Send bytes; return the status of the first answer and the answer's beginning. 0: closed without one."""
    received = b""
    try:
        async with asyncio.timeout(timeout_s), connected(address, source) as (reader, writer):
            with contextlib.suppress(OSError):
                writer.write(request)
                await writer.drain()
            while len(received) < answer_bytes and (piece := await reader.read(4096)):
                received += piece
                if b"\r\n\r\n" in received and received.startswith(b"HTTP/1.1 4"):
                    break
    except (OSError, TimeoutError):
        pass
    first = received.split(b"\r\n", 1)[0].split()
    return (int(first[1]) if len(first) > 1 and first[1].isdigit() else 0), received


async def server_events(address: str, request: bytes) -> AsyncGenerator[str, None]:
    """Yield the data of each Server-Sent Event. Raises OSError for any status but 200, EOFError."""
    async with connected(address) as (reader, writer):
        writer.write(request)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.split(b" ", 2)[1] != b"200":
            raise OSError(f"{answer.splitlines()[0].decode()} {(await reader.read(200)).decode()}")
        buffer = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            buffer += await reader.readexactly(size)
            await reader.readexactly(2)
            while b"\n\n" in buffer:
                event, _, buffer = buffer.partition(b"\n\n")
                if event.startswith(b"data:"):
                    yield event[5:].strip().decode()
