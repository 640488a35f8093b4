"""The routes of stored responses: retrieving them, whole or as a stream, cancelling and deleting them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Raw, structs
from msgspec.structs import replace

from fairway.task_group import TaskGroup
from services.core.errors import FairwayError, InvalidInput, NotFound
from services.gateway.faces.openai.endpoint import Access, ApiEndpoint, Exchange
from services.gateway.faces.openai.exchange import HttpLimits, Reply, primary_failure, unless_disconnected
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames, replayed
from services.gateway.faces.responses.background import (
    BackgroundResponses,
    BackgroundRun,
    answer_of,
    generation_of,
    response_of,
)
from services.gateway.faces.responses.conversations import Conversations, current
from services.gateway.faces.responses.errors import responses_error
from services.gateway.faces.responses.queries import ItemsQuery, StreamQuery, stream_query
from services.gateway.faces.responses.types import DeletedResponse, InputItems, ModelResponse
from services.gateway.faces.transport.answer_stream import GenerationStreams, relay
from services.gateway.faces.transport.event_numbers import EventNumbers
from services.gateway.faces.transport.queries import page_of, read_query
from services.gateway.responses.store import ResponseStore, StoredResponse
from services.ports.clock import Clock

# How long the last event of a stream waits for the response to be stored.
_STORED_S: Final = 5.0
_RETRY_S: Final = 1.0
_encode: Final = msgspec.json.Encoder().encode
_items: Final = msgspec.json.Decoder(list[Raw]).decode


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
                    await relay(source, frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
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
