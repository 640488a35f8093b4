"""HTTP for machines that watch: ``/metrics``, ``/healthz`` and ``/readyz``, on a port of its own.

A server of a few lines and not the gateway's: every role has it, it takes GET alone, reads no body, and
closes after one answer. It answers from the event loop, so a loop that is stuck answers nothing. The text of
the metrics alone is made in a thread: that of a thousand tenants takes longer than a token may.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from services.core.errors import FailedPrecondition

log = structlog.get_logger()

MAX_HEAD_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 64
TIMEOUT_S: Final = 5.0
_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Answer = tuple[int, str, bytes]


class TelemetryServer:
    """Serves from ``start`` until ``stop``. ``problems`` returns why the process does not serve, if so;
    ``notices``, what is wrong and keeps it from nothing.

    A connection has ``timeout_s`` for its question and its answer together.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        listen: str,
        *,
        problems: Callable[[], tuple[str, ...]],
        notices: Callable[[], tuple[str, ...]] = tuple,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._listen = listen
        self._problems = problems
        self._notices = notices
        self._timeout_s = timeout_s
        self.connections = 0  # open ones, at most MAX_CONNECTIONS
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition when the address cannot be bound."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._serve, host, int(port), limit=MAX_HEAD_BYTES)
        except OSError as exc:
            raise FailedPrecondition(
                f"cannot listen on {self._listen}: {exc.strerror}; "
                "choose another with FAIRWAY_METRICS_LISTEN",
                listen=self._listen,
            ) from exc
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("telemetry.started", listen=f"{host}:{self.port}")

    async def stop(self) -> None:
        """Take no connections any more. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            # A peer that breaks off, stalls or sends no head that can be read gets no answer, or part of one.
            with contextlib.suppress(
                TimeoutError,
                OSError,
                asyncio.IncompleteReadError,
                asyncio.LimitOverrunError,
                UnicodeDecodeError,
            ):
                async with asyncio.timeout(self._timeout_s):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    status, content_type, body = await self._answer(head)
                    writer.write(_head(status, content_type, len(body)) + body)
                    writer.close()
                    await writer.wait_closed()
        finally:
            self.connections -= 1
            writer.transport.abort()  # what a peer has not taken by now is kept for nobody

    async def _answer(self, head: str) -> Answer:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return 405, _TEXT, b"only GET\n"
        if path == "/metrics":
            encode, content_type = choose_encoder(_accept(lines))
            read = _Snapshot(list(self._registry.collect()))
            return 200, content_type, await asyncio.to_thread(encode, read)
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            problems, notices = self._problems(), self._notices()
            lines = [*problems, *notices] if problems else ["ready", *notices]
            return 503 if problems else 200, _TEXT, "\n".join(lines).encode() + b"\n"
        return 404, _TEXT, b"there are /metrics, /healthz and /readyz\n"


class _Snapshot(Collector):
    """What the metrics were when they were read. Encoders ask it for nothing else."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _accept(lines: list[str]) -> str:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            return value.strip()
    return ""


def _head(status: int, content_type: str, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {length}\r\n"
        "cache-control: no-store\r\nconnection: close\r\n\r\n"
    ).encode()
