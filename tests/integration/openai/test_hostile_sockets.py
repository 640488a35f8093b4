"""WebSockets of clients that send what they must not: each ends with its own code, and no neighbour waits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import struct
import time
import weakref
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.gateway.faces.openai import server
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.sockets import protocol
from services.gateway.faces.sockets.face import SocketExchange
from services.runtime.identity import KeyDirectory
from tests.integration.openai.face import CHAT, KEY, MAX_BODY, STREAM, Face, begun, serving, silent
from tests.support.socket_client import closed, opened, received, request, until_over
from tests.support.waiting import until

TEXT, BINARY, CLOSE, PING, CONTINUED = 0x1, 0x2, 0x8, 0x9, 0x0


def url(face: Face) -> str:
    return f"http://127.0.0.1:{face.server.port}"


def frame(opcode: int, data: bytes = b"", *, last: bool = True, masked: bool = True) -> bytes:
    """Return a frame of a client, masked by zeros."""
    size = len(data)
    mask = 0x80 if masked else 0
    head = bytes([(0x80 if last else 0) | opcode])
    if size < 126:
        head += bytes([mask | size])
    elif size < 65_536:
        head += bytes([mask | 126]) + struct.pack("!H", size)
    else:
        head += bytes([mask | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + data


def handshake(*lines: str, method: str = "GET", version: str = "1.1") -> bytes:
    head = [f"{method} /v1/stream HTTP/{version}", "host: x", "connection: Upgrade", "upgrade: websocket"]
    head += ["sec-websocket-version: 13", f"sec-websocket-key: {base64.b64encode(os.urandom(16)).decode()}"]
    return "\r\n".join([*head, f"authorization: Bearer {KEY}", *lines, "", ""]).encode()


async def raw(face: Face) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a socket after its handshake, to send any bytes."""
    reader, writer = await face.connect()
    writer.write(handshake())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def code_of(reader: asyncio.StreamReader) -> int:
    """Return the code of the server's close frame; other frames before it are skipped."""
    async with asyncio.timeout(15):
        while True:
            first, size = await reader.readexactly(2)
            if size == 126:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
            data = await reader.readexactly(size)
            if first & 0xF == 0x8:
                return int(struct.unpack("!H", data[:2])[0])


def in_parts(count: int) -> bytes:
    return frame(TEXT, b"{", last=False) + frame(CONTINUED, last=False) * count


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(BINARY, b"{}"), 1003),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b""), 1007),
        (frame(TEXT, b"{"), 1007),
        (frame(TEXT, b"[]"), 1007),
        (frame(TEXT, b'{"type":"other","id":"a"}'), 1007),
        (frame(TEXT, b'{"type":"cancel","id":""}'), 1007),
        (frame(TEXT, b'{"type":"cancel","id":"' + b"x" * 65 + b'"}'), 1007),
        (frame(TEXT, b'{"type":"cancel","id":"a b"}'), 1007),
        (frame(TEXT, b'{"type":"cancel","id":"a","more":1}'), 1007),
        (frame(TEXT, b'{"type":"request","id":"a","path":"/v1/completions"}'), 1007),
        (frame(TEXT, b'{"type":"request","id":"a","path":"/v1/completions","body":' + b"[" * 19_000), 1007),
        (frame(TEXT, b" " * (MAX_BODY + 1)), 1009),
        (frame(TEXT, b"x" * MAX_BODY, last=False) + frame(CONTINUED, b"x"), 1009),
        (frame(TEXT, b"{}", masked=False), 1002),
        (frame(0x3, b""), 1002),
        (frame(CONTINUED, b""), 1002),
        (frame(PING, b"x" * 126), 1002),
        (in_parts(protocol.MAX_FRAMES + 1), 1008),
        (in_parts(50_000), 1008),
        (frame(PING) * (protocol.MAX_FRAMES + 1), 1008),
    ],
    ids=range(21),
)
async def test_what_no_client_may_send_ends_its_socket(sent: bytes, code: int) -> None:
    async with serving(max_body_bytes=MAX_BODY) as face:
        reader, writer = await raw(face)
        writer.write(sent)
        assert await code_of(reader) == code
        writer.close()
        await until(lambda: not face.server.connections)
        face.server.table.check_integrity()
        assert face.service.calls == []


async def test_a_fault_behind_which_the_client_closes_stops_no_other_socket(face: Face) -> None:
    """The server cannot send the reason of the fault any more, which raises within the turn of the socket."""
    neighbour, writing = await raw(face)
    _, writer = await raw(face)
    writer.write(frame(TEXT, b"\xff\xfe") + frame(CLOSE, struct.pack("!H", 1000)))
    await asyncio.sleep(0.1)
    writing.write(frame(TEXT, b"[]"))
    assert await code_of(neighbour) == 1007


async def test_a_length_is_refused_before_its_bytes_arrive(face: Face) -> None:
    reader, writer = await raw(face)
    writer.write(bytes([0x81, 0x80 | 127]) + struct.pack("!Q", 2**62) + bytes(4))
    assert await code_of(reader) == 1009


async def test_frames_within_the_bounds_are_served(face: Face) -> None:
    reader, writer = await raw(face)
    text = request("a", STREAM).encode()
    writer.write(frame(PING, b"p") * 500 + frame(TEXT, text[:9], last=False) + frame(PING, b"p"))
    writer.write(frame(CONTINUED, text[9:20], last=False) + frame(CONTINUED, text[20:]))
    found = b""
    async with asyncio.timeout(30):
        while b'"type":"end"' not in found:
            found += await reader.read(65_536)
    assert found.count(b"\x8a\x01p") == 501


@pytest.mark.parametrize(
    "sent",
    [
        handshake("content-length: 2") + b"{}",
        handshake("transfer-encoding: chunked") + b"0\r\n\r\n",
        handshake(method="POST"),
        handshake(version="1.0"),
        handshake("x: " + "y" * 9000),
        handshake(*[f"x{number}: y" for number in range(200)]),
        handshake().replace(b"sec-websocket-key", b"x"),
        handshake().replace(b"sec-websocket-version: 13", b"sec-websocket-version: 8"),
    ],
    ids=range(8),
)
async def test_a_handshake_that_is_none_is_refused(face: Face, sent: bytes) -> None:
    reader, writer = await face.connect()
    writer.write(sent)
    async with asyncio.timeout(30):
        answer = await reader.read(65_536)
        assert answer.split()[1] in (b"400", b"401", b"414", b"426", b"431")
        writer.close()
        while face.server.connections:
            await asyncio.sleep(0.01)
    assert face.service.calls == []


async def test_a_handshake_behind_a_running_answer_is_refused(face: Face) -> None:
    face.service.script = begun
    _, writer = await face.send("/v1/chat/completions", STREAM)
    await face.service.until_running(1)
    writer.write(handshake())
    await until(lambda: not face.server.connections)
    face.server.table.check_integrity()


async def test_frames_before_the_answer_to_a_handshake_end_the_connection(face: Face) -> None:
    face.server._paced.turns._begun = server.BEGUN_PER_TURN  # so that no request starts
    reader, writer = await face.connect()
    writer.write(handshake())
    await until(lambda: face.server.connections == 1)
    await asyncio.sleep(0.1)
    writer.write(frame(TEXT, request("a", STREAM).encode()))
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        while face.server.connections:
            await asyncio.sleep(0.01)


async def test_a_client_that_reads_no_errors_is_cut() -> None:
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=0.3)) as face:
        _, writer = await raw(face)
        unknown = frame(TEXT, request("a", {}, path="/none").encode())
        async with asyncio.timeout(90):
            with contextlib.suppress(OSError):
                while face.server.connections:
                    writer.write(unknown * 100)
                    await writer.drain()
            while face.server.connections:
                await asyncio.sleep(0.01)


async def test_an_id_that_is_in_use_and_headers_that_are_not_offered(face: Face) -> None:
    face.service.script = silent
    async with opened(url(face), KEY) as socket:
        for headers, param in (
            ({"authorization": "Bearer x"}, "headers"),
            ({"host": "x"}, "headers"),
            ({"content-encoding": "gzip"}, "headers"),
            ({"idempotency-key": "a\r\nb"}, "headers.idempotency-key"),
            ({"idempotency-key": "\u00fc"}, "headers.idempotency-key"),
            ({"idempotency-key": "a b"}, "idempotency-key"),
            ({"last-event-id": "x" * 40_000}, "headers"),
        ):
            await socket.send(request("a", STREAM, **headers))
            (answer,) = await until_over(socket, "a")
            assert (answer["status"], answer["data"]["error"]["param"]) == (400, param)
    async with opened(url(face), KEY) as socket:
        await socket.send(request("a", {}, path="/v1/files"))
        (answer,) = await until_over(socket, "a")
        assert answer["status"] == 404
        assert "/v1/chat/completions" in answer["data"]["error"]["message"]
        await socket.send(request("a", STREAM))
        await face.service.until_running(1)
        await socket.send(request("a", STREAM))
        (answer,) = await until_over(socket, "a")
        assert answer["status"] == 409
        assert face.service.running == 1
    async with asyncio.timeout(30):
        await face.service.closed.wait()


async def test_an_id_is_free_with_the_last_message_of_its_request(face: Face) -> None:
    """The next request of the same id arrives before the task of the one before it has ended."""
    async with opened(url(face), KEY) as socket:
        for body in (STREAM, CHAT) * 20:
            await socket.send(request("a", body))
            last = (await until_over(socket, "a"))[-1]
            assert last["type"] == "end" or last["status"] == 200, last


async def test_a_close_behind_a_cancel_leaves_the_request_withdrawn() -> None:
    async def put(message: bytes) -> None:
        pass

    exchange = SocketExchange("a", b"{}", put, over=lambda: None, cut=lambda: None, accepted=lambda: 0)
    exchange.leave(withdraw=True)
    exchange.leave(withdraw=False)
    withdrawn = []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        withdrawn.append(scope["extensions"]["fairway.connection"]["withdrawn"]())

    await exchange.run(route, {}, "/", [])
    assert withdrawn == [True]


async def test_what_a_client_sends_after_a_close_is_not_accounted() -> None:
    size = 2**20
    async with serving(HttpLimits(size), max_body_bytes=size) as face:
        for _ in range(8):
            _, writer = await raw(face)
            writer.write(frame(BINARY, b"x"))  # which ends the socket
            await asyncio.sleep(0.1)
            writer.write(frame(TEXT, b" " * (size - 100))[:-1])
            await asyncio.sleep(0.3)
            writer.close()
        await until(lambda: not face.server.connections)
        answer = await face.ask("POST", "/v1/chat/completions", {**CHAT, "user": "x" * (size // 2)})
        assert answer.status != 429, answer.body


async def test_a_message_has_a_time_and_pings_are_no_part_of_it(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MESSAGE_S", 1.0)
    reader, writer = await raw(face)
    for _ in range(15):
        writer.write(frame(PING, b"x"))
        await asyncio.sleep(0.1)
    writer.write(frame(TEXT, b'{"type":"cancel","id":"a"}'))
    await asyncio.sleep(1.2)
    assert face.server.connections == 1
    writer.write(frame(TEXT, b" " * 1000)[:-1])
    assert await code_of(reader) == 1008


async def test_a_key_that_is_revoked_ends_its_sockets_at_the_next_message(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url(face), KEY) as socket:
        await socket.send(request("a", CHAT))
        assert (await until_over(socket, "a"))[-1]["status"] == 200

        def revoked(directory: KeyDirectory, credentials: str | None) -> Principal:
            raise Unauthenticated("the key was revoked")

        monkeypatch.setattr(KeyDirectory, "authenticate", revoked)
        await socket.send(json.dumps({"type": "cancel", "id": "none"}))
        assert (await closed(socket))[0] == 1008


async def test_large_messages_of_a_tenant_are_bounded_together() -> None:
    """They count with the bodies of HTTP before they are complete."""
    size = 2**20
    async with serving(HttpLimits(size), max_body_bytes=size) as face:
        reading = [await raw(face) for _ in range(6)]
        for _, writer in reading:
            writer.write(frame(TEXT, b" " * (size - 100))[:-1])
            await asyncio.sleep(0.3)
        codes = [asyncio.ensure_future(code_of(reader)) for reader, _ in reading]
        await until(lambda: sum(each.done() for each in codes) == 2)
        done, waiting = await asyncio.wait(codes, timeout=0.5)
        assert sorted(each.result() for each in done) == [1013, 1013]
        assert len(waiting) == 4
        for each in waiting:
            each.cancel()
        for _, writer in reading:
            writer.transport.abort()
        await until(lambda: not face.server.connections)
        async with opened(url(face), KEY) as socket:
            large = {**STREAM, "messages": [{"role": "user", "content": "x" * (size - 1000)}]}
            for number in range(6):  # each is released
                await socket.send(request(str(number), large))
                assert (await until_over(socket, str(number)))[-1]["complete"]


async def test_a_flood_of_small_frames_stalls_nobody(face: Face) -> None:
    """A read of the event loop holds tens of thousands of them."""
    unknown = frame(TEXT, b'{"type":"cancel","id":"a"}')
    floods = [await raw(face) for _ in range(3)]
    connections: Any = face.server._server.server_state.connections
    worst, last, most = 0.0, time.thread_time(), 0  # of the loop's thread: others may take the core

    async def send(writer: asyncio.StreamWriter) -> None:
        for _ in range(10):
            writer.write(unknown * 5_000)
            await writer.drain()

    sending = [asyncio.ensure_future(send(writer)) for _, writer in floods]
    ends_s = last + 1.0
    while last < ends_s or not all(each.done() for each in sending):
        await asyncio.sleep(0)
        now = time.thread_time()
        worst, last = max(worst, now - last), now
        most = max([most, *(each.queue.qsize() for each in connections)])
    assert worst < 0.5
    assert most < 400  # what a slice holds; a read holds thousands
    assert all(each.exception() is None for each in sending)


async def test_a_client_that_answers_no_ping_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as face:
        face.server._server.config.ws_ping_interval = face.server._server.config.ws_ping_timeout = 0.2
        face.service.script = begun
        reader, writer = await raw(face)
        writer.write(frame(TEXT, request("a", STREAM).encode()))
        assert await code_of(reader) == 1011
        async with asyncio.timeout(30):
            await face.service.closed.wait()
        async with opened(url(face), KEY) as socket:  # this one answers
            await asyncio.sleep(0.8)
            await socket.send(request("a", STREAM))
            assert (await received(socket))["type"] == "started"


async def test_a_client_that_does_not_close_is_cut(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CLOSE_S", 0.2)
    reader, writer = await raw(face)
    writer.write(frame(TEXT, b"{"))
    assert await code_of(reader) == 1007
    await until(lambda: not face.server.connections, timeout_s=9)  # CLOSE_S is 10 s where nothing sets it


async def test_a_closed_socket_is_gone_without_the_cycle_collector(face: Face) -> None:
    gc.disable()
    try:
        sockets: list[Any] = []
        for number in range(4):
            _, writer = await raw(face)
            if number % 2:
                writer.write(frame(TEXT, json.dumps({"type": "cancel", "id": "a"}).encode()))
        await asyncio.sleep(0.05)
        sockets = [weakref.ref(each) for each in face.server._server.server_state.connections]
        assert len(sockets) == 4
        await face.hang_up()
        await until(lambda: not face.server.connections)
        await asyncio.sleep(0.1)
        assert [each() for each in sockets] == [None] * 4
    finally:
        gc.enable()


async def test_the_times_of_http_do_not_end_a_socket(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("head_timeout_s", "body_timeout_s", "keep_alive_s"):
        monkeypatch.setattr(server._Protocol, name, 0.2)
    async with opened(url(face), KEY) as socket:
        await asyncio.sleep(0.5)
        await socket.send(request("a", STREAM))
        assert (await until_over(socket, "a"))[-1]["complete"]


async def test_an_idle_socket_makes_room_and_a_busy_one_does_not() -> None:
    async with serving(max_connections=4) as face:  # of which one source has two
        face.service.script = silent
        async with opened(url(face), KEY) as busy, opened(url(face), KEY) as idle:
            await busy.send(request("a", STREAM))
            await face.service.until_running(1)
            assert (await face.ask("GET", "/healthz")).status == 200
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(idle.recv(), 30)
            assert busy.close_code is None
            assert face.service.running == 1


async def test_no_other_path_is_a_socket(face: Face) -> None:
    for path in ("/v1/chat/completions", "/healthz", "/v1/stream/x", "/"):
        with pytest.raises(Exception, match="403"):
            async with connect(
                f"ws://127.0.0.1:{face.server.port}{path}",
                additional_headers={"authorization": f"Bearer {KEY}"},
                proxy=None,
            ):
                pass
