"""Requests that the OpenAI face refuses: bad JSON, large or slow bodies, giant heads, broken HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import HttpLimits, inflated
from tests.integration.openai.face import CHAT, KEY, MAX_BODY, Face, read_answer, serving


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"m","messages":' + b"[" * 19_000,
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"\xff","messages":[]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1' + b"0" * 5000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"unheard_of":1}',
    ],
)
async def test_a_bad_body_is_a_400(face: Face, body: bytes) -> None:
    answer = await face.chat(body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert face.service.calls == []


async def test_a_large_body_is_refused_by_its_length(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + KEY.encode()
        + b"\r\ncontent-length: 99999999999\r\n\r\n"
    )
    answer = await asyncio.wait_for(read_answer(reader), 30)  # without a byte of it sent; the connection ends
    assert answer.status == 413
    assert answer.headers["connection"] == "close"
    writer.close()


async def test_a_large_chunked_body_is_refused_on_the_way(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + KEY.encode()
        + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    sent = 0
    answer = asyncio.ensure_future(read_answer(reader))
    while not answer.done() and sent < 50 * MAX_BODY:
        writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        sent += 0x1000
        await asyncio.sleep(0.005)
    assert (await asyncio.wait_for(answer, 30)).status == 413
    assert sent < 10 * MAX_BODY
    writer.close()


async def test_a_slow_body_is_not_waited_for() -> None:
    async with serving(HttpLimits(MAX_BODY, body_timeout_s=0.2)) as face:
        reader, writer = await face.connect()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            "content-length: 50\r\n\r\n{".encode()
        )
        answer = await asyncio.wait_for(read_answer(reader), 15)
        assert answer.status == 408
        writer.close()


GZIP = (("content-encoding", "gzip"),)


async def test_a_body_in_gzip_is_read(face: Face) -> None:
    assert (await face.chat(gzip.compress(json.dumps(CHAT).encode()), headers=GZIP)).status == 200
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * (MAX_BODY - 200)}]}
    assert (await face.chat(gzip.compress(json.dumps(long).encode()), headers=GZIP)).status == 200
    assert len(face.service.calls[1].generation.chat.messages[0].content) == MAX_BODY - 200


async def test_a_body_that_inflates_beyond_the_bound_is_refused(face: Face) -> None:
    bomb = gzip.compress(b" " * 50 * MAX_BODY)
    assert len(bomb) < MAX_BODY / 5
    answer = await face.chat(bomb, headers=GZIP)
    assert (answer.status, face.service.calls) == (413, [])


async def test_inflating_stops_at_the_bound_and_is_accounted_for() -> None:
    most = 4 * 2**20
    whole = b'"' + b"x" * (most - 2) + b'"'
    sizes: list[int] = []
    assert await inflated(gzip.compress(whole), most, sizes.append) == whole
    assert sizes == sorted(sizes)
    assert max(sizes) == most + len(gzip.compress(whole))
    assert len(sizes) >= 4

    def hold(size: int) -> None:
        sizes.append(size)
        if size > 2**20:
            raise HttpProblem(429, "no room")

    sizes.clear()
    with pytest.raises(HttpProblem, match="no room"):
        await inflated(gzip.compress(b" " * 2 * most), most, hold)
    assert max(sizes) < 3 * 2**20
    with pytest.raises(HttpProblem, match="larger than"):
        await inflated(gzip.compress(b" " * 2 * most), most, lambda _: None)


WHOLE = gzip.compress(json.dumps(CHAT).encode(), mtime=0)  # in names of tests


@pytest.mark.parametrize(
    "body", [b"", WHOLE[:-1], WHOLE[:20], WHOLE + b"x", WHOLE * 2, b"{}", WHOLE[:-5] + b"12345", b"\x1f\x8b"]
)
async def test_what_is_no_gzip_member_is_refused(face: Face, body: bytes) -> None:
    answer = await face.chat(body, headers=GZIP)
    assert (answer.status, face.service.calls) == (400, [])
    assert (await face.chat(CHAT)).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((("content-type", "text/plain"),), 415),
        ((("content-type", "application/x-www-form-urlencoded"),), 415),
        ((("content-encoding", "br"),), 415),
        ((("content-encoding", "gzip"),), 400),
        ((("content-type", "application/json; charset=utf-8"),), 200),
        ((("content-type", "APPLICATION/JSON"),), 200),
        ((("content-type", "application/json; charset=latin-1"),), 415),
    ],
)
async def test_content_types(face: Face, headers: tuple[tuple[str, str], ...], status: int) -> None:
    assert (await face.chat(CHAT, headers=headers)).status == status


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 400_000,
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz?" + b"a" * 400_000,
    ],
)
async def test_a_giant_head_is_refused(face: Face, head: bytes) -> None:
    reader, writer = await face.connect()
    writer.write(head)
    try:
        answer = await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:  # what was not read is answered by a reset
        answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert b" 200 " not in answer
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"GET /healthz\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_broken_http_harms_nobody(face: Face, data: bytes) -> None:
    reader, writer = await face.connect()
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 30)
    assert b" 200 " not in answer
    assert b" 500 " not in answer
    writer.close()
    assert (await face.ask("GET", "/healthz")).status == 200
