"""Clients that read slowly or not at all: bytes that move keep a connection open, and nothing piles up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from services.gateway.events import Event, Tokens
from services.gateway.faces.openai import server
from services.gateway.faces.openai.exchange import HttpLimits
from tests.integration.openai.face import (
    KEY,
    MAX_BODY,
    STREAM,
    Call,
    Face,
    accepted,
    endless,
    finished,
    serving,
)
from tests.integration.openai.test_hostile_sockets import PING, TEXT, frame, handshake
from tests.support.socket_client import request
from tests.support.waiting import until

KIB = 1024
BUFFER_BYTES = 32 * KIB
READ_BYTES = 16 * KIB
LARGE = 12_000_000  # of one event: far more than the kernel takes at once


class SlowClient:
    """A socket that answers no ping."""

    def __init__(self, of: socket.socket) -> None:
        self._socket = of

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self, size: int) -> bytes:
        """Return at most so many bytes; none once the connection is closed."""
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.get_running_loop().sock_recv(self._socket, size)
        return b""


@asynccontextmanager
async def slow_client(
    face: Face, sent: bytes = b"", *, upgrades: bool = True
) -> AsyncGenerator[SlowClient, None]:
    """Yield a client that has sent these bytes, whose kernel takes little ahead of what it reads."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, (face.server.host, face.server.port))
        client = SlowClient(opened)
        if upgrades:
            await client.send(handshake())
            head = b""
            while b"\r\n\r\n" not in head:
                head += await client.read(1)
            assert head.startswith(b"HTTP/1.1 101 ")
        await client.send(sent)
        yield client


class StalledError(Exception):
    """This machine read nothing for so long that the server had to close."""


async def slowly(client: SlowClient, for_s: float, after_s: float) -> list[float]:
    """Read for a while, and return the times of the reads. Raises StalledError."""
    read, times, ends_s = 0, [time.monotonic()], time.monotonic() + for_s
    while time.monotonic() < ends_s:
        found = await client.read(READ_BYTES)
        looks = [*times, time.monotonic()]
        if not found and max(later - sooner for sooner, later in itertools.pairwise(looks)) >= after_s:
            raise StalledError
        assert found, f"closed after {read} bytes"
        times.append(time.monotonic())
        read += len(found)
        await asyncio.sleep(0.02)
    assert read < LARGE - 100_000, "it read too fast to show anything"
    return times


async def assert_read_and_closed(
    face: Face, connected: Callable[[], AbstractAsyncContextManager[SlowClient]], for_s: float, after_s: float
) -> None:
    for _ in range(5):
        with contextlib.suppress(StalledError):
            async with connected() as client:
                await assert_closes(face, await slowly(client, for_s, after_s), after_s)
            return
        await until(lambda: not face.server.connections)
    pytest.fail("this machine stalled five times")


async def assert_closes(face: Face, reads: list[float], after_s: float) -> None:
    """The server ends the connection, but only after it could send nothing for so long.

    The last ten reads took more than the kernel holds for the client. So the server sent something after the
    first of them, however long this machine stalled between them.
    """
    await until(lambda: not is_open(face))
    closed_s = time.monotonic()
    assert closed_s - reads[-10:][0] > after_s, "it was still read"
    assert closed_s - reads[-1] < 10, "it reads no more"


def connection(face: Face) -> Any:
    (found,) = face.server._server.server_state.connections
    return found


def is_open(face: Face) -> bool:
    return face.server.connections > 0 and not getattr(connection(face), "close_sent", False)


def quickly(face: Face, ping_s: float) -> None:
    face.server._server.config.ws_ping_interval = face.server._server.config.ws_ping_timeout = ping_s


async def large(call: Call) -> AsyncGenerator[Event, None]:
    """One event that is large, and one behind it."""
    yield accepted(call)
    yield Tokens(0, 0, [1], "x" * LARGE)
    yield Tokens(0, 1, [1], "y")
    yield finished(call)


@pytest.mark.parametrize("script", [endless, large], ids=["many events", "one large event"])
async def test_a_client_that_reads_slowly_and_answers_no_ping_stays(script: Any) -> None:
    """The answer to a ping waits behind all that was sent before it."""
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=1.0)) as face:
        quickly(face, 0.5)
        face.service.script = script
        sent = frame(TEXT, request("a", STREAM).encode())
        await assert_read_and_closed(face, lambda: slow_client(face, sent), 2.5, 0.4)


@pytest.mark.parametrize("stream", [True, False], ids=["events", "whole"])
async def test_http_waits_for_a_client_that_reads_slowly_too(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._Protocol, "keep_alive_s", 0.6)
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=0.6)) as face:
        face.service.script = large
        body = json.dumps({**STREAM, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sent = head.encode() + body
        await assert_read_and_closed(face, lambda: slow_client(face, sent, upgrades=False), 2.0, 0.5)


async def test_bytes_from_a_client_keep_its_socket_open_too() -> None:
    async with serving() as face:
        quickly(face, 1.0)
        async with slow_client(face) as client:
            for _ in range(60):
                await client.send(frame(PING, b"x"))
                await asyncio.sleep(0.05)
            assert is_open(face)
            await until(lambda: not is_open(face))


async def test_answers_to_pings_do_not_pile_up_while_a_client_reads_nothing(face: Face) -> None:
    pings = frame(PING, b"p" * 125) * 1000 + frame(TEXT, b'{"type":"cancel","id":"a"}')
    async with slow_client(face) as client:
        most = full = 0
        for _ in range(80):  # 10 MB of answers
            await client.send(pings)
            await asyncio.sleep(0.01)
            most = max(most, connection(face).transport.get_write_buffer_size())
            full += not connection(face).writable.is_set()
        assert full > 5, "the connection took all answers: send more"
        assert most < 128 * KIB
        await client.send(frame(PING, b"last"))
        found, ends_s = b"", time.monotonic() + 20
        while not found.endswith(b"\x8a\x04last"):
            assert time.monotonic() < ends_s, "the newest ping has no answer"
            found += await client.read(1 << 20)
        assert found.count(b"\x8a") > 1000
