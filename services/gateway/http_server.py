"""uvicorn in the running event loop, with the limits that it lacks.

uvicorn bounds neither the size of a request's head nor the time in which it arrives, and offers no way to
cut a connection; ``_Protocol`` adds the three. Signals stay with whoever runs the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.core.errors import FailedPrecondition

MAX_HEAD_BYTES: Final = 32 * 1024
HEAD_TIMEOUT_S: Final = 20.0
KEEP_ALIVE_S: Final = 75
MAX_CONNECTIONS: Final = 4096
BACKLOG: Final = 1024
_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class _Protocol(HttpToolsProtocol):
    """One connection."""

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        in_head = self._in_head
        super().data_received(data)
        # Only a head that spans reads is counted here; one read holds less than its completion check sees.
        if in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()
        self.scope["extensions"] = {"fairway.abort": {"cut": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_head_bytes:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        self._refused = True
        if not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()


class HttpServer:
    """Serves an ASGI application between ``start`` and ``stop``."""

    def __init__(self, app: Any, host: str, port: int, *, max_connections: int = MAX_CONNECTIONS) -> None:
        """``port`` 0 takes a free one; ``port`` tells which, once started."""
        self.host = host
        self.port = port
        self._sockets: list[socket.socket] = []
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                # The application logs what happens to requests; the rest is strangers' malformed bytes.
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                limit_concurrency=max_connections,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def start(self) -> None:
        """Return once connections are accepted. Raises FailedPrecondition when the address cannot be had."""
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
        return len(self._server.server_state.connections)

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, give running answers ``grace_s``, then cut them."""
        if not self._sockets:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
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
