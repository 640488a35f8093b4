"""HTTP for monitoring: ``/metrics``, ``/healthz`` and ``/readyz``, on a separate port.

Every role has this small server in place of the gateway's. It accepts only GET, reads no body, and closes
after one response. It responds from the event loop, so a stuck loop responds to nothing. Only the text of the
metrics is rendered in a thread: for a thousand tenants that takes longer than the time of a token. One text
is rendered at a time, and waiting requests share the next, so that many scrapes cost no more than a few.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from fairway.tls import SpiffeId
from services.core.errors import FailedPrecondition
from services.runtime.certificates import Certificates, renewed_context
from services.runtime.connections import ConnectionTable, TlsGate, head_problem

log = structlog.get_logger()

MAX_HEAD_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 64
MAX_PER_SOURCE: Final = 16
HEAD_TIMEOUT_S: Final = 2.0
TIMEOUT_S: Final = 5.0
ROLES: Final = ("monitor", "operator")  # roles whose certificates read the metrics
_OPENMETRICS: Final = "application/openmetrics-text"
_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}

Answer = tuple[int, str, bytes]


class TelemetryServer:
    """Serves from ``start`` until ``stop``. ``problems`` returns why the process does not serve; ``notices``,
    the problems with which it still serves.

    A connection has ``head_timeout_s`` for its request and ``timeout_s`` for its response. With
    ``certificates`` it has TLS, and serves certificates of ``ROLES`` alone.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        listen: str,
        *,
        problems: Callable[[], tuple[str, ...]],
        notices: Callable[[], tuple[str, ...]] = tuple,
        certificates: Certificates | None = None,
        timeout_s: float = TIMEOUT_S,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._listen = listen
        self._problems = problems
        self._notices = notices
        self._certificates = certificates
        self._timeout_s = timeout_s
        self._head_timeout_s = head_timeout_s
        self._table = ConnectionTable(MAX_CONNECTIONS, MAX_PER_SOURCE)
        self._tls: TlsGate | None = None
        if certificates is not None:
            context = renewed_context(certificates, server=True, verify_peer=True)
            self._tls = TlsGate(self._table, context, head_timeout_s)
        self._rendering = asyncio.Lock()
        self._begun = 0  # number of texts begun
        self._texts: dict[str, _Text] = {}  # the last one by content type; there are two
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._table)

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition when the address cannot be bound."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.get_running_loop().create_server(self._door, host, int(port))
        except OSError as exc:
            raise FailedPrecondition(
                f"cannot listen on {self._listen}: {exc.strerror}; "
                "choose another with FAIRWAY_METRICS_LISTEN",
                listen=self._listen,
            ) from exc
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("telemetry.started", listen=f"{host}:{self.port}")

    async def stop(self) -> None:
        """Accept no more connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._tls is not None:
            await self._tls.close()

    def _door(self) -> asyncio.Protocol:
        def make() -> asyncio.Protocol:
            reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
            return asyncio.StreamReaderProtocol(reader, self._serve)

        return make() if self._tls is None else self._tls.protocol(make)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.transport
        if self._tls is None and not self._table.admit(connection):
            return
        try:
            # A peer that disconnects, stalls or sends an invalid head gets no response, or part of one.
            with contextlib.suppress(
                TimeoutError,
                OSError,
                asyncio.IncompleteReadError,
                asyncio.LimitOverrunError,
                UnicodeDecodeError,
            ):
                async with asyncio.timeout(self._head_timeout_s):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self._table.update(connection, busy=True, authenticated=False)
                async with asyncio.timeout(self._timeout_s):
                    problem = self._peer_problem(writer)
                    status, content_type, body = problem or await self._answer(head)
                    writer.write(_head(status, content_type, len(body)) + body)
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._table.remove(connection)
            writer.transport.abort()  # drops what the peer has not received by now

    def _peer_problem(self, writer: asyncio.StreamWriter) -> Answer | None:
        """Return the refusal of a certificate that the handshake accepted and that is not for metrics."""
        if self._certificates is None:
            return None
        names = writer.get_extra_info("peercert")["subjectAltName"]
        found = [SpiffeId.parse(value) for kind, value in names if kind == "URI"]
        own = self._certificates.current().id.trust_domain
        if len(found) == 1 and found[0] and (found[0].trust_domain, found[0].role in ROLES) == (own, True):
            return None
        return 403, _TEXT, f"metrics need a certificate of the role {' or '.join(ROLES)}\n".encode()

    async def _answer(self, head: str) -> Answer:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        target, _, label = rest.partition(" ")
        path = target.partition("?")[0]
        protocol, _, version = label.partition("/")
        if protocol != "HTTP":
            return 400, _TEXT, b"the first line has no HTTP version\n"
        if problem := head_problem(version, [value.encode("latin-1") for value in _values(lines, "host")]):
            return 400, _TEXT, problem.encode("ascii", "backslashreplace") + b"\n"
        if method != "GET":
            return 405, _TEXT, b"only GET\n"
        if path == "/metrics":
            content_type, body = await self._metrics("".join(_values(lines, "accept")[:1]))
            return 200, content_type, body
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            problems, notices = self._problems(), self._notices()
            lines = [*problems, *notices] if problems else ["ready", *notices]
            return 503 if problems else 200, _TEXT, "\n".join(lines).encode() + b"\n"
        return 404, _TEXT, b"there are /metrics, /healthz and /readyz\n"

    async def _metrics(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of the metrics, as of the call or later."""
        # Parameters of the accept header are ignored, or a client could make each scrape render its own text.
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        before = self._begun
        async with self._rendering:
            last = self._texts.get(content_type)
            if last is None or last.number <= before:
                self._begun += 1
                number, read = self._begun, _Snapshot(list(self._registry.collect()))
                last = _Text(number, await asyncio.to_thread(encode, read))
                self._texts[content_type] = last
        return content_type, last.body


@dataclass(frozen=True, slots=True)
class _Text:
    """The rendered metrics. ``number`` counts the texts begun."""

    number: int
    body: bytes


class _Snapshot(Collector):
    """The metrics at the time of one read. Encoders use nothing else."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _values(lines: list[str], wanted: str) -> list[str]:
    """Return the values of the headers of a name."""
    headers = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in headers if name.strip().lower() == wanted]


def _head(status: int, content_type: str, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {length}\r\n"
        "cache-control: no-store\r\nconnection: close\r\n\r\n"
    ).encode()
