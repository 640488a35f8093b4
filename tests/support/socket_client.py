"""Requests over a WebSocket, by the `websockets` package."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

TIMEOUT_S = 20.0


def opened(url: str, key: str | None = None, **options: Any) -> connect:
    """Return the context of an open socket at an HTTP address; ``key``: by header."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    target = url.replace("http", "ws", 1) + "/v1/stream"
    options = {"close_timeout": 1.0, **options}
    return connect(target, additional_headers=headers, proxy=None, max_size=1 << 24, **options)


def request(name: str, body: Any, *, path: str = "/v1/chat/completions", **headers: str) -> str:
    """Return the text of a request; ``headers`` with underscores for hyphens."""
    sent = {header.replace("_", "-"): value for header, value in headers.items()}
    return json.dumps({"type": "request", "id": name, "path": path, "headers": sent, "body": body})


async def received(socket: ClientConnection) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return json.loads(await socket.recv())


async def until_over(socket: ClientConnection, name: str) -> list[Any]:
    """Return the messages of a request up to its last, leaving out those of others."""
    found: list[Any] = []
    while not found or found[-1]["type"] not in ("end", "answer"):
        message = await received(socket)
        if message["id"] == name:
            found.append(message)
    return found


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """Return code and reason of the server's close; what was sent before is read."""
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.recv()
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""
