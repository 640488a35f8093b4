"""One HTTP route, its access rule, and a request on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec import Struct

from services.core.errors import FairwayError
from services.core.generation import Principal
from services.gateway.events import Received, never
from services.gateway.faces.openai.errors import ErrorBody, error_body
from services.gateway.faces.openai.exchange import Headers, Receive, Reply, Scope, offered_by

JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
BYTES: Final = "application/octet-stream"
# Request headers of routes that run something, and of those of them that stream.
RUN_HEADERS: Final = ("idempotency-key", "x-request-timeout-s", "x-session-key", "x-model-version")
STREAM_HEADERS: Final = ("last-event-id", *RUN_HEADERS)


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
