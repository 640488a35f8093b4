"""Clients of the OpenAI face that leave or lag."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from services.gateway.faces.openai.exchange import HttpLimits
from tests.integration.openai.face import CHAT, MAX_BODY, STREAM, Face, begun, endless, serving, silent
from tests.support.waiting import until


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request_at_once(face: Face, streamed: bool) -> None:
    face.service.script = begun if streamed else silent
    reader, writer = await face.send("/v1/chat/completions", {**CHAT, "stream": streamed})
    if streamed:
        await asyncio.wait_for(reader.readuntil(b"assistant"), 30)
    await face.service.until_running(1)
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 10)  # The script writes nothing that would find it.


async def test_a_client_that_resets_ends_its_request(face: Face) -> None:
    face.service.script = silent
    _, writer = await face.send("/v1/chat/completions", STREAM)
    await face.service.until_running(1)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
    await asyncio.wait_for(face.service.closed.wait(), 30)


async def test_leaving_ends_every_prompt_of_a_batch(face: Face) -> None:
    face.service.script = silent
    _, writer = await face.send("/v1/completions", {"model": "m", "prompt": ["a", "b", "c"], "stream": True})
    await face.service.until_running(3)
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 30)
    assert face.service.running == 0


def pause(writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]


async def test_a_slow_reader_holds_the_service_back(face: Face) -> None:
    face.service.script = endless
    _, writer = await face.send("/v1/chat/completions", STREAM)
    pause(writer)
    await face.service.until_running(1)
    await until(lambda: face.service.made > 10)
    made = -1
    while made != face.service.made:
        made = face.service.made
        await asyncio.sleep(0.3)
    # What the kernel and the server buffer, not more.
    assert 10 < made < 12_000
    assert face.service.running == 1
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 30)


async def test_a_reader_that_stays_away_is_cut_off() -> None:
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=0.3)) as face:
        face.service.script = endless
        reader, writer = await face.send("/v1/chat/completions", STREAM)
        pause(writer)
        await asyncio.wait_for(face.service.closed.wait(), 10)
        await asyncio.sleep(0.05)
        assert not face.server.connections  # although what it was sent is still unread
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(reader.read(1 << 20), 30):
                received = received[-10:] + data
        # Cut, not ended: a client must not take it for a whole answer.
        assert not received.endswith(b"0\r\n\r\n")
