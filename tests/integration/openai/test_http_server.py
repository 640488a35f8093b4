"""The HTTP server under the OpenAI face: its connections, its port, and how it stops."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator

import pytest

from services.core import errors
from services.gateway.events import Event, Tokens
from services.gateway.faces.openai.server import HttpServer
from tests.integration.openai.face import (
    CHAT,
    KEY,
    STREAM,
    Call,
    Face,
    accepted,
    begun,
    finished,
    plain,
    serving,
)
from tests.support.waiting import until


async def test_many_streams_at_once(face: Face) -> None:
    answers = await asyncio.gather(*[face.chat({**STREAM, "user": f"u{n}"}) for n in range(64)])
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    assert len({answer.headers["x-request-id"] for answer in answers}) == 64
    assert face.service.running == 0


async def test_one_connection_serves_request_after_request(face: Face) -> None:
    reader, writer = await face.send("/v1/chat/completions", CHAT)
    for _ in range(3):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b" 200 " in head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        data = json.dumps(CHAT).encode()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
    writer.close()


async def test_connections_that_say_nothing_are_closed(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.faces.openai.server._Protocol.head_timeout_s", 0.15)
    mute, _ = await face.connect()
    slow, writer = await face.connect()
    writer.write(b"GET /healthz HTTP/1.1\r\nho")
    for reader in (mute, slow):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 15)


async def test_connections_are_bounded() -> None:
    async with serving(max_connections=4) as face:
        face.service.script = begun
        held = [await face.send("/v1/chat/completions", STREAM) for _ in range(2)]
        for reader, _ in held:
            await asyncio.wait_for(reader.readline(), 30)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # their source has half of all
            await face.ask("GET", "/healthz")
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /heal",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
)
async def test_a_closed_connection_is_gone_without_the_cycle_collector(face: Face, sent: bytes) -> None:
    """It runs rarely: the garbage of thousands of connections would stay."""
    gc.disable()
    try:
        for _ in range(8):
            _, writer = await face.connect()
            writer.write(sent)
        async with asyncio.timeout(30):
            while face.server.connections < 8:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # for the answers
            opened = [weakref.ref(each) for each in face.server._server.server_state.connections]
            assert len(opened) == 8
            await face.hang_up()
            while face.server.connections:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        assert [each() for each in opened] == [None] * 8
    finally:
        gc.enable()


async def test_a_taken_port_is_named() -> None:
    async with serving() as face:
        other = HttpServer(face.app, "127.0.0.1", face.server.port)
        with pytest.raises(errors.FailedPrecondition, match=f"port {face.server.port} on 127.0.0.1 is taken"):
            await other.start()
        await other.stop(0.1)


async def test_an_address_of_another_machine_is_named(face: Face) -> None:
    with pytest.raises(errors.FailedPrecondition, match="no address of this machine"):
        await HttpServer(face.app, "192.0.2.1", 0).start()


async def test_stopping_lets_answers_end_and_cuts_the_rest() -> None:
    async with serving() as face:
        release = asyncio.Event()

        async def script(call: Call) -> AsyncGenerator[Event, None]:
            yield accepted(call)
            await (release.wait() if call.generation.session_key == "short" else asyncio.sleep(60))
            yield finished(call)

        face.service.script = script
        short, _ = await face.send("/v1/chat/completions", {**STREAM, "user": "short"})
        long, _ = await face.send("/v1/chat/completions", {**STREAM, "user": "long"})
        await face.service.until_running(2)
        stopping = asyncio.ensure_future(face.server.stop(4.0))
        await asyncio.sleep(0.05)
        with pytest.raises(OSError):
            await face.connect()
        release.set()
        assert b"[DONE]" in await asyncio.wait_for(short.read(), 30)
        rest = await asyncio.wait_for(long.read(), 30)
        assert not rest.endswith(b"0\r\n\r\n")  # cut, so that no client takes it for complete
        await asyncio.wait_for(stopping, 30)
        assert face.service.running == 0


async def test_a_stopped_port_is_free_again() -> None:
    async with serving() as face:
        port = face.server.port
    again = HttpServer(face.app, "127.0.0.1", port)
    await again.start()
    await again.stop(0.1)


@pytest.mark.parametrize("end", ["refused", "failed in the stream", "left"])
async def test_what_a_request_held_is_freed_at_its_end_without_the_collector(face: Face, end: str) -> None:
    """The collector stops the loop for as long as it takes to look at thousands of requests."""

    async def script(call: Call) -> AsyncGenerator[Event, None]:
        if end == "refused":
            raise errors.Overloaded("the wait is too long", retry_after_s=1.0)
        async for event in begun(call) if end == "left" else plain(call):
            yield event
            if end == "failed in the stream" and isinstance(event, Tokens):
                raise errors.StreamBroken("the worker was lost", retry_after_s=1.0)

    face.service.script = script
    held: list[weakref.ref[Call]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            reader, writer = await face.send("/v1/chat/completions", STREAM)
            await asyncio.wait_for(reader.read(100), 30)
            held += map(weakref.ref, face.service.calls)
            face.service.calls.clear()
            writer.transport.abort()
        await until(lambda: not face.service.running)
        await until(lambda: not any(each() for each in held))
    finally:
        gc.enable()
    assert len(held) == 5
