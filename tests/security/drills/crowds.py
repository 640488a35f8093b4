"""One tenant's many requests at once: sockets full of them, and streams that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any, Final

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from services.runtime.clock import SystemClock
from tests.security.drills.http import connected, post
from tests.security.drills.judge import CROWD_GAP_S, Found
from tests.security.drills.target import Attack, Gateway, Target

SOCKETS: Final = 60
OF_A_SOCKET: Final = 64
UNREAD: Final = 1900
_TENANT: Final = "free"
_FOR_S: Final = 15.0
_ARRIVE_RATIO: Final = 0.9
_PATH: Final = "/v1/completions"
# What a client's kernel takes of an answer that is not read.
_RECEIVE_BYTES: Final = 4096
now_s = SystemClock().monotonic_s


def _body(target: Target, number: int, tokens: int) -> dict[str, Any]:
    body = {"model": target.model, "prompt": f"class Crowd{number}:\n", "max_tokens": tokens}
    return body | {"stream": True, "ignore_eos": True, "temperature": 0}


def _too_few(answered: int, sent: int) -> list[str]:
    """A crowd that does not arrive proves nothing."""
    return [] if answered >= _ARRIVE_RATIO * sent else [f"{answered} of {sent} requests were answered"]


async def sockets(target: Target) -> Found:
    """60 sockets, each with 64 streams at once: one that ends is followed by another."""
    found, ends_s, counts = Found(), now_s() + _FOR_S, {"started": 0, "ended": 0, "refused": 0}

    async def socket(gateway: Gateway, first: int) -> None:
        names = itertools.count(first)
        headers = {"authorization": f"Bearer {target.keys[_TENANT]}"}
        address = f"ws://{gateway.http}/v1/stream"
        async with connect(address, additional_headers=headers, open_timeout=30, proxy=None) as opened:

            async def start() -> None:
                number = next(names)
                message = {"type": "request", "id": f"r{number}", "path": _PATH}
                await opened.send(json.dumps(message | {"body": _body(target, number, 64)}))

            for _ in range(OF_A_SOCKET):
                await start()
            async for text in opened:
                kind = str(text)[:18]
                counts["started"] += kind.startswith('{"type":"started"')
                if kind.startswith(('{"type":"end"', '{"type":"answer"')):
                    counts["ended" if "end" in kind else "refused"] += 1
                    if "end" in kind:
                        await start()
                if now_s() > ends_s:
                    return

    async def until_over(gateway: Gateway, first: int) -> None:
        with contextlib.suppress(OSError, TimeoutError, ConnectionClosed):
            async with asyncio.timeout(_FOR_S + 20.0):
                await socket(gateway, first)

    async with asyncio.TaskGroup() as group:
        for number in range(SOCKETS):
            group.create_task(until_over(target.gateways[number % len(target.gateways)], number * 10_000))
    found.accept(_TENANT, counts["started"])
    found.did.append(f"{SOCKETS * OF_A_SOCKET} at once: {counts}")
    found.wrong += _too_few(counts["started"] + counts["refused"], SOCKETS * OF_A_SOCKET)
    return found


async def unread_streams(target: Target) -> Found:
    """1,900 streams on one gateway whose clients take the status and then nothing."""
    found, over, counts = Found(), asyncio.Event(), {"accepted": 0, "refused": 0, "cut": 0}
    gateway = target.gateways[0]

    async def stream(number: int) -> None:
        body = json.dumps(_body(target, number, 900)).encode()
        async with connected(gateway.http, receive_bytes=_RECEIVE_BYTES) as (reader, writer):
            writer.write(post(_PATH, body, target.keys[_TENANT]))
            status = await reader.read(12)
            if not status:
                raise ConnectionError("closed without an answer")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            counts["accepted" if status.endswith(b"200") else "refused"] += 1
            await over.wait()

    async def until_over(number: int) -> None:
        try:
            async with asyncio.timeout(_FOR_S + 10.0):
                await stream(number)
        except OSError:  # beyond the connections that a gateway takes from one source
            counts["cut"] += not over.is_set()

    async with asyncio.TaskGroup() as group:
        for number in range(UNREAD):
            group.create_task(until_over(number))
        await asyncio.sleep(_FOR_S)
        over.set()
    found.accept(_TENANT, counts["accepted"])
    found.wrong += _too_few(sum(counts.values()), UNREAD)
    found.did.append(f"{UNREAD} at once on {gateway.name}: {counts}")
    return found


CROWDS: Final = (
    Attack(
        "sockets",
        "3,840 streams on 60 WebSockets",
        "canaries go on",
        sockets,
        limit_s=60,
        max_gap_s=CROWD_GAP_S,
    ),
    Attack(
        "unread-streams",
        "1,900 streams of one gateway, unread",
        "canaries go on",
        unread_streams,
        60,
        max_gap_s=CROWD_GAP_S,
    ),
)
