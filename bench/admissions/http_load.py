"""A load of chat completions over open connections: cheap enough to share two cores with a server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_TIMEOUT_S: Final = 30.0
_IDLE_S: Final = 2.0  # servers close connections that were idle for 5 s or more


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server of OpenAI's API. ``pids``: the processes whose processor time its requests cost."""

    name: str
    base_url: str
    api_key: str
    model: str
    pids: tuple[int, ...] = ()

    def request(self, max_tokens: int = 16, **fields: str) -> bytes:
        """Return the bytes of one request."""
        message = {"role": "user", "content": "def add(left, right):"}
        content = {"model": self.model, "messages": [message], "max_tokens": max_tokens, **fields}
        body = json.dumps(content).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class HttpConnection:
    """One connection: a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._used_s = time.perf_counter()

    @property
    def fresh(self) -> bool:
        """The server has had no reason to close it."""
        return time.perf_counter() - self._used_s < _IDLE_S

    @classmethod
    async def open(cls, target: HttpTarget) -> HttpConnection:
        found = urlsplit(target.base_url)
        return cls(*await asyncio.open_connection(found.hostname, found.port))

    async def exchange(self, request: bytes) -> float:
        """Return how long the answer took, seconds. Raises RuntimeError unless its status is 200."""
        began_s = time.perf_counter()
        self._writer.write(request)
        async with asyncio.timeout(_TIMEOUT_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await self._reader.readexactly(length)
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"{head.splitlines()[0]!r} {body[:300]!r}")
        self._used_s = time.perf_counter()
        return self._used_s - began_s

    def close(self) -> None:
        self._writer.close()


async def closed_loop(target: HttpTarget, *, connections: int, seconds: float) -> int:
    """Return how many requests were answered while every connection sends one after another."""
    request, ends_s = target.request(), time.perf_counter() + seconds

    async def one() -> int:
        connection, answered = await HttpConnection.open(target), 0
        try:
            while time.perf_counter() < ends_s:
                await connection.exchange(request)
                answered += 1
        finally:
            connection.close()
        return answered

    return sum(await asyncio.gather(*(one() for _ in range(connections))))


async def open_loop(target: HttpTarget, *, rate_per_s: float, requests: int) -> list[float]:
    """Return the latencies, seconds, of requests that arrive at a rate, however long the others take."""
    loop, request = asyncio.get_running_loop(), target.request()
    idle: list[HttpConnection] = []

    async def one() -> float:
        while idle and not idle[-1].fresh:
            idle.pop().close()
        connection = idle.pop() if idle else await HttpConnection.open(target)
        taken_s = await connection.exchange(request)
        idle.append(connection)
        return taken_s

    begins_s, tasks = loop.time(), []
    for number in range(requests):
        await asyncio.sleep(max(0.0, begins_s + number / rate_per_s - loop.time()))
        tasks.append(loop.create_task(one()))
    found = list(await asyncio.gather(*tasks))
    for connection in idle:
        connection.close()
    return found
