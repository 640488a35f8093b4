"""The OpenAI HTTP API over the gateway's service. Every route has an access rule; no other path is reachable.

Authorisation uses only the route's rule and the authorization header, never a URL or host from the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
import structlog
from msgspec import structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from structlog.contextvars import bound_contextvars

from services.core.audit import Actor, AuditEntry
from services.core.errors import FairwayError, InternalError
from services.core.generation import Principal
from services.gateway.batches.service import BatchService
from services.gateway.events import Received
from services.gateway.faces.batches.routes import BatchesFace
from services.gateway.faces.description.document import with_description
from services.gateway.faces.messages.routes import MessagesFace
from services.gateway.faces.openai.answers import (
    ChatCompletion,
    ModelEntry,
    ModelList,
    TextCompletion,
)
from services.gateway.faces.openai.completions import (
    CompletionFrames,
    Completions,
    complete_all,
    numbered_parts,
    whole_body,
)
from services.gateway.faces.openai.errors import NOT_PRINTABLE, Header, HttpProblem, error_body, named
from services.gateway.faces.openai.exchange import (
    JSON,
    REQUEST_HEADERS,
    STREAM_HEADERS,
    Access,
    ApiEndpoint,
    BodyReader,
    ClientDisconnected,
    Exchange,
    Headers,
    HttpLimits,
    Receive,
    Reply,
    Scope,
    Send,
    mark_authenticated,
    offered_by,
    rate_headers,
    unless_disconnected,
)
from services.gateway.faces.openai.moderations import ModerationsFace
from services.gateway.faces.openai.requests import ApiRequest, chat_request, completion_request
from services.gateway.faces.openai.rows import RowsFace
from services.gateway.faces.openai.server import SpelledPath, cross_origin, model_of
from services.gateway.faces.openai.tokens import TokenCalls, TokensFace
from services.gateway.faces.openai.types import ChatBody, CompletionBody
from services.gateway.faces.predict.routes import PredictFace
from services.gateway.faces.responses.background import ResponseParts
from services.gateway.faces.responses.routes import ResponsesCalls, ResponsesFace
from services.gateway.faces.sockets.face import PATH as SOCKET_PATH
from services.gateway.faces.sockets.face import SocketFace, SocketRules
from services.gateway.faces.transport.event_ids import AnswerPosition, event_id_of
from services.gateway.faces.transport.event_stream import (
    CACHE_HIT,
    REPLAYED,
    EventStream,
    degraded_header,
    version_headers,
)
from services.gateway.rows.service import RowsService
from services.gateway.safety.moderation import ModerationCalls, Moderations
from services.gateway.service import ServedModel
from services.ports.clock import Clock
from services.runtime.audit import AuditRecorder
from services.runtime.connections import source_of
from services.runtime.identity import model_not_found, require_tenant
from services.runtime.process.product import product_version
from services.runtime.process.tenant_turns import LoopTurns, run_as
from services.runtime.secrets import claimed_key

log = structlog.get_logger()
_encode: Final = msgspec.json.Encoder().encode
_MAX_NAMED_PATH: Final = 128
T = TypeVar("T")


class Generations(TokenCalls, Completions, ResponsesCalls, ModerationCalls, Protocol):
    """Whole requests: validates, admits, places and streams; raises the tree of ``core/errors.py``."""

    async def list_models(self, principal: Principal) -> Sequence[ServedModel]:
        """Return the models that the caller may use, by name."""


class Authenticator(Protocol):
    def authenticate(self, credentials: str | None) -> Principal:
        """Return the principal of an authorization header's key. Raises Unauthenticated."""


class IdSource(Protocol):
    def request_id(self) -> str: ...

    def incident_id(self) -> str: ...


# Route, status of the answer (0 without an answer) and seconds.
ObserveExchange = Callable[[str, int, float], None]


def build_app(
    service: Generations,
    rows: RowsService,
    batches: BatchService,
    identity: Authenticator,
    clock: Clock,
    ids: IdSource,
    responses: ResponseParts,
    *,
    event_secret: bytes,
    limits: HttpLimits,
    not_ready: Callable[[], str] = lambda: "",
    observe: ObserveExchange = lambda _route, _status, _elapsed_s: None,
    cors_origins: Sequence[str] = (),
    audit: AuditRecorder | None = None,
) -> Starlette:
    """Return the ASGI application.

    ``event_secret`` keys the ids of events; the same on every gateway. ``not_ready`` returns why no traffic
    should arrive now, or an empty text. ``observe`` is called for each exchange when it is over. Web pages
    of ``cors_origins`` may call the server. The endpoints with their rules are in ``app.state.endpoints``.
    ``audit`` records refused callers.
    """
    bodies = BodyReader(limits.max_body_bytes)
    endpoints = endpoints_of(
        service, rows, batches, clock, limits, not_ready, event_secret, responses, bodies=bodies
    )
    problems = _Problems(ids)
    callers = _Callers(identity, audit)
    guards = [_Guard(endpoint, callers, clock, ids, limits, observe) for endpoint in endpoints]
    sockets = SocketFace(
        {
            each.path: guard
            for each, guard in zip(endpoints, guards, strict=True)
            if each.streams and each.method == "POST"
        },
        SocketRules(partial(callers.tenant, f"GET {SOCKET_PATH}"), ids.request_id, cors_origins, limits),
        bodies,
    )
    app = Starlette(
        routes=[
            WebSocketRoute(SOCKET_PATH, sockets),
            *(
                Route(endpoint.path, guard, methods=[endpoint.method])
                for endpoint, guard in zip(endpoints, guards, strict=True)
            ),
        ],
        exception_handlers={HTTPException: problems.answer},
        middleware=[*cross_origin(cors_origins), Middleware(SpelledPath)],
    )
    # A redirect would use the Host header, which the client controls.
    app.router.redirect_slashes = False
    app.state.endpoints = endpoints
    return app


def endpoints_of(
    service: Generations,
    rows: RowsService,
    batches: BatchService,
    clock: Clock,
    limits: HttpLimits,
    not_ready: Callable[[], str],
    event_secret: bytes,
    responses: ResponseParts,
    *,
    bodies: BodyReader,
) -> tuple[ApiEndpoint, ...]:
    """Return every route of the server, of all its APIs. They share the bounds of bodies."""
    endpoints = (
        *OpenAiFace(service, clock, limits, bodies, not_ready, event_secret).endpoints(),
        *TokensFace(service, limits, bodies).endpoints(),
        *ModerationsFace(Moderations(service), limits, bodies).endpoints(),
        *RowsFace(rows, clock, limits, bodies).endpoints(),
        *ResponsesFace(service, responses, clock, limits, bodies, event_secret).endpoints(),
        *MessagesFace(service, clock, limits, bodies, event_secret).endpoints(),
        *BatchesFace(batches, limits, bodies).endpoints(),
        *PredictFace(rows, limits, bodies, not_ready).endpoints(),
    )
    return with_description(endpoints, REQUEST_HEADERS)


class OpenAiFace:
    """The handlers of the routes."""

    def __init__(
        self,
        service: Generations,
        clock: Clock,
        limits: HttpLimits,
        bodies: BodyReader,
        not_ready: Callable[[], str],
        event_secret: bytes,
    ) -> None:
        self._event_secret = event_secret
        self._limits = limits
        self._service = service
        self._clock = clock
        self._not_ready = not_ready
        self._bodies = bodies
        self._answers = LoopTurns(1)

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        return (
            ApiEndpoint(
                "POST",
                "/v1/chat/completions",
                Access.TENANT,
                self.chat,
                "a chat request; `stream: true` returns server-sent events",
                body=ChatBody,
                takes=(JSON,),
                headers=(*STREAM_HEADERS, "x-stage-clock"),
                answer=ChatCompletion,
                streams=True,
            ),
            ApiEndpoint(
                "POST",
                "/v1/completions",
                Access.TENANT,
                self.completions,
                "a completion request, streamed likewise",
                body=CompletionBody,
                takes=(JSON,),
                headers=(*STREAM_HEADERS, "x-stage-clock"),
                answer=TextCompletion,
                streams=True,
            ),
            ApiEndpoint(
                "GET",
                "/v1/models",
                Access.TENANT,
                self.models,
                "no body; lists the models of the key",
                answer=ModelList,
            ),
            ApiEndpoint(
                "GET",
                "/v1/models/{model:path}",
                Access.TENANT,
                self.model,
                "the name of a model",
                answer=ModelEntry,
            ),
            ApiEndpoint(
                "GET", "/healthz", Access.PUBLIC, self.healthy, "no body; 200 while the process runs"
            ),
            ApiEndpoint("GET", "/readyz", Access.PUBLIC, self.ready, "no body; 200, or 503 with the reason"),
            ApiEndpoint("GET", "/health", Access.PUBLIC, self.ready, "the same, where vLLM's clients look"),
            ApiEndpoint(
                "GET",
                SOCKET_PATH,
                Access.TENANT,
                self.socket,
                "the handshake of a WebSocket ([messages](../streaming.md#websocket)); without one 426",
                returns=(),
            ),
            ApiEndpoint("GET", "/version", Access.TENANT, self.version, "no body; the version of the server"),
        )

    async def chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, chat_request)

    async def completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, completion_request)

    async def models(self, exchange: Exchange) -> None:
        served = await self._service.list_models(exchange.caller)
        data = [_model(entry) for entry in served]
        await exchange.reply.json(200, _encode(ModelList(data)))

    async def model(self, exchange: Exchange) -> None:
        name = model_of(exchange.scope)
        served = await self._service.list_models(exchange.caller)
        for entry in served:
            if entry.name == name:
                await exchange.reply.json(200, _encode(_model(entry)))
                return
        raise model_not_found(name, (entry.name for entry in served))

    async def healthy(self, exchange: Exchange) -> None:
        await exchange.reply.json(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        reason = self._not_ready()
        await exchange.reply.json(503 if reason else 200, _encode({"status": reason or "ready"}))

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply.json(200, _encode({"version": product_version()}))

    async def socket(self, exchange: Exchange) -> None:
        """Answer what is no handshake: those do not arrive here."""
        exchange.reply.add_header(b"upgrade", b"websocket")
        raise HttpProblem(426, "open a WebSocket at this path", close=True)

    async def _generate(self, exchange: Exchange, parse: Callable[[bytes], ApiRequest]) -> None:
        timeout_s, key = exchange.headers.timeout_s(), exchange.headers.idempotency_key()
        stage_clock = exchange.headers.wants_stage_clock()
        request = replace(await self._bodies.read(exchange, self._limits, parse), stage_clock=stage_clock)
        for generation in request.generations:
            exchange.headers.apply_to(generation)
        event_id = event_id_of(exchange, key, stream=request.stream)
        names = request.names.items()
        if request.stream:
            work = self._stream(exchange, request, timeout_s, event_id)
            await named(names, unless_disconnected(exchange.receive, exchange.reply, work))
            return
        whole = complete_all(
            self._service,
            exchange.caller,
            request,
            exchange.received,
            timeout_s,
            withdraws=exchange.withdrawn,
        )
        completions = await named(names, unless_disconnected(exchange.receive, exchange.reply, whole))
        if completions[0].accepted.replayed:
            exchange.reply.add_header(*REPLAYED)
        if all(completion.accepted.cached for completion in completions):
            exchange.reply.add_header(*CACHE_HIT)
        degraded = [found for one in completions for found in one.accepted.degradations]
        if degraded:
            exchange.reply.add_header(*degraded_header(degraded))
        accepted = completions[-1].accepted
        for header in (*version_headers(accepted), *rate_headers(accepted)):
            exchange.reply.add_header(*header)
        steps = whole_body(request, completions, exchange.received, int(self._clock.unix_s()))
        body = await self._answers.run(exchange.caller.tenant_id, steps)
        await exchange.reply.json(200, body)

    async def _stream(
        self, exchange: Exchange, request: ApiRequest, timeout_s: float | None, event_id: str
    ) -> None:
        position = AnswerPosition(request, self._event_secret, exchange.caller.tenant_id, event_id)
        now_unix_s = int(self._clock.unix_s())
        frames = CompletionFrames(request, exchange.reply, position, exchange.received, now_unix_s)
        due_s = exchange.received.monotonic_s + self._limits.status_wait_s
        parts = numbered_parts(exchange.received, request)
        sources = [
            self._service.stream(
                exchange.caller,
                generation,
                received=structs.replace(received, delivered=position.delivered(number)),
                timeout_s=timeout_s,
                withdraws=exchange.withdrawn,
            )
            for number, (generation, received) in enumerate(zip(request.generations, parts, strict=True))
        ]
        await EventStream(frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s).run(sources)


def _model(entry: ServedModel) -> ModelEntry:
    return ModelEntry(entry.name, entry.created_unix_s, entry.max_context_tokens)


class _Guard:
    """The ASGI application of one endpoint: authenticates, authorises, and turns errors into answers."""

    def __init__(
        self,
        endpoint: ApiEndpoint,
        callers: _Callers,
        clock: Clock,
        ids: IdSource,
        limits: HttpLimits,
        observe: ObserveExchange,
    ) -> None:
        self._observe = observe
        self._endpoint = endpoint
        self._callers = callers
        self._clock = clock
        self._ids = ids
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope)
        received = Received(
            self._clock.monotonic_s(),
            int(self._clock.unix_s() * 1e6),
            self._ids.request_id(),
            face=offered_by(scope).get("face", "http"),
            traceparent=headers.traceparent(),
            attempt=headers.attempt(),
        )
        client_id = headers.client_request_id()
        own: list[Header] = [(b"x-request-id", received.request_id.encode())]
        if client_id is not None:
            own.append((b"x-client-request-id", client_id))
        reply = Reply(
            scope,
            send,
            own,
            write_timeout_s=self._limits.write_timeout_s,
            error_body=self._endpoint.error_body,
            error_event=self._endpoint.error_event,
        )
        with bound_contextvars(
            method=f"{self._endpoint.method} {self._endpoint.path}",
            request_id=received.request_id,
            client_request_id=client_id.decode() if client_id is not None else "",
        ):
            try:
                await self._answer(Exchange(scope, receive, reply, headers, received, None))
            finally:
                elapsed_s = self._clock.monotonic_s() - received.monotonic_s
                self._observe(self._endpoint.path, reply.status, elapsed_s)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            try:
                await self._endpoint.handler(self._authorised(exchange))
            except FairwayError as error:
                log.info("http.rejected", reason=error.reason)
                await exchange.reply.error(error)
            except ClientDisconnected:
                log.info("http.client_left")
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException:  # a panic in a native library is no Exception
                incident = self._ids.incident_id()
                log.exception("http.crashed", incident=incident)
                await exchange.reply.error(InternalError("internal error", incident=incident))
        except FairwayError as error:  # sending the error failed
            log.info("http.answer_lost", reason=error.reason)

    def _authorised(self, exchange: Exchange) -> Exchange:
        if self._endpoint.access is Access.PUBLIC:
            return exchange
        route = f"{self._endpoint.method} {self._endpoint.path}"
        principal = self._callers.tenant(route, exchange.headers.credentials(), exchange.scope)
        mark_authenticated(exchange.scope)
        run_as(principal.tenant_id)
        return replace(exchange, principal=principal)


@dataclass(frozen=True, slots=True)
class _Callers:
    identity: Authenticator
    audit: AuditRecorder | None

    def tenant(self, route: str, credentials: str | None, scope: Scope) -> Principal:
        """Return the tenant's principal. Raises Unauthenticated, PermissionDenied."""
        try:
            principal = self.identity.authenticate(credentials)
            require_tenant(principal)
        except FairwayError as error:
            if self.audit is not None:
                actor = Actor(claimed_key(credentials), address=source_of(scope.get("client")))
                self.audit.add(AuditEntry(route, actor, outcome=error.reason))
            raise
        return principal


class _Problems:
    """Answers requests that the router rejects, in the API's error shape."""

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids

    async def answer(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        path = NOT_PRINTABLE.sub("?", request.scope["path"][:_MAX_NAMED_PATH])
        texts = {
            404: f"there is nothing at the path {path}",
            405: f"the path {path} does not take the method {request.method}",
        }
        text = texts.get(exc.status_code, "the request cannot be answered")
        headers: dict[str, Any] = dict(exc.headers or {})
        headers["x-request-id"] = self._ids.request_id()
        body = error_body(HttpProblem(exc.status_code, text))
        return Response(body, exc.status_code, headers, "application/json")
