"""uvicorn in the running event loop, with additional limits, and what applies before a request's route.

uvicorn bounds neither the head of a request, nor the bytes after it once the answer is sent, nor the time of
either. It treats trailers as headers, lets one client open every connection, and offers no way to cut one.
``_Protocol`` and ``ConnectionTable`` add these. The process handles signals itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from ssl import SSLContext
from typing import Any, Final, cast
from urllib.parse import unquote

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.core.errors import FailedPrecondition
from services.gateway.faces.openai.exchange import Receive, Scope, Send, takes_answer
from services.gateway.faces.sockets.protocol import PING_S, SLICES_PER_TURN, SocketProtocol
from services.runtime.connections import (
    ConnectionTable,
    TlsGate,
    accepted_bytes,
    head_problem,
    source_of,
)
from services.runtime.process.tenant_turns import LoopTurns

MAX_HEAD_BYTES: Final = 32 * 1024
MAX_BODY_BYTES: Final = 8 * 1024**2
# The framing of a chunked body: its chunk sizes and extensions, plus an eighth of the framed bytes.
MAX_FRAMING_BYTES: Final = 64 * 1024
HEAD_TIMEOUT_S: Final = 20.0
BODY_TIMEOUT_S: Final = 35.0  # the application's own limit is shorter, and sends an answer
KEEP_ALIVE_S: Final = 75
MAX_CONNECTIONS: Final = 4096
# A reverse proxy is one source, so a source's share must suffice for an installation.
MAX_SOURCE_SHARE: Final = 0.5
MAX_PIPELINED: Final = 32
BACKLOG: Final = 1024
# Requests that start per iteration of the event loop.
BEGUN_PER_TURN: Final = 16
# Connections without a credential so far. One source may have half of them, the size of the accept backlog,
# so that they do not evict each other before they are read.
MAX_UNAUTHENTICATED: Final = 2 * BACKLOG
# One read of the event loop, and the protocol's buffer before it pauses reading.
_IN_FLIGHT_BYTES: Final = 512 * 1024
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_BAD_HEAD: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s\n"
)
_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
_MAX_AGE_S: Final = 600
_SLASH: Final = "%2F"
# Headers of an answer that a page may read.
_EXPOSED: Final = (
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-request-id",
    "x-client-request-id",
    "x-should-retry",
    "x-fairway-cache",
    "x-fairway-weights",
    "x-fairway-base",
    "x-fairway-exact",
    "x-fairway-size",
    "idempotent-replayed",
    "x-fairway-degraded",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


class _Refused(Exception):
    """The application does not answer the request. Raised in a callback, it stops the parser."""


class _Protocol(HttpToolsProtocol):
    """One connection. At most one timer runs: for the head, for the body, or for the next request."""

    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S
    keep_alive_s: float = KEEP_ALIVE_S

    def __init__(self, table: ConnectionTable, max_body_bytes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._table = table
        self._max_body_bytes = max_body_bytes
        self._in_head = True
        self._in_body = False
        # Bytes of the head, the body or the gap between requests, without its first read.
        self._read_bytes = 0
        self._body_bytes = 0
        # Limits of this request; an upload raises both once its caller is authenticated.
        self._body_limit_bytes, self._body_limit_s = max_body_bytes, self.body_timeout_s
        self._known = False  # a request on this connection had a credential
        self._serving = False  # such a request has no complete answer yet
        self._refusal = _BAD_REQUEST
        self._refused = False
        self._upgraded = False  # another protocol has the connection
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._table.remove(self.transport)
        super().connection_lost(exc)
        # Both refer to this protocol: without them a closed connection is freed without the cycle collector.
        self.cycle = self.scope = cast(Any, None)
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        scope, in_head, in_body = self.scope, self._in_head, self._in_body
        super().data_received(data)
        if self._upgraded:
            return
        if self.scope is scope and self._in_head is in_head and self._in_body is in_body:
            self._read_bytes += len(data)
            if in_body and self._is_body_too_large():
                self._refuse(_BAD_REQUEST)
            elif not in_body and self._read_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)
        self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._in_body = True, False
        self._read_bytes = 0
        self._stop_timer()
        self._body_limit_bytes, self._body_limit_s = self._max_body_bytes, self.body_timeout_s
        self.scope["extensions"] = {
            "fairway.connection": {
                "cut": self.transport.abort,
                "accepted": partial(accepted_bytes, self.transport),
                "authenticated": self._authenticated,
                "expect": self._expect,
            }
        }

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            raise _Refused("trailers are not taken")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"transfer-encoding" and (
                value.lower() != b"chunked" or self.parser.get_http_version() == "1.0"
            ):
                raise _Refused("a body has no other encoding than chunked")
        if size > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise _Refused("the head is too large")
        hosts = [value for name, value in self.headers if name == b"host"]
        if problem := head_problem(self.parser.get_http_version(), hosts):
            self._refusal = _BAD_HEAD % (len(problem) + 1, problem.encode())
            raise _Refused(problem)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused("too many requests wait for an answer on this connection")
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_upgrade()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.scope["extensions"]["fairway.connection"]["unframed"] = partial(_write_unframed, self.cycle)
        self._in_head, self._in_body = False, True
        self._read_bytes = self._body_bytes = 0
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._read_bytes = 0
        self._stop_timer()
        super().on_message_complete()
        self._table.update(self.transport, busy=self._serving, authenticated=self._known)

    def on_response_complete(self) -> None:
        self._serving = False
        self._table.update(self.transport, busy=False, authenticated=self._known)
        super().on_response_complete()
        self._start_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._stop_timer()
        super().handle_websocket_upgrade()

    def _check_upgrade(self) -> None:
        """Raise _Refused unless the whole connection can become a WebSocket."""
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if self.pipeline or (cycle is not None and not cycle.response_complete):
            raise _Refused("an answer is not complete on this connection")
        if self.parser.get_method() != b"GET" or self.parser.get_http_version() != "1.1":
            raise _Refused("a WebSocket is opened by GET and HTTP/1.1")

    def _authenticated(self) -> None:
        """The request in progress has an authenticated caller."""
        self._known = self._serving = True
        self._table.update(self.transport, busy=not self._in_body, authenticated=True)
        if not self._in_body and not self._in_head:
            self._stop_timer()

    def _expect(self, body_bytes: int, timeout_s: float) -> None:
        """Take a larger body of the request in progress, for a longer time."""
        self._body_limit_bytes, self._body_limit_s = body_bytes, timeout_s
        if self._in_body:
            self._stop_timer()
            self._start_timer()

    def _is_body_too_large(self) -> bool:
        framing_bytes = self._read_bytes - self._body_bytes
        return (
            self._body_bytes > self._body_limit_bytes + _IN_FLIGHT_BYTES
            or framing_bytes > MAX_FRAMING_BYTES + self._body_bytes // 8
        )

    def _start_timer(self) -> None:
        """Bound the wait for the client, while the client has to act."""
        if self._timer is not None or self.transport.is_closing():
            return
        if self._in_head:
            limit_s = self.head_timeout_s
        elif self._in_body:
            if self.pipeline:  # it is read when the earlier answers are complete
                return
            limit_s = self._body_limit_s
        elif self._serving:
            return
        else:
            self._timer = self.loop.call_later(self.keep_alive_s, self._on_idle, None)
            return
        self._timer = self.loop.call_later(limit_s, self.transport.abort)

    def _on_idle(self, before: int | None) -> None:
        """Cut the connection unless the client still takes its last answer."""
        accepted = accepted_bytes(self.transport)
        if self.transport.get_write_buffer_size() and takes_answer(before, accepted):
            self._timer = self.loop.call_later(self.keep_alive_s, self._on_idle, accepted)
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, answer: bytes) -> None:
        """End the connection, with an answer unless that would interleave with another."""
        self._refused = True
        self._stop_timer()
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's type omits None
        begun = cycle is not None and (
            not cycle.response_complete if self._in_head else cycle.response_started
        )
        if self.pipeline or begun:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
        if cycle is not None:  # the application may wait for a body
            cycle.disconnected = True
            cycle.message_event.set()


def _write_unframed(cycle: RequestResponseCycle, size: int) -> None:
    """Let the next write of ``size`` bytes pass as it is; the end of the connection is that of the answer."""
    cycle.chunked_encoding, cycle.expected_content_length = False, size


class _ConnectionGate(asyncio.Protocol):
    """Admits or rejects a connection before anything is allocated for it."""

    def __init__(self, table: ConnectionTable, make: Callable[[], _Protocol]) -> None:
        self._table = table
        self._make = make

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._table.admit(transport):
            protocol = self._make()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)


class HttpServer:
    """Serves an ASGI application between ``start`` and ``stop``."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        context: Callable[[], SSLContext] | None = None,
    ) -> None:
        """``port`` 0 takes a free port; after the start, ``port`` is the actual one.

        ``context`` returns the TLS of a new connection; None: plain.
        """
        self.host = host
        self.port = port
        self.table = ConnectionTable(
            max_connections,
            max(1, int(max_connections * MAX_SOURCE_SHARE)),
            max_unauthenticated=min(MAX_UNAUTHENTICATED, max_connections),
        )
        self._max_body_bytes = max_body_bytes
        self._tls = None if context is None else TlsGate(self.table, context, HEAD_TIMEOUT_S)
        self._sockets: list[socket.socket] = []
        self._paced = PacedApp(app)
        self._slices = LoopTurns(SLICES_PER_TURN)
        self._draining = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._paced,
                http=self._door,  # type: ignore[arg-type]
                ws=self._socket,  # type: ignore[arg-type]
                ws_max_size=max_body_bytes,
                ws_ping_interval=PING_S,
                ws_ping_timeout=PING_S,
                # Tokens are small, and a compressed message may be a thousand times larger than it looks.
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                # The application logs its requests; the rest is malformed bytes of unknown clients.
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def start(self) -> None:
        """Return once connections are accepted. Raises FailedPrecondition when the address is unavailable."""
        bound = _bind(self.host, self.port)
        self.port = bound.getsockname()[1]
        self._sockets = [bound]
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=self._sockets)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self.table)

    def _door(self, **kwargs: Any) -> asyncio.Protocol:
        make = partial(_Protocol, self.table, self._max_body_bytes, **kwargs)
        return _ConnectionGate(self.table, make) if self._tls is None else self._tls.protocol(make)

    def _socket(self, **kwargs: Any) -> SocketProtocol:
        turns = self._paced.turns, self._slices
        return SocketProtocol(self.table, *turns, draining=self._draining, **kwargs)

    def drain(self) -> None:
        """Let the WebSockets end once their requests have. Running requests and HTTP are unchanged."""
        self._draining = True
        for connection in self._open_sockets():
            connection.drain()

    def _open_sockets(self) -> list[SocketProtocol]:
        connections: Iterable[object] = list(self._server.server_state.connections)
        return [connection for connection in connections if isinstance(connection, SocketProtocol)]

    async def stop(self, grace_s: float) -> None:
        """Reject new connections, give running answers ``grace_s``, then cut them."""
        if not self._sockets:
            return
        began_s = asyncio.get_running_loop().time()
        for server in self._server.servers:
            server.close()
        if self._tls is not None:
            await self._tls.close()
        # uvicorn would close WebSockets at once, before their last events.
        self.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for each in self._open_sockets():
                    await each.closed.wait()
        left_s = grace_s - (asyncio.get_running_loop().time() - began_s)
        self._server.config.timeout_graceful_shutdown = max(1, round(left_s))
        await self._server.shutdown(sockets=self._sockets)
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=1.0)
        for connection in list(state.connections):
            connection.transport.abort()
        self._sockets = []


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as exc:
        with contextlib.suppress(OSError):
            bound.close()
        raise FailedPrecondition(_cannot_listen(exc, host, port), host=host, port=port) from exc
    return bound


def _cannot_listen(exc: OSError, host: str, port: int) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another process: stop it or choose another port"
    if exc.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights than this process has: choose one above 1023"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine"
    return f"cannot listen on {host}:{port}: {exc.strerror or exc}"


class PacedApp:
    """An ASGI application that starts at most ``BEGUN_PER_TURN`` requests per iteration of the event loop.

    Otherwise thousands of requests that are readable at once would start in one iteration, for a second or
    more, during which no stream progresses. The number of connections bounds the waiting requests.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.turns = LoopTurns(BEGUN_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.turns.turn(source_of(scope.get("client")))
        await self._app(scope, receive, send)


class SpelledPath:
    """Routes a path by its own slashes, except one at its end. Access depends on the route alone.

    An encoded slash stays encoded, so that it separates nothing: only ``model_of`` decodes it.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if b"%2f" in (raw := scope.get("raw_path") or b"").lower():
            parts = raw.decode("ascii", "replace").split("/")
            path = "/".join(unquote(part).replace("/", _SLASH) for part in parts)
        if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
            path = path[:-1]
        await self._app({**scope, "path": path}, receive, send)


def model_of(scope: Any) -> str:
    """Return the model's name in the path, which may have slashes of both spellings."""
    name: str = scope["path_params"]["model"]
    return name.replace(_SLASH, "/")


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets web pages of these origins call the server; nothing without one.

    No cookies: a page sends its key itself.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(_EXPOSED),
            max_age=_MAX_AGE_S,
        )
    ]
