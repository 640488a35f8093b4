"""WebSockets of the HTTP API: many requests on one connection, each answered by its route of HTTP.

A route authenticates, limits, runs and numbers a request as it does over HTTP. This module bounds the
connection: requests at once, the time without one, and what happens when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import Draining, FairwayError, InvalidInput
from services.core.generation import Principal
from services.gateway.faces.openai.errors import HttpProblem, error_body, error_headers, status_of
from services.gateway.faces.openai.exchange import (
    REQUEST_HEADERS,
    BodyReader,
    HttpLimits,
    Receive,
    Reply,
    Scope,
    Send,
)
from services.gateway.faces.sockets.exchange import Route, SocketExchange
from services.gateway.faces.sockets.handshake import Opening, opening_of
from services.gateway.faces.sockets.messages import (
    SocketCancel,
    SocketRequest,
    answer_message,
    error_message,
    socket_message,
    unknown_path,
)
from services.gateway.faces.sockets.protocol import EXTENSION, SocketConnection
from services.gateway.faces.transport.write_limit import WriteLimit
from services.runtime.process.tenant_loop import run_as

log = structlog.get_logger()

PATH: Final = "/v1/stream"
MAX_REQUESTS: Final = 64  # most requests of one socket at once
CLOSE_IDLE: Final = 1000
CLOSE_BINARY: Final = 1003
CLOSE_MALFORMED: Final = 1007
CLOSE_UNAUTHORISED: Final = 1008
CLOSE_RESTART: Final = 1012
_RETRY_S: Final = 1.0
# The socket decides these for all its requests.
_OWN_HEADERS: Final = ("authorization", "x-api-key", "content-encoding")
ALLOWED_HEADERS: Final = frozenset(REQUEST_HEADERS) - frozenset(_OWN_HEADERS)


@dataclass(frozen=True, slots=True)
class SocketRules:
    """``authorise`` returns the caller of an authorization header's text; raises the errors of a route."""

    authorise: Callable[[str | None], Principal]
    request_id: Callable[[], str]
    origins: Sequence[str]
    limits: HttpLimits


class SocketFace:
    """The ASGI application of WebSockets. ``routes`` maps paths to what answers their requests."""

    def __init__(self, routes: Mapping[str, Route], rules: SocketRules, bodies: BodyReader) -> None:
        self._routes = routes
        self._rules = rules
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        connection: SocketConnection = scope["extensions"][EXTENSION]
        try:
            if connection.draining:
                raise Draining("this gateway is shutting down; connect again", retry_after_s=_RETRY_S)
            opening = opening_of(scope, self._rules.origins)
            caller = self._rules.authorise(opening.credentials)
        except FairwayError as error:
            log.info("socket.rejected", reason=error.reason)
            await self._refuse(scope, send, error)
            return
        await send({"type": "websocket.accept", "subprotocol": opening.subprotocol})
        connection.authenticated()
        run_as(caller.tenant_id)
        with self._bodies.account(caller.tenant_id) as hold:
            connection.account(hold)
            try:
                await _Socket(self._routes, self._rules, self._bodies, scope, opening, receive, send).run()
            finally:
                connection.account(lambda _size: None)  # it reads on until the client has the close

    async def _refuse(self, scope: Scope, send: Send, error: FairwayError) -> None:
        """Answer the handshake as HTTP."""

        async def renamed(message: dict[str, Any]) -> None:
            await send({**message, "type": message["type"].replace("http", "websocket.http", 1)})

        request_id = self._rules.request_id().encode()
        with contextlib.suppress(FairwayError, OSError):
            await Reply(scope, renamed, [(b"x-request-id", request_id)]).error(error)


class _Close(Exception):
    def __init__(self, code: int, reason: str) -> None:
        self.code, self.reason = code, reason


class _Socket:
    """One open socket. A task reads its messages, and one runs for each request."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        rules: SocketRules,
        bodies: BodyReader,
        scope: Scope,
        opening: Opening,
        receive: Receive,
        send: Send,
    ) -> None:
        self._routes = routes
        self._rules = rules
        self._bodies = bodies
        self._scope = scope
        self._opening = opening
        self._receive = receive
        self._send = send
        self._connection: SocketConnection = scope["extensions"][EXTENSION]
        self._running: dict[str, SocketExchange] = {}
        self._limit: asyncio.Timeout | None = None  # limit of the wait for a message
        self._open = True
        self._idle_from_s = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Return once the socket is closed and its requests have ended."""
        self._connection.on_drain(self._set_limit)
        async with TaskGroup() as group:
            try:
                await self._read(group)
            except _Close as end:
                await self._close(end)
            finally:
                self._open = False
                for exchange in self._running.values():
                    exchange.leave(withdraw=False)

    async def _read(self, group: TaskGroup) -> None:
        """Return when the client is gone. Raises _Close."""
        while True:
            event = await self._next()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            if text is None:
                raise _Close(CLOSE_BINARY, "messages are texts")
            try:
                self._rules.authorise(self._opening.credentials)
            except FairwayError as error:
                raise _Close(CLOSE_UNAUTHORISED, error.message) from None
            try:
                message = await self._bodies.parse(socket_message, text.encode())
                del event, text
                if isinstance(message, SocketCancel):
                    if (exchange := self._running.get(message.id)) is not None:
                        exchange.leave(withdraw=True)
                else:
                    await self._begin(group, message)
            except InvalidInput as error:
                await self._put(error_message(error))
                raise _Close(CLOSE_MALFORMED, error.message) from None

    async def _next(self) -> Mapping[str, Any]:
        """Return the client's next message. Raises _Close when no request runs and none comes."""
        try:
            async with asyncio.timeout(None) as self._limit:
                self._set_limit()
                return await self._receive()
        except TimeoutError:
            if self._connection.draining:
                advice = f"shutting down: connect again after {_RETRY_S:g} s"
                raise _Close(CLOSE_RESTART, advice) from None
            raise _Close(CLOSE_IDLE, f"no request for {self._rules.limits.socket_idle_s:g} s") from None
        finally:
            self._limit = None

    def _set_limit(self) -> None:
        """Bound the wait for a message while no request runs."""
        if self._limit is not None and not self._limit.expired():
            idle_s = 0.0 if self._connection.draining else self._rules.limits.socket_idle_s
            self._limit.reschedule(None if self._running else self._idle_from_s + idle_s)

    async def _begin(self, group: TaskGroup, request: SocketRequest) -> None:
        """Start a request, or answer that it may not start."""
        try:
            if request.id in self._running:
                raise HttpProblem(409, "id is that of a request that runs; take another")
            route = self._routes.get(request.path)
            if route is None:
                raise unknown_path(self._routes)
            if len(self._running) >= MAX_REQUESTS:
                raise HttpProblem(429, f"{MAX_REQUESTS} requests run on this socket", retry_after_s=_RETRY_S)
            headers = request.pairs(ALLOWED_HEADERS)
        except FairwayError as error:
            body = error_body(error)
            await self._put(answer_message(request.id, status_of(error), error_headers(error), body))
            return
        await self._connection.turn()
        exchange = SocketExchange(
            request.id,
            bytes(request.body),
            self._put,
            over=lambda: self._over(request.id, exchange),
            cut=self._connection.cut,
            accepted=self._connection.accepted_bytes,
        )
        self._running[request.id] = exchange
        self._connection.set_busy(True)
        work = exchange.run(route, self._scope, request.path, [*self._opening.header, *headers])
        group.create_task(self._until_over(request.id, exchange, work))

    async def _until_over(self, name: str, exchange: SocketExchange, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._over(name, exchange)

    def _over(self, name: str, exchange: SocketExchange) -> None:
        """Free the id of a request. Idempotent: another may have it already."""
        if self._running.get(name) is not exchange:
            return
        del self._running[name]
        if not self._running:
            self._idle_from_s = asyncio.get_running_loop().time()
            self._connection.set_busy(False)
            self._set_limit()

    async def _put(self, message: bytes) -> None:
        """Send a message; returns when the connection accepts more."""
        if self._open:
            await self._write({"type": "websocket.send", "text": message.decode()})

    async def _close(self, end: _Close) -> None:
        self._open = False
        log.info("socket.closed", code=end.code)  # the reason may have text of the client
        reason = end.reason.encode()[:120].decode("utf-8", "ignore")
        await self._write({"type": "websocket.close", "code": end.code, "reason": reason})

    async def _write(self, event: dict[str, Any]) -> None:
        """Send an event. A client that takes next to nothing within the write timeout is cut."""
        try:
            async with WriteLimit(self._rules.limits.write_timeout_s, self._connection.accepted_bytes):
                await self._send(event)
        except TimeoutError:
            log.info("socket.slow_reader")
            self._connection.cut()
        except OSError:  # the client is gone, which the reader receives too
            self._open = False
