"""WebSockets of the HTTP API: many requests on one connection, each answered by its route of HTTP.

A route authenticates, limits, runs and numbers a request as it does over HTTP. This module bounds the
connection: requests at once, the time without one, and what happens when the server stops.

Who may open one: a caller with a key; a web page only from the origins in the setting. Browsers set no
headers here, so a page offers its key as a subprotocol in addition to the protocol's own.

Messages are JSON texts. Those of a request have the id that its client gave it. A request has the path, the
headers and the body that it has over HTTP. Its answer is whole, ``answer``, or a stream: ``started``, an
``event`` per server-sent event with the same data and the same id, and ``end``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from fairway.task_group import TaskGroup
from services.core.errors import Draining, FairwayError, InvalidInput, PermissionDenied
from services.core.generation import Principal
from services.gateway.faces.openai.errors import Header, HttpProblem, error_body, error_headers, status_of
from services.gateway.faces.openai.exchange import (
    REQUEST_HEADERS,
    BodyReader,
    Headers,
    HttpLimits,
    Receive,
    Reply,
    Scope,
    Send,
    WriteLimit,
)
from services.gateway.faces.openai.types import check_json_cost
from services.gateway.faces.sockets.protocol import EXTENSION, SocketProtocol
from services.runtime.process.tenant_turns import run_as

MAX_HEADER_BYTES: Final = 32 * 1024
_ID: Final = re.compile(r"[\x21-\x7e]{1,64}")
_encode: Final = msgspec.json.Encoder().encode
Route = Callable[[Scope, Receive, Send], Awaitable[None]]
FACE: Final = "websocket"
SUBPROTOCOL: Final = "fairway.v1"
KEY_PREFIX: Final = "fairway.key."
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


class SocketRequest(msgspec.Struct, tag="request", forbid_unknown_fields=True):
    """``headers`` are those of the HTTP request by lower-case name, except its credentials."""

    id: str
    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}

    def pairs(self, allowed: Collection[str]) -> list[Header]:
        """Return the headers. Raises InvalidInput."""
        pairs: list[Header] = []
        for name, value in self.headers.items():
            if name not in allowed:
                raise InvalidInput("headers: one of them is not offered here", field="headers")
            if not value.isascii() or not value.isprintable():
                raise InvalidInput(f"headers.{name} must be visible ASCII", field=f"headers.{name}")
            pairs.append((name.encode(), value.encode()))
        if sum(len(name) + len(value) for name, value in pairs) > MAX_HEADER_BYTES:
            raise InvalidInput(f"headers have more than {MAX_HEADER_BYTES} bytes", field="headers")
        return pairs


class SocketCancel(msgspec.Struct, tag="cancel", forbid_unknown_fields=True):
    """Ends the request of this id, if there is one. One with an idempotency key is withdrawn."""

    id: str


_decode: Final[Callable[[bytes], SocketRequest | SocketCancel]] = msgspec.json.Decoder(
    SocketRequest | SocketCancel
).decode


def socket_message(data: bytes) -> SocketRequest | SocketCancel:
    """Return a client's message. Raises InvalidInput."""
    check_json_cost(data)
    try:
        message = _decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the message is not of this protocol: {error}"[:200]) from None
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput("the message is not valid JSON") from None
    if not _ID.fullmatch(message.id):
        raise InvalidInput("id must be 1 to 64 visible ASCII characters", field="id")
    return message


def started_message(name: str, headers: Iterable[Header]) -> bytes:
    return b'{"type":"started","id":%b,"headers":%b}' % (_encode(name), _headers(headers))


def event_messages(name: str, frames: bytes) -> Iterator[bytes]:
    """Yield a message for each of these whole server-sent events. Comments are left out."""
    for frame in frames.split(b"\n\n"):
        fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n") if line)
        data = fields.get(b"data")
        if data is None:
            continue
        head = b'{"type":"event","id":' + _encode(name)
        for field, shown in ((b"id", b"event_id"), (b"event", b"event")):
            if field in fields:
                head += b',"%b":"%b"' % (shown, fields[field])
        yield b'%b,"data":%b}' % (head, data if data.startswith(b"{") else _encode(data.decode()))


def answer_message(name: str, status: int, headers: Iterable[Header], body: bytes) -> bytes:
    parts = (_encode(name), status, _headers(headers), body)
    return b'{"type":"answer","id":%b,"status":%d,"headers":%b,"data":%b}' % parts


def end_message(name: str, *, complete: bool) -> bytes:
    """``complete``: whether the stream has all its events. Otherwise the request was cancelled or cut."""
    return b'{"type":"end","id":%b,"complete":%b}' % (_encode(name), b"true" if complete else b"false")


def error_message(error: FairwayError) -> bytes:
    """Return the last message before a close for a fault of the client."""
    return b'{"type":"error",' + error_body(error)[1:]


def unknown_path(paths: Collection[str]) -> HttpProblem:
    return HttpProblem(404, "there is nothing at this path for a WebSocket; use " + ", ".join(sorted(paths)))


_FRAMING: Final = (b"content-type", b"content-length", b"cache-control", b"x-accel-buffering", b"connection")


def _headers(headers: Iterable[Header]) -> bytes:
    return _encode({key.decode(): value.decode("latin-1") for key, value in headers if key not in _FRAMING})


class SocketExchange:
    """Runs once. ``put`` sends a message and returns when the connection accepts more."""

    def __init__(
        self,
        name: str,
        body: bytes,
        put: Callable[[bytes], Awaitable[None]],
        *,
        over: Callable[[], None],
        cut: Callable[[], None],
        accepted: Callable[[], int],
    ) -> None:
        """``over`` is called before the last message: the client may use its id again when it has that.

        ``cut`` aborts the connection: the client does not read. ``accepted``: the bytes that it has accepted.
        """
        self._name = name
        self._over = over
        self._body: bytes | None = body
        self._put = put
        self._cut = cut
        self._accepted = accepted
        self._left = asyncio.Event()
        self._withdrawn = False
        self._is_stream = False
        self._ended = False
        self._status = 0
        self._headers: list[Header] = []
        self._parts: list[bytes] = []

    async def run(self, route: Route, socket: Scope, path: str, headers: list[Header]) -> None:
        """Answer the request by the route; return once its last message is sent.

        ``headers`` include the credentials. ``socket``: the scope of the connection.
        """
        offered: Mapping[str, Any] = {
            "cut": self._cut,
            "accepted": self._accepted,
            "withdrawn": lambda: self._withdrawn,
            "face": FACE,
        }
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "client": socket.get("client"),
            "extensions": {"fairway.connection": offered},
        }
        await route(scope, self._receive, self._send)
        if not self._ended:
            self._over()
            await self._put(end_message(self._name, complete=False))

    def leave(self, *, withdraw: bool) -> None:
        """End the request as a client does that disconnects.

        ``withdraw``: one with an idempotency key ends too, unless others follow it.
        """
        self._withdrawn = self._withdrawn or withdraw
        self._left.set()

    async def _receive(self) -> Mapping[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            self._is_stream = dict(self._headers)[b"content-type"].startswith(b"text/event-stream")
            if self._is_stream:
                await self._put(started_message(self._name, self._headers))
            return
        body: bytes = message["body"]
        last = not message["more_body"]
        self._ended = last
        if last:
            self._over()
        if self._is_stream:
            for event in event_messages(self._name, body):
                await self._put(event)
            if last:
                await self._put(end_message(self._name, complete=True))
            return
        self._parts.append(body)
        if last:
            await self._put(answer_message(self._name, self._status, self._headers, b"".join(self._parts)))


@dataclass(frozen=True, slots=True)
class Opening:
    """``subprotocol`` is what the answer selects; None: the client offered none."""

    credentials: str | None
    subprotocol: str | None

    @property
    def header(self) -> list[Header]:
        """The credentials as each request of the socket carries them."""
        return [] if self.credentials is None else [(b"authorization", self.credentials.encode("latin-1"))]


def opening_of(scope: Scope, origins: Sequence[str]) -> Opening:
    """Return what the client presented. Raises HttpProblem, PermissionDenied."""
    headers = Headers(scope)
    origin = headers.one(b"origin")
    if origin is not None and "*" not in origins and origin.decode("latin-1") not in origins:
        raise PermissionDenied("web pages of this origin may not connect; the operator permits origins")
    offered: Sequence[str] = scope["subprotocols"]
    if offered and SUBPROTOCOL not in offered:
        raise HttpProblem(400, f"of the subprotocols, {SUBPROTOCOL} is the protocol's; offer it too")
    keys = [each.removeprefix(KEY_PREFIX) for each in offered if each.startswith(KEY_PREFIX)]
    credentials = headers.credentials()
    if len(keys) + (credentials is not None) > 1:
        raise HttpProblem(400, "the API key is there more than once")
    return Opening(f"Bearer {keys[0]}" if keys else credentials, SUBPROTOCOL if offered else None)


@dataclass(frozen=True, slots=True)
class SocketRules:
    """``authorise`` returns the caller of an authorization header's text on a connection with this scope;
    raises the errors of a route."""

    authorise: Callable[[str | None, Scope], Principal]
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
        connection: SocketProtocol = scope["extensions"][EXTENSION]
        try:
            if connection.draining:
                raise Draining("this gateway is shutting down; connect again", retry_after_s=_RETRY_S)
            opening = opening_of(scope, self._rules.origins)
            caller = self._rules.authorise(opening.credentials, scope)
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
        self._connection: SocketProtocol = scope["extensions"][EXTENSION]
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
                self._rules.authorise(self._opening.credentials, self._scope)
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
