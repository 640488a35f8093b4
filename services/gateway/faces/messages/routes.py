"""The routes of the Anthropic Messages API."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from fairway.v1 import inference_pb2
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.faces.messages.answers import MessageFrames
from services.gateway.faces.messages.errors import messages_error
from services.gateway.faces.messages.requests import count_request, messages_request
from services.gateway.faces.messages.types import (
    CountBody,
    Message,
    MessagesBody,
    MessagesErrorBody,
    TokensCount,
)
from services.gateway.faces.openai.endpoint import JSON, STREAM_HEADERS, Access, ApiEndpoint, Exchange
from services.gateway.faces.openai.exchange import BodyReader, HttpLimits, read_body, unless_disconnected
from services.gateway.faces.transport.answer_stream import GenerationStreams, add_headers, collect, relay
from services.gateway.faces.transport.event_numbers import keyed_numbers
from services.ports.clock import Clock

_VERSION: Final = ("anthropic-version",)
_encode: Final = msgspec.json.Encoder().encode


class MessagesCalls(GenerationStreams, Protocol):
    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        """Return the route and the number of tokens of the prompt for its model."""


class MessagesFace:
    """The handlers of the routes."""

    def __init__(
        self,
        service: MessagesCalls,
        clock: Clock,
        limits: HttpLimits,
        bodies: BodyReader,
        event_secret: bytes,
    ) -> None:
        """``event_secret`` keys the ids of events; the same on every gateway."""
        self._service = service
        self._clock = clock
        self._limits = limits
        self._bodies = bodies
        self._event_secret = event_secret

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        return (
            ApiEndpoint(
                "POST",
                "/v1/messages",
                Access.TENANT,
                self.create,
                "a request of Anthropic's Messages API; `stream: true` returns its events",
                error_body=messages_error,
                error_event="error",
                body=MessagesBody,
                takes=(JSON,),
                headers=(*STREAM_HEADERS, *_VERSION),
                answer=Message,
                error=MessagesErrorBody,
                streams=True,
            ),
            ApiEndpoint(
                "POST",
                "/v1/messages/count_tokens",
                Access.TENANT,
                self.count,
                "what decides the prompt of such a request; returns its tokens",
                error_body=messages_error,
                body=CountBody,
                takes=(JSON,),
                headers=_VERSION,
                answer=TokensCount,
                error=MessagesErrorBody,
            ),
        )

    async def create(self, exchange: Exchange) -> None:
        _add_request_id(exchange)
        timeout_s = exchange.headers.timeout_s()
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            body = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            request = await self._bodies.parse(messages_request, body)
            del body
        generation = request.generations[0]
        exchange.headers.apply_to(generation)
        numbers = keyed_numbers(exchange, self._event_secret, "messages", stream=request.stream)
        frames = MessageFrames(exchange.received.request_id, numbers)
        source = self._service.stream(
            exchange.caller,
            generation,
            received=replace(exchange.received, delivered=numbers.delivered),
            timeout_s=timeout_s,
            withdraws=exchange.withdrawn,
        )
        if request.stream:
            due_s = exchange.received.monotonic_s + self._limits.status_wait_s
            work = relay(source, frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
            await unless_disconnected(exchange.receive, exchange.reply, work)
            return
        accepted = await unless_disconnected(exchange.receive, exchange.reply, collect(source, frames))
        add_headers(exchange.reply, accepted)
        await exchange.reply.json(200, _encode(frames.message()))

    async def count(self, exchange: Exchange) -> None:
        _add_request_id(exchange)
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            body = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            request = await self._bodies.parse(count_request, body)
        work = self._service.count_tokens(exchange.caller, request)
        _, tokens = await unless_disconnected(exchange.receive, exchange.reply, work)
        await exchange.reply.json(200, _encode(TokensCount(tokens)))


def _add_request_id(exchange: Exchange) -> None:
    """Name the request where Anthropic's clients look for it."""
    exchange.reply.add_header(b"request-id", exchange.received.request_id.encode())
