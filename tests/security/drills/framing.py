"""Attacks on the HTTP face by its framing: most of them without a key."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from tests.security.drills.http import connected, head, post, status_of
from tests.security.drills.judge import Found
from tests.security.drills.strangers import together
from tests.security.drills.target import SOURCES, Attack, Target

PATH: Final = "/v1/completions"
_CHUNKED: Final = "transfer-encoding: chunked"
_MIB: Final = 1024**2


async def _pour(address: str, begin: bytes, piece: bytes, size_bytes: int, source: str) -> str:
    """Send ``piece`` over and over until the server closes or all is sent."""
    sent = 0
    try:
        async with asyncio.timeout(25), connected(address, source) as (_, writer):
            writer.write(begin)
            while sent < size_bytes and not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
            await asyncio.sleep(3.0)
    except (OSError, TimeoutError):
        pass
    return f"{sent / 1e6:.0f} MB sent"


async def trailers(target: Target) -> Found:
    begin, piece = head(PATH, "", _CHUNKED) + b"0\r\n", b"x: y\r\n" * (_MIB // 6)
    return await together(
        _pour(gateway.http, begin, piece, size, SOURCES[number])
        for gateway in target.gateways
        for number, size in enumerate((60 * 10**6, 100 * 10**6))
    )


async def trailer_line(target: Target) -> Found:
    """One trailer line that never ends, after a body that was accepted."""
    begin = (
        head(PATH, target.keys["drills"], _CHUNKED, "content-type: application/json") + b"2\r\n{}\r\n0\r\nx: "
    )
    return await together(
        _pour(gateway.http, begin, b"a" * 65536, 60 * 10**6, SOURCES[2]) for gateway in target.gateways
    )


def _completion(target: Target, **more: object) -> bytes:
    body = {"model": target.model, "prompt": "def f", "max_tokens": 4, "temperature": 0, **more}
    return json.dumps(body).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def trailer_key(target: Target) -> Found:
    found = Found()
    secret = target.keys["drills"].encode()
    for gateway in target.gateways:
        request = head(PATH, "", _CHUNKED, "connection: close", "trailer: authorization")
        request += _chunk(_completion(target)) + b"0\r\nauthorization: Bearer " + secret + b"\r\n\r\n"
        status, _ = await status_of(gateway.http, request)
        found.did.append(f"answered {status}")
        if status == 200:
            found.wrong.append("a key in a trailer was accepted")
    return found


async def chunk_extensions(target: Target) -> Found:
    """Many of 1 MB, and one that never ends."""
    heads = (head(PATH, "", _CHUNKED), head(PATH, target.keys["drills"], _CHUNKED))
    piece = b"1;" + b"e" * _MIB + b"\r\n{\r\n"
    many = [
        _pour(gateway.http, begin, piece, 40 * 10**6, SOURCES[3])
        for gateway in target.gateways
        for begin in heads
    ]
    one = [
        _pour(target.gateways[0].http, begin + b"1;", b"e" * 65536, 60 * 10**6, SOURCES[4]) for begin in heads
    ]
    return await together([*many, *one])


async def ambiguous(target: Target) -> Found:
    """Requests whose framing two servers could read in two ways are refused by status or by closing."""
    key, body = target.keys["drills"], _completion(target)
    size, close = f"content-length: {len(body)}", "connection: close"
    chunked = _chunk(body) + b"0\r\n\r\n"
    framings: dict[str, tuple[tuple[str, ...], bytes]] = {
        "TE: gzip, chunked": (("transfer-encoding: gzip, chunked",), chunked),
        "TE: chunked, gzip": (("transfer-encoding: chunked, gzip",), chunked),
        "TE: chunked twice": ((_CHUNKED, _CHUNKED), chunked),
        "TE: xchunked": (("transfer-encoding: xchunked",), chunked),
        "CL with TE": ((size, _CHUNKED), chunked),
        "two CL": ((size, "content-length: 5"), body),
        "negative CL": (("content-length: -1",), body),
        "obs-fold": (("x-a: 1", " folded", size), body),
        "NUL": (("x-a: a\0b", size), body),
        "bare CR": (("x-a: a\rb", size), body),
        "space before colon": (("x-a : b", size), body),
        "bare LF in a chunk": ((_CHUNKED,), b"%x\n%s\r\n0\r\n\r\n" % (len(body), body)),
    }
    requests = {name: head(PATH, key, close, *lines) + sent for name, (lines, sent) in framings.items()}
    plain = head(PATH, key, close, size)
    requests |= {
        "no Host": plain.replace(b"host: 127.0.0.1\r\n", b"") + body,
        "two Hosts": plain.replace(b"\r\nhost: ", b"\r\nHost: b\r\nhost: ") + body,
        **{
            f"HTTP/{label}": head(PATH, key, close, size, version=label) + body
            for label in ("1.2", "2.0", "9.9")
        },
        "an encoded slash": head(PATH.replace("/", "%2F"), key, close, size) + body,
    }
    found = Found()
    for name, request in requests.items():
        status, answer = await status_of(target.gateways[0].http, request, timeout_s=8)
        if status == 200:
            found.wrong.append(f"{name} was accepted")
        elif status >= 500 and status != 501:
            found.wrong.append(f"{name} was answered {status}: {answer[:80]!r}")
    streaming = _completion(target, stream=True)
    old = head(PATH, key, f"content-length: {len(streaming)}", version="1.0") + streaming
    status, answer = await status_of(target.gateways[0].http, old)
    if status != 200 or _CHUNKED.encode() in answer.lower():
        found.wrong.append(f"a stream of HTTP/1.0 was answered {status}, or with chunks")
    for plain in (post(PATH, body, key), head(PATH, key, close, _CHUNKED) + chunked):
        control, answer = await status_of(target.gateways[0].http, plain)
        if control != 200:
            found.wrong.append(
                f"the same request with plain framing was answered {control}: {answer[:200]!r}"
            )
    found.did.append(f"{len(requests)} kinds of framing, HTTP/1.0 answered {status}")
    return found


async def _slow(address: str, begin: bytes, count: int, hold_s: float) -> str:
    """Hold connections, each of which sends a byte a second."""
    closed = 0

    async def one(source: str) -> None:
        nonlocal closed
        try:
            async with asyncio.timeout(hold_s + 10), connected(address, source) as (_, writer):
                writer.write(begin)
                for _ in range(int(hold_s)):
                    await asyncio.sleep(1.0)
                    writer.write(b"a")
                    await writer.drain()
                    if writer.is_closing():
                        break
                else:
                    return
        except (OSError, TimeoutError):
            pass
        closed += 1

    await asyncio.gather(*(one(SOURCES[number % len(SOURCES)]) for number in range(count)))
    return f"{count} slow connections, {closed} closed by the server"


async def slow_heads(target: Target) -> Found:
    begin = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nx: ".encode()
    return await together(_slow(gateway.http, begin, 2_000, 15.0) for gateway in target.gateways)


async def slow_bodies(target: Target) -> Found:
    begins = (
        head(PATH, "", "content-length: 1000000"),
        head(PATH, target.keys["drills"], "content-length: 1000000"),
        head(PATH, target.keys["drills"], _CHUNKED) + b"fffff\r\n",
    )
    return await together(
        _slow(gateway.http, begin, 700, 15.0) for gateway in target.gateways for begin in begins
    )


async def slow_trailers(target: Target) -> Found:
    keyed = head(PATH, target.keys["drills"], _CHUNKED) + b"2\r\n{}\r\n0\r\nx: "
    begins = (head(PATH, "", _CHUNKED) + b"0\r\nx: ", keyed)
    return await together(_slow(target.gateways[0].http, begin, 2_100, 15.0) for begin in begins)


FRAMING: Final = (
    Attack("http-trailers", "trailers of 60 and 100 MB to each gateway", "cut off, none kept", trailers),
    Attack("http-trailer-line", "one trailer of 60 MB, with a key", "cut off, nothing kept", trailer_line),
    Attack("http-trailer-key", "`authorization` as a trailer", "not accepted", trailer_key),
    Attack("http-slow-trailers", "4,200 trailers that never end", "new users are served", slow_trailers),
    Attack(
        "http-chunk-extensions", "chunk extensions of 1 MB, one of 60", "cut off, none kept", chunk_extensions
    ),
    Attack("http-ambiguous", "CL with TE, codings, obs-fold, NUL, bare CR", "refused", ambiguous, 150),
    Attack("http-slow-heads", "2,000 at a byte a second to each gateway", "new users are served", slow_heads),
    Attack(
        "http-slow-bodies", "2,100 at a byte a second to each gateway", "new users are served", slow_bodies
    ),
)
