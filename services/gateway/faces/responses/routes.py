"""The routes of the Responses API: creating a response, counting the tokens of its input, and those of stored
responses: retrieving them, whole or as a stream, cancelling and deleting them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta, Raw, Struct, field, structs
from msgspec.structs import replace

from fairway.task_group import TaskGroup
from services.core.errors import FairwayError, IdempotencyConflict, InvalidInput, NotFound
from services.core.generation import Principal
from services.gateway.events import Event
from services.gateway.faces.openai.errors import PARAMS, error_body
from services.gateway.faces.openai.exchange import (
    JSON,
    STREAM_HEADERS,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    HttpLimits,
    Reply,
    Scope,
    primary_failure,
    read_body,
    unless_disconnected,
)
from services.gateway.faces.openai.types import About
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames, replayed
from services.gateway.faces.responses.background import (
    BackgroundResponses,
    BackgroundRun,
    ResponseParts,
    answer_of,
    begun_response,
    generation_of,
    response_id_of,
    response_of,
)
from services.gateway.faces.responses.conversations import Conversations, ModelNames, current, stored_items
from services.gateway.faces.responses.requests import (
    ResponsesRequest,
    prompt_fields,
    responses_body,
    responses_request,
    tokens_request,
)
from services.gateway.faces.responses.types import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ModelResponse,
    PromptFields,
    ResponsesBody,
)
from services.gateway.faces.transport.event_ids import HEADER, EventNumbers, keyed_numbers
from services.gateway.faces.transport.event_stream import (
    REPLAYED,
    CountedStreams,
    EventStream,
    GenerationStreams,
    answer_headers,
    collect,
)
from services.gateway.faces.transport.queries import OrderedQuery, page_of, query_number, read_query
from services.gateway.responses.store import BegunResponse, ResponseStore, StoredResponse, begin_chunk
from services.ports.clock import Clock

# Fields of chat completions and of fairway.v1 with another name in this dialect; the first that fits.
NAMES: Final = (
    ("chat.messages", "input"),
    ("messages", "input"),
    ("chat.tools", "tools"),
    ("max_output_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("sampling.constraint", "text.format"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    *PARAMS,
)
_MAX_NUMBER = 2**53 - 1
# How long the last event of a stream waits for the response to be stored.
_STORED_S: Final = 5.0
_RETRY_S: Final = 1.0
_encode: Final = msgspec.json.Encoder().encode
_items: Final = msgspec.json.Decoder(list[Raw]).decode


def responses_error(error: FairwayError) -> bytes:
    """Return the JSON of an error."""
    return error_body(error, NAMES)


class StreamQuery(Struct, frozen=True, kw_only=True):
    """How a response is retrieved: whole, or as a stream of the events beyond a number."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=_MAX_NUMBER)] | None = None
    include: Annotated[str | None, About("No effect.")] = None
    included: Annotated[str | None, About("No effect.")] = field(default=None, name="include[]")
    include_obfuscation: Annotated[bool | None, About("No effect.")] = None


class ItemsQuery(OrderedQuery, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    include: Annotated[str | None, About("No effect.")] = None
    included: Annotated[str | None, About("No effect.")] = field(default=None, name="include[]")


def stream_query(scope: Scope, last_event_id: str) -> tuple[bool, int]:
    """Return whether a response is retrieved as a stream, and beyond which number. Raises InvalidInput.

    ``last_event_id``: the header that a client of server-sent events sends; the number is the id.
    """
    found = read_query(scope, StreamQuery)
    if found.starting_after is not None:
        if not found.stream:
            raise InvalidInput("starting_after needs stream=true", field="starting_after")
        return True, found.starting_after
    return found.stream, query_number(last_event_id, "last-event-id") if last_event_id else -1


class _ItemId(msgspec.Struct):
    id: str


_item_id: Final = msgspec.json.Decoder(_ItemId).decode


class _Stopped(Exception):
    """The response was cancelled, or deleted: then None is stored."""

    def __init__(self, stored: StoredResponse | None) -> None:
        super().__init__()
        self.stored = stored


class Retrievals:
    """The handlers of the routes."""

    def __init__(
        self,
        service: GenerationStreams,
        store: ResponseStore,
        conversations: Conversations,
        background: BackgroundResponses,
        clock: Clock,
        limits: HttpLimits,
    ) -> None:
        self._service = service
        self._store = store
        self._conversations = conversations
        self._background = background
        self._clock = clock
        self._limits = limits

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        path = "/v1/responses/{response_id}"
        common: dict[str, Any] = {"error_body": responses_error}
        return (
            ApiEndpoint(
                "GET",
                path,
                Access.TENANT,
                self.retrieve,
                "the id of a response; `?stream=true&starting_after=N` returns its events beyond N",
                answer=ModelResponse,
                streams=True,
                error_event="error",
                query=StreamQuery,
                headers=("last-event-id",),
                **common,
            ),
            ApiEndpoint(
                "DELETE",
                path,
                Access.TENANT,
                self.delete,
                "the id of a response; one that runs ends",
                answer=DeletedResponse,
                **common,
            ),
            ApiEndpoint(
                "POST",
                f"{path}/cancel",
                Access.TENANT,
                self.cancel,
                "no body; the id of a response in the background",
                answer=ModelResponse,
                **common,
            ),
            ApiEndpoint(
                "GET",
                f"{path}/input_items",
                Access.TENANT,
                self.items,
                "the id of a response; `?limit=&order=&after=` pages through its input",
                answer=InputItems,
                query=ItemsQuery,
                **common,
            ),
        )

    async def retrieve(self, exchange: Exchange) -> None:
        stream, after = stream_query(exchange.scope, exchange.headers.last_event_id())
        response_id = _id_of(exchange)
        stored = await self._conversations.find(exchange.caller, response_id)
        work = self.answer(exchange, response_id, stored, stream=stream, after=after)
        await unless_disconnected(exchange.receive, exchange.reply, work)

    async def answer(
        self,
        exchange: Exchange,
        response_id: str,
        stored: StoredResponse,
        *,
        stream: bool,
        after: int = -1,
        queued: bool = False,
    ) -> None:
        """Answer with a stored response as it is, or stream it to its end. A run without a gateway has one
        then.

        ``queued``: it has just begun.
        """
        run = None
        if stored.answer is None:
            run = self._driven(exchange, response_id, stored)
        if not stream:
            response = response_of(stored.begun.response) if queued else current(stored)
            await exchange.reply.json(200, _encode(response))
        elif stored.answer is not None:
            await exchange.reply.start_events()
            events = ResponseEvents(EventNumbers(after=after, with_ids=True))
            await exchange.reply.write(replayed(current(stored), events), last=True)
        else:
            await self._follow(exchange, response_id, stored, run, after)

    async def delete(self, exchange: Exchange) -> None:
        response_id, tenant_id = _id_of(exchange), exchange.caller.tenant_id
        await self._conversations.find(exchange.caller, response_id)
        if not await self._store.delete(tenant_id, response_id):
            raise NotFound("response_id: the response was deleted meanwhile", field="response_id")
        self._background.stop(tenant_id, response_id)
        await exchange.reply.json(200, _encode(DeletedResponse(response_id)))

    async def cancel(self, exchange: Exchange) -> None:
        response_id, tenant_id = _id_of(exchange), exchange.caller.tenant_id
        stored = await self._conversations.find(exchange.caller, response_id)
        if not stored.begun.background:
            raise InvalidInput("only a response in the background can be cancelled", field="response_id")
        if stored.answer is None:
            cancelled = structs.replace(current(stored), status="cancelled")
            if await self._store.end(tenant_id, response_id, answer_of(cancelled)):
                self._background.stop(tenant_id, response_id)
            stored = await self._conversations.find(exchange.caller, response_id)
        await exchange.reply.json(200, _encode(current(stored)))

    async def items(self, exchange: Exchange) -> None:
        query = read_query(exchange.scope, ItemsQuery)
        stored = await self._conversations.find(exchange.caller, _id_of(exchange))
        await exchange.reply.json(200, _encode(_page(_items(stored.begun.items), query)))

    def _driven(self, exchange: Exchange, response_id: str, stored: StoredResponse) -> BackgroundRun | None:
        """Return the run of a response; this gateway drives it if it may drive another one."""
        try:
            return self._background.drive(exchange.caller, response_id, stored.begun, is_new=False)
        except FairwayError:
            return None

    async def _follow(
        self,
        exchange: Exchange,
        response_id: str,
        stored: StoredResponse,
        run: BackgroundRun | None,
        after: int,
    ) -> None:
        """Stream a response that runs. Its last event follows once it is stored, or was cancelled."""
        tenant_id = exchange.caller.tenant_id

        async def keep(response: ModelResponse) -> bool:
            if run is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_STORED_S):
                        await run.over.wait()
            return True

        generation = generation_of(response_id, stored.begun)
        events = ResponseEvents(EventNumbers(after=after, with_ids=True))
        frames = ResponseFrames(
            response_of(stored.begun.response),
            request_id=stored.begun.request_id,
            keep=keep,
            events=events,
            now_s=self._clock.unix_s,
        )
        received = replace(exchange.received, internal=True)
        # A client that leaves ends nothing: the run's driver follows it too.
        source = self._service.stream(
            exchange.caller, generation, received=received, withdraws=lambda: run is not None
        )
        due_s = exchange.received.monotonic_s + self._limits.status_wait_s
        try:
            async with TaskGroup() as group:
                watcher = group.create_task(self._watch(run or BackgroundRun(), tenant_id, response_id))
                try:
                    await _relay(source, frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
                finally:
                    watcher.cancel()
        except BaseExceptionGroup as failures:
            error = primary_failure(failures)
            if not isinstance(error, _Stopped):
                raise error from None
            await _end(exchange.reply, error.stored, frames, events, after)

    async def _watch(self, run: BackgroundRun, tenant_id: str, response_id: str) -> None:
        """Raise _Stopped once the response was cancelled or deleted; return once it has another end."""
        await self._background.until_stopped(run, tenant_id, response_id)
        while True:
            try:
                stored = await self._store.find(tenant_id, response_id)
            except FairwayError:  # the store is unavailable
                await self._clock.sleep(_RETRY_S)
                continue
            if stored is None or current(stored).status == "cancelled":
                raise _Stopped(stored)
            return


async def _relay(
    source: AsyncGenerator[Event, None],
    frames: ResponseFrames,
    reply: Reply,
    status_due: Callable[[], bool],
) -> None:
    """Stream a response. An error ends it with an event that has the response as it is then."""
    try:
        await EventStream(frames, reply, status_due).run([source])
    except FairwayError as error:
        if not reply.started or reply.complete:
            raise
        await reply.write(frames.failed(error), last=True)


async def _end(
    reply: Reply, stored: StoredResponse | None, frames: ResponseFrames, events: ResponseEvents, after: int
) -> None:
    """End the stream of a response that was cancelled, or deleted: then None is stored."""
    if reply.complete:
        return
    if reply.started:
        deleted = NotFound("the response was deleted", field="response_id")
        last = frames.failed(deleted) if stored is None else events.end(current(stored))
        await reply.write(last, last=True)
    elif stored is None:
        raise NotFound("response_id: the response was deleted meanwhile", field="response_id")
    else:
        await reply.start_events()
        await reply.write(
            replayed(current(stored), ResponseEvents(EventNumbers(after=after, with_ids=True))), last=True
        )


def _id_of(exchange: Exchange) -> str:
    found: str = exchange.scope["path_params"]["response_id"]
    return found


def _page(items: list[Raw], query: ItemsQuery) -> InputItems:
    ordered = items[::-1] if query.order == "desc" else items
    page, more = page_of(ordered, _id_of_item, query)
    first, last = (_id_of_item(page[0]), _id_of_item(page[-1])) if page else (None, None)
    return InputItems(list(page), first, last, more)


def _id_of_item(item: Raw) -> str:
    return _item_id(bytes(item)).id


class ResponsesCalls(CountedStreams, ModelNames, Protocol):
    """What the routes need of the service; raises the tree of ``core/errors.py``."""


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
        self._background = BackgroundResponses(service, parts, clock)
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
            received=structs.replace(exchange.received, delivered=numbers.delivered()),
            timeout_s=timeout_s,
            withdraws=exchange.withdrawn,
        )
        if body.stream:
            due_s = exchange.received.monotonic_s + self._limits.status_wait_s
            work = _relay(source, frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
            await unless_disconnected(exchange.receive, exchange.reply, work)
            return
        accepted = await unless_disconnected(exchange.receive, exchange.reply, collect(source, frames))
        for header in answer_headers(accepted):
            exchange.reply.add_header(*header)
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
