"""One HTTP exchange: its route, bodies within memory bounds, and a client that reads slowly or disconnects.

A body in gzip is inflated within the bounds of bodies, since a few KB may hold megabytes.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, TypeVar

from msgspec import Struct

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, InvalidInput, OverQuota, SlowReader
from services.core.generation import Principal
from services.core.limits import RateState
from services.gateway.events import MAX_ATTEMPT, Accepted, Received, never
from services.gateway.faces.openai.errors import (
    ErrorBody,
    Header,
    HttpProblem,
    error_body,
    error_headers,
    status_of,
)
from services.gateway.faces.openai.types import is_cheap
from services.gateway.rows.work import RowsAnswer

ENCODINGS: Final = (b"gzip", b"x-gzip")
_GZIP: Final = 31  # zlib's number for a window of 32 KiB in gzip's frame
# What is inflated in the event loop, which takes a fraction of a millisecond, and in a thread at a time.
_INLINE_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 1024 * 1024
# Within a limit: a client that accepts less holds an answer in memory for too long.
LEAST_BYTES: Final = 16 * 1024
T = TypeVar("T")
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BODY_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 30.0
STATUS_WAIT_S: Final = 45.0
SOCKET_IDLE_S: Final = 300.0
MAX_TIMEOUT_S: Final = 86_400.0
_LENGTH: Final = re.compile(rb"\d{1,15}")
_SECONDS: Final = re.compile(rb"\d{1,6}(\.\d{1,6})?")
_VISIBLE: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_SESSION: Final = re.compile(rb"[\x21-\x7e]+")
_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ATTEMPT: Final = re.compile(rb"\d{1,6}")
_QUALITY: Final = re.compile(rb"\d{1,2}|100")
_JSON_TYPE: Final = re.compile(rb"application/json\s*(;\s*charset\s*=\s*\"?utf-8\"?\s*)?", re.IGNORECASE)

# A small body is not accounted: its connection bounds it.
FREE_BYTES: Final = 64 * 1024
_TENANT_BODIES: Final = 4
_ALL_BODIES: Final = 16
_RETRY_S: Final = 1.0

# The meaning of each request header, for docs/reference/http.md.
REQUEST_HEADERS: Final = {
    "authorization": "`Bearer KEY`",
    "x-api-key": "the key, where there is no `authorization`",
    "anthropic-version": "of `/v1/messages`: any",
    "content-encoding": "`gzip`; the inflated body has the same bound",
    "idempotency-key": "1 to 128 visible ASCII characters; a repeated request with it runs once",
    "last-event-id": "the last `id` of a stream with an idempotency key: the answer continues behind it",
    "x-request-timeout-s": f"seconds until the request ends, at most {MAX_TIMEOUT_S:g}",
    "x-session-key": "visible ASCII characters: a session stays on one version of a split",
    "x-model-version": "digest or arm of the version that is to answer, where the model's split permits it",
    "x-fairway-quality": "least quality, 0 to 100, of the size of an alias that is to answer",
    "x-request-id": "the client's name of the request: logged and returned as `x-client-request-id`",
    "x-stage-clock": "`1` adds the time of each stage to the answer",
    "x-fairway-attempt": "how often the client sent the request before",
    "traceparent": "W3C trace context, continued",
    "inference-header-content-length": "of `infer`: the bytes of the JSON before binary data",
}
JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
BYTES: Final = "application/octet-stream"
# Request headers of routes that run something, and of those of them that generate.
RUN_HEADERS: Final = ("idempotency-key", "x-request-timeout-s", "x-session-key", "x-model-version")
STREAM_HEADERS: Final = ("last-event-id", "x-fairway-quality", *RUN_HEADERS)


def rate_headers(outcome: Accepted | OverQuota | RowsAnswer) -> list[Header]:
    """Return limit, remaining and reset of each rate that was checked for the request."""
    return [*_headers(b"requests", outcome.request_rate), *_headers(b"tokens", outcome.token_rate)]


def _headers(what: bytes, rate: RateState | None) -> list[Header]:
    if rate is None:
        return []
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % rate.limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % rate.remaining),
        (b"x-ratelimit-reset-" + what, duration(rate.reset_s).encode()),
    ]


def duration(seconds: float) -> str:
    """Return a time rounded up to milliseconds, in OpenAI's notation: ``120ms``, ``7.66s``, ``1m0s``."""
    total_ms = math.ceil(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    rest = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest


async def inflated(body: bytes, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Return the content of a gzip body.

    Raises HttpProblem where it has more than ``max_bytes``, before that is allocated, and where it is no
    single complete gzip member. ``hold`` is called with the size so far; an error that it raises ends the
    work.
    """
    inflater = zlib.decompressobj(wbits=_GZIP)
    parts: list[bytes] = []
    size, rest = 0, body
    try:
        while not inflater.eof:
            room = max_bytes + 1 - size
            if not parts:
                part = inflater.decompress(rest, min(room, _INLINE_BYTES))
            else:
                part = await asyncio.to_thread(inflater.decompress, rest, min(room, _PIECE_BYTES))
            rest = inflater.unconsumed_tail
            if not part and not inflater.eof:  # the input is used up
                raise _malformed()
            size += len(part)
            if size > max_bytes:
                raise HttpProblem(413, f"the inflated body is larger than {max_bytes} bytes")
            hold(len(body) + size)
            parts.append(part)
    except zlib.error:
        raise _malformed() from None
    if inflater.unused_data:
        raise _malformed()
    return b"".join(parts)


def _malformed() -> HttpProblem:
    return HttpProblem(400, "the body is not one complete gzip member")


def takes_answer(before: int | None, accepted: int) -> bool:
    """Whether a client that had accepted ``before`` at the start of a limit, None: at none yet, goes on."""
    return before is None or accepted - before >= LEAST_BYTES


class WriteLimit:
    """The block raises TimeoutError once the client accepts less than ``LEAST_BYTES`` within ``limit_s``.

    It does so up to twice ``limit_s`` after its last progress.

    A large answer takes long on a slow line, which is no reason to end it. ``accepted`` returns how many
    bytes the client has accepted. Its first call is after ``limit_s``, since most writes do not wait.
    """

    def __init__(self, limit_s: float, accepted: Callable[[], int]) -> None:
        self._limit_s = limit_s
        self._accepted = accepted
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._wait(None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _wait(self, accepted: int | None) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check, accepted)

    def _check(self, before: int | None) -> None:
        accepted = self._accepted()
        if takes_answer(before, accepted):
            self._wait(accepted)
        else:
            self._limit.reschedule(asyncio.get_running_loop().time())


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Times in seconds, sizes in bytes."""

    max_body_bytes: int
    body_timeout_s: float = BODY_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S
    # Time after which a stream begins without output; longer than a request waits in the queue.
    status_wait_s: float = STATUS_WAIT_S
    # Time after which a WebSocket without a request is closed.
    socket_idle_s: float = SOCKET_IDLE_S


class Headers:
    """Request headers; a repeated header that must be unique is a 400."""

    def __init__(self, scope: Scope) -> None:
        self._pairs: Iterable[Header] = scope["headers"]

    def one(self, name: bytes) -> bytes | None:
        found = [value for key, value in self._pairs if key == name]
        if len(found) > 1:
            raise HttpProblem(400, f"the header {name.decode()} is there more than once")
        return found[0] if found else None

    def credentials(self) -> str | None:
        """Return the text that holds the caller's key; None without one."""
        found = self.one(b"authorization")
        if found is None:  # Anthropic's clients send the key this way.
            found = self.one(b"x-api-key")
        return found.decode("latin-1") if found is not None else None

    def client_request_id(self) -> bytes | None:
        """The client's id of its request: echoed and logged, never used as a key. None unless harmless."""
        for name in (b"x-request-id", b"x-client-request-id"):
            for key, value in self._pairs:
                if key == name and _CLIENT_ID.fullmatch(value):
                    return value
        return None

    def session_key(self) -> str | None:
        """Return ``x-session-key``, which makes a version split sticky. Raises InvalidInput."""
        value = self.one(b"x-session-key")
        if value is None:
            return None
        if not _SESSION.fullmatch(value):
            raise InvalidInput("x-session-key must be visible ASCII characters", field="x-session-key")
        return value.decode()

    def model_version(self) -> str:
        """Return ``x-model-version``, the version that is to answer; empty without one. Raises
        InvalidInput.
        """
        value = self.one(b"x-model-version")
        if value is None:
            return ""
        if not _VISIBLE.fullmatch(value):
            raise InvalidInput(
                "x-model-version must be a version digest or the name of an arm", field="x-model-version"
            )
        return value.decode()

    def idempotency_key(self) -> str:
        """Return ``idempotency-key``, or an empty text without one. Raises InvalidInput."""
        value = self.one(b"idempotency-key")
        if value is None:
            return ""
        if not _VISIBLE.fullmatch(value):
            raise InvalidInput(
                "idempotency-key must be 1 to 128 visible ASCII characters", field="idempotency-key"
            )
        return value.decode()

    def apply_to(self, generation: inference_pb2.Generation) -> None:
        """Set what the headers decide of a generation. Raises InvalidInput."""
        generation.idempotency_key, generation.version = self.idempotency_key(), self.model_version()
        if (session_key := self.session_key()) is not None:
            generation.session_key = session_key
        if (quality := self.one(b"x-fairway-quality")) is not None:
            if not _QUALITY.fullmatch(quality):
                raise InvalidInput(
                    "x-fairway-quality must be a number from 0 to 100", field="x-fairway-quality"
                )
            generation.quality = int(quality)

    def last_event_id(self) -> str:
        """Return ``last-event-id``, or an empty text without one. Raises HttpProblem for two."""
        return (self.one(b"last-event-id") or b"").decode("latin-1")

    def traceparent(self) -> str:
        """Return the client's trace context, or arbitrary text; empty without one."""
        found = [value for key, value in self._pairs if key == b"traceparent" and len(value) <= 64]
        return found[0].decode("latin-1") if len(found) == 1 else ""

    def attempt(self) -> int:
        """Return how often the client sent the request before, by its own count: 0 without a number."""
        for name in (b"x-fairway-attempt", b"x-stainless-retry-count"):
            for key, value in self._pairs:
                if key == name and _ATTEMPT.fullmatch(value):
                    return min(int(value), MAX_ATTEMPT)
        return 0

    def wants_stage_clock(self) -> bool:
        """Whether the answer includes the stage times. Raises InvalidInput unless the header is 0 or 1."""
        value = self.one(b"x-stage-clock")
        if value not in (None, b"0", b"1"):
            raise InvalidInput("x-stage-clock must be 0 or 1", field="x-stage-clock")
        return value == b"1"

    def timeout_s(self) -> float | None:
        """Return ``x-request-timeout-s``. Raises InvalidInput unless it is a number of seconds above 0."""
        value = self.one(b"x-request-timeout-s")
        if value is None:
            return None
        seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
        if not 0.0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidInput(
                f"x-request-timeout-s must be a number of seconds, above 0 and at most {MAX_TIMEOUT_S:g}",
                field="x-request-timeout-s",
            )
        return seconds


class BodyReader:
    """Accounts for the bytes of bodies that are being read, and parses bodies.

    One tenant's large bodies take at most four times the largest size, those of all tenants sixteen times.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_tenant_bytes = _TENANT_BODIES * max_body_bytes
        self._max_bytes = _ALL_BODIES * max_body_bytes
        self._held: dict[str, int] = {}
        self._parsing = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @contextmanager
    def account(self, tenant_id: str) -> Iterator[Callable[[int], None]]:
        """Yield the function to call with the present size of a body, which may shrink; the reservation lasts
        until the block ends.

        The call raises HttpProblem when the bound is reached.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            more = (size if size > FREE_BYTES else 0) - held
            if not more:
                return
            tenant_bytes = self._held.get(tenant_id, 0) + more
            if tenant_bytes > self._max_tenant_bytes:
                raise HttpProblem(
                    429, "too many large bodies of this tenant at once", close=True, retry_after_s=_RETRY_S
                )
            if self.held_bytes + more > self._max_bytes:
                raise HttpProblem(503, "too many large bodies at once", close=True, retry_after_s=_RETRY_S)
            self._held[tenant_id], held = tenant_bytes, held + more
            if not tenant_bytes:
                del self._held[tenant_id]

        try:
            yield hold
        finally:
            if held:
                hold(0)

    async def read(self, exchange: Exchange, limits: HttpLimits, parse: Callable[[bytes], T]) -> T:
        """Return what ``parse`` makes of the body of a request. Raises as it, and as ``read_body``."""
        with self.account(exchange.caller.tenant_id) as hold:
            return await self.parse(parse, await read_body(exchange.headers, exchange.receive, limits, hold))

    async def parse(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Return the result of ``parse``, which runs in a thread unless the body is cheap.

        One at a time: decoding holds the interpreter lock, so several threads would stop the loop for the sum
        of their times.
        """
        if is_cheap(body):
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)


async def read_body(
    headers: Headers,
    receive: Receive,
    limits: HttpLimits,
    hold: Callable[[int], None],
    *,
    is_binary: bool = False,
) -> bytes:
    """Return the body, inflated. Raises HttpProblem before it exceeds the limit, or after the timeout.

    ``is_binary``: bytes may follow its JSON. ``hold`` is called with the size so far; an error
    that it raises ends the reading. Raises ClientDisconnected when the client disconnects in the middle.
    """
    content_type = headers.one(b"content-type")
    as_bytes = is_binary and content_type == b"application/octet-stream"
    if content_type is not None and not as_bytes and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise HttpProblem(415, "the content type must be application/json", close=True)
    encoding = (headers.one(b"content-encoding") or b"identity").strip().lower()
    if encoding != b"identity" and encoding not in ENCODINGS:
        raise HttpProblem(415, "of compressed bodies, only those in gzip are accepted", close=True)
    length = headers.one(b"content-length")
    if length is not None and (not _LENGTH.fullmatch(length) or int(length) > limits.max_body_bytes):
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_all(receive, limits, hold)
    except TimeoutError:
        raise HttpProblem(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s", close=True
        ) from None
    return body if encoding == b"identity" else await inflated(body, limits.max_body_bytes, hold)


async def _read_all(receive: Receive, limits: HttpLimits, hold: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        hold(size)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limits: HttpLimits) -> HttpProblem:
    return HttpProblem(413, f"the body is larger than {limits.max_body_bytes} bytes", close=True)


def offered_by(scope: Scope) -> Mapping[str, Any]:
    """Return what the connection offers to an exchange: empty on another server than HttpServer."""
    found: Mapping[str, Any] = scope.get("extensions", {}).get("fairway.connection", {})
    return found


def mark_authenticated(scope: Scope) -> None:
    """Protect the connection from eviction by other connections during this exchange. Needs HttpServer."""
    if (mark := offered_by(scope).get("authenticated")) is not None:
        mark()


def expect_body(scope: Scope, body_bytes: int, timeout_s: float) -> None:
    """Take a larger body of this authenticated exchange, for a longer time. Needs HttpServer."""
    if (expect := offered_by(scope).get("expect")) is not None:
        expect(body_bytes, timeout_s)


class Reply:
    """The answer of one exchange. Writes wait for the client: unread output is not produced."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        headers: list[Header],
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        error_body: Callable[[FairwayError], bytes] = error_body,
        error_event: str = "",
    ) -> None:
        """``error_event``: the name of the event that ends a stream with an error."""
        self._error_event = f"event: {error_event}\n".encode() if error_event else b""
        self._error_body = error_body
        self.started = False
        self.complete = False
        self.status = 0  # status of the answer; 0: it has not begun
        self._send = send
        self._headers = headers
        self._write_timeout_s = write_timeout_s
        # Other servers close the connection when the application ends.
        self._abort: Callable[[], None] | None = offered_by(scope).get("cut")
        self._accepted: Callable[[], int] = offered_by(scope).get("accepted", lambda: 0)
        self._until_close = False  # the stream has no frames
        # Called for an answer to HTTP/1.0, which has no chunks and so ends with the connection.
        self._unframed: Callable[[int], None] | None = offered_by(scope).get("unframed")

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the answer, which has not begun."""
        self._headers = [*self._headers, (name, value)]

    async def json(
        self,
        status: int,
        body: bytes,
        headers: Iterable[Header] = (),
        *,
        content_type: bytes = b"application/json",
    ) -> None:
        """Send a whole answer."""
        await self._start(
            status,
            [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                (b"cache-control", b"no-store"),
                *headers,
            ],
        )
        await self.write(body, last=True)

    async def error(self, error: FairwayError) -> None:
        """Send an error: the whole answer, or the last frame of a stream that has begun.

        The frame is not followed by ``[DONE]``: clients treat a stream that merely stops as complete.
        """
        if self.complete:
            return
        if self.started:
            frame = b"data: " + self._error_body(error) + b"\n\n"
            await self.write(self._error_event + frame, last=True)
        else:
            rates = rate_headers(error) if isinstance(error, OverQuota) else ()
            await self.json(status_of(error), self._error_body(error), [*error_headers(error), *rates])

    async def start_bytes(self, size_bytes: int, content_type: bytes) -> None:
        """Begin an answer of so many bytes, which ``write`` sends."""
        length = str(size_bytes).encode()
        await self._start(200, [(b"content-type", content_type), (b"content-length", length)])

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        self._until_close = self._unframed is not None
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache, no-store"),
                # Buffering reverse proxies would delay the first token.
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes; returns when the connection accepts more.

        Raises SlowReader, with the connection aborted, when it accepts none for the write timeout.
        """
        self.complete = self.complete or last
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})

    def abort(self) -> None:
        """Cut the connection: no error can be sent any more, and a plain end would mean success."""
        self.complete = True
        if self._abort is not None:
            self._abort()

    async def _put(self, message: dict[str, Any]) -> None:
        if self._until_close and self._unframed is not None:
            self._unframed(len(message.get("body", b"")))
        try:
            async with WriteLimit(self._write_timeout_s, self._accepted):
                await self._send(message)
        except TimeoutError:
            self.abort()
            raise SlowReader(f"the client read nothing for {self._write_timeout_s:g} s") from None

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.started, self.status = True, status
        await self._put(
            {"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]}
        )


async def unless_disconnected(receive: Receive, reply: Reply, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. A disconnection ends ``work``, then raises ClientDisconnected.

    The body must have been read: from then on the server reports only the end of the connection.
    """
    failure: BaseException | None = None
    watcher: asyncio.Task[None] | None = None
    try:
        async with TaskGroup() as group:
            watcher = group.create_task(_watch(receive, reply))
            try:
                return await work
            finally:
                watcher.cancel()
    except BaseExceptionGroup as failures:
        failure = primary_failure(failures)
    assert failure is not None
    try:
        raise failure  # outside of the handler: the group refers to it, so that both would stay
    finally:
        failure = watcher = None  # its traceback refers to this frame


async def _watch(receive: Receive, reply: Reply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # The server also reports the end of a complete answer in this way.
    if not reply.complete:
        raise ClientDisconnected


def primary_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The ClientDisconnected among them, if any: the others are its consequences; otherwise the first."""
    leaves: list[BaseException] = []
    groups: list[BaseExceptionGroup[BaseException]] = [failures]
    while groups:
        for found in groups.pop().exceptions:
            if isinstance(found, BaseExceptionGroup):
                groups.append(found)
            else:
                leaves.append(found)
    return next((leaf for leaf in leaves if isinstance(leaf, ClientDisconnected)), leaves[0])


class Access(StrEnum):
    PUBLIC = "public"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request inside a handler. ``principal`` is None on public routes."""

    scope: Scope
    receive: Receive
    reply: Reply
    headers: Headers
    received: Received
    principal: Principal | None

    @property
    def caller(self) -> Principal:
        assert self.principal is not None, "a public route has no caller"
        return self.principal

    @property
    def withdrawn(self) -> Callable[[], bool]:
        """Whether a client that left ends its request, though others could take it up."""
        found: Callable[[], bool] = offered_by(self.scope).get("withdrawn", never)
        return found


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """A route, its access rule, and what it takes and returns, for its description."""

    method: str
    path: str
    access: Access
    handler: Handler
    accepts: str
    # Writes its errors.
    error_body: Callable[[FairwayError], bytes] = error_body
    # The name of the event that ends a stream with an error; empty: it has no name.
    error_event: str = ""
    # What its body is read as, and what its answer and its errors are written from; None: not described.
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    # Media types of its body (none: it has no body) and of its answer, without events.
    takes: tuple[str, ...] = ()
    returns: tuple[str, ...] = (JSON,)
    # Fields of its query string; ``headers`` are the request headers that only some routes read.
    query: type[Struct] | None = None
    headers: tuple[str, ...] = ()
    error: type[Struct] | None = ErrorBody
    # Whether the answer may be server-sent events.
    streams: bool = False
