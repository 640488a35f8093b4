"""The routes of the Responses API: creating a response, and counting the tokens of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec
from msgspec import structs

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, IdempotencyConflict, InvalidInput
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.faces.openai.endpoint import JSON, STREAM_HEADERS, Access, ApiEndpoint, Exchange
from services.gateway.faces.openai.event_ids import HEADER
from services.gateway.faces.openai.event_stream import REPLAYED
from services.gateway.faces.openai.exchange import BodyReader, HttpLimits, read_body, unless_disconnected
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames
from services.gateway.faces.responses.background import (
    BackgroundResponses,
    answer_of,
    begun_response,
    response_id_of,
)
from services.gateway.faces.responses.conversations import Conversations, ModelNames, stored_items
from services.gateway.faces.responses.errors import responses_error
from services.gateway.faces.responses.requests import (
    ResponsesRequest,
    prompt_fields,
    responses_body,
    responses_request,
    tokens_request,
)
from services.gateway.faces.responses.retrievals import Retrievals
from services.gateway.faces.responses.types import (
    InputTokens,
    ModelResponse,
    PromptFields,
    ResponsesBody,
)
from services.gateway.faces.transport.answer_stream import GenerationStreams, add_headers, collect, relay
from services.gateway.faces.transport.event_numbers import EventNumbers, keyed_numbers
from services.gateway.responses.store import BegunResponse, ResponseStore, StoredResponse, begin_chunk
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

_encode: Final = msgspec.json.Encoder().encode


class ResponsesCalls(GenerationStreams, ModelNames, Protocol):
    """What the routes need of the service; raises the tree of ``core/errors.py``."""

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model."""


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """What keeps responses: their store, and the process's tasks, which include those in the background.

    ``remembered_s``: how long an idempotency key is remembered after its last write, at least.
    """

    store: ResponseStore
    supervisor: Supervisor
    new_incident: Callable[[], str]
    remembered_s: float


class ResponsesFace:
    """The handlers of the routes."""

    def __init__(
        self,
        service: ResponsesCalls,
        parts: ResponseParts,
        clock: Clock,
        limits: HttpLimits,
        bodies: BodyReader,
        event_secret: bytes,
    ) -> None:
        """``event_secret`` keys the ids of events; the same on every gateway."""
        self._event_secret = event_secret
        self._service = service
        self._store = parts.store
        self._clock = clock
        self._limits = limits
        self._bodies = bodies
        self._conversations = Conversations(service, parts.store, limits.max_body_bytes)
        self._background = BackgroundResponses(
            service,
            parts.store,
            clock,
            parts.supervisor,
            new_incident=parts.new_incident,
            remembered_s=parts.remembered_s,
        )
        self._retrievals = Retrievals(
            service, parts.store, self._conversations, self._background, clock, limits
        )

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        return (
            ApiEndpoint(
                "POST",
                "/v1/responses",
                Access.TENANT,
                self.create,
                "a request of OpenAI's Responses API; `stream: true` returns its events",
                error_body=responses_error,
                error_event="error",
                body=ResponsesBody,
                takes=(JSON,),
                headers=STREAM_HEADERS,
                answer=ModelResponse,
                streams=True,
            ),
            ApiEndpoint(
                "POST",
                "/v1/responses/input_tokens",
                Access.TENANT,
                self.count,
                "what decides the prompt of such a request; returns its tokens",
                error_body=responses_error,
                body=PromptFields,
                takes=(JSON,),
                answer=InputTokens,
            ),
            *self._retrievals.endpoints(),
        )

    async def create(self, exchange: Exchange) -> None:
        timeout_s = exchange.headers.timeout_s()
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            data = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            body = await self._bodies.parse(responses_body, data)
            earlier = await self._conversations.earlier(exchange.caller, body.previous_response_id)
            hold(len(data) + len(earlier))
            request = await self._bodies.parse(partial(responses_request, body), earlier)
            del data, earlier
        exchange.headers.apply_to(request.generation)
        if body.background:
            if exchange.headers.last_event_id():
                raise InvalidInput(
                    "a response in the background continues by GET of it, with stream=true", field=HEADER
                )
            if timeout_s is not None:
                raise InvalidInput(
                    "x-request-timeout-s: a response in the background has no deadline; cancel it instead",
                    field="x-request-timeout-s",
                )
            await unless_disconnected(
                exchange.receive, exchange.reply, self._begin(exchange, request, bool(body.stream))
            )
            return
        numbers = keyed_numbers(exchange, self._event_secret, "responses", stream=bool(body.stream))
        frames = self._frames(exchange, request, numbers)
        source = self._service.stream(
            exchange.caller,
            request.generation,
            received=structs.replace(exchange.received, delivered=numbers.delivered),
            timeout_s=timeout_s,
            withdraws=exchange.withdrawn,
        )
        if body.stream:
            due_s = exchange.received.monotonic_s + self._limits.status_wait_s
            work = relay(source, frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
            await unless_disconnected(exchange.receive, exchange.reply, work)
            return
        accepted = await unless_disconnected(exchange.receive, exchange.reply, collect(source, frames))
        add_headers(exchange.reply, accepted)
        await exchange.reply.json(200, _encode(frames.response))

    async def count(self, exchange: Exchange) -> None:
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            data = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            body = await self._bodies.parse(prompt_fields, data)
            earlier = await self._conversations.earlier(exchange.caller, body.previous_response_id)
            hold(len(data) + len(earlier))
            request = await self._bodies.parse(partial(tokens_request, body), earlier)
        work = self._service.count_tokens(exchange.caller, request)
        _, tokens = await unless_disconnected(exchange.receive, exchange.reply, work)
        await exchange.reply.json(200, _encode(InputTokens(tokens)))

    def _frames(self, exchange: Exchange, request: ResponsesRequest, numbers: EventNumbers) -> ResponseFrames:
        """Return the frames of a response that ends with its client, and that is stored at its end."""
        tenant_id = exchange.caller.tenant_id
        if request.head.store:  # raises before anything runs
            begin_chunk(self._begun(request, exchange.received.request_id, request.head))

        async def keep(response: ModelResponse) -> bool:
            begun = structs.replace(response, output=[], usage=None, status="in_progress")
            request_id = response.id.removeprefix(response_id_of(""))
            stored = self._begun(request, request_id, begun)
            return await self._store.keep(tenant_id, response.id, stored, answer_of(response))

        return ResponseFrames(
            request.head,
            request_id=exchange.received.request_id,
            keep=keep,
            events=ResponseEvents(numbers),
            now_s=self._clock.unix_s,
        )

    def _begun(self, request: ResponsesRequest, request_id: str, head: ModelResponse) -> BegunResponse:
        return BegunResponse(
            request_id,
            request.generation.model,
            request.head.previous_response_id or "",
            background=head.background,
            response=_encode(head),
            items=stored_items(request_id, request.items),
        )

    async def _begin(self, exchange: Exchange, request: ResponsesRequest, stream: bool) -> None:
        """Store a response, begin its run in the background, and answer once it is admitted."""
        tenant_id, key = exchange.caller.tenant_id, request.generation.idempotency_key
        request_id, digest = exchange.received.request_id, b""
        if key:
            request_id, digest = self._store.id_of_key(tenant_id, key), request.digest()
        request.generation.ClearField("idempotency_key")
        response_id = response_id_of(request_id)
        head = begun_response(response_id, request.head, int(self._clock.unix_s()))
        begun = structs.replace(
            self._begun(request, request_id, head),
            generation=request.generation.SerializeToString(deterministic=True),
            digest=digest,
        )
        found = await self._store.begin(tenant_id, response_id, begun)
        if found is not None:
            if found.begun.digest != digest:
                raise IdempotencyConflict(
                    "this idempotency key was used for another request; take a new key for a new request",
                    field="idempotency_key",
                )
            exchange.reply.add_header(*REPLAYED)
            await self._retrievals.answer(exchange, response_id, found, stream=stream)
            return
        await self._admitted(exchange.caller, response_id, begun)
        await self._retrievals.answer(
            exchange, response_id, StoredResponse(begun, None), stream=stream, queued=True
        )

    async def _admitted(self, principal: Principal, response_id: str, begun: BegunResponse) -> None:
        """Return once the run is admitted. What is refused is not stored."""
        try:
            run = self._background.drive(principal, response_id, begun, is_new=True)
            await run.accepted.wait()
            if run.failure is not None:
                raise run.failure
        except FairwayError:
            self._background.stop(principal.tenant_id, response_id)
            await self._store.delete(principal.tenant_id, response_id)
            raise
