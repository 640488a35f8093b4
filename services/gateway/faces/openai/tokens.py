"""The routes of vLLM that tokenise: a prompt or a conversation to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, Struct

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput
from services.core.generation import Principal
from services.gateway.catalog import Route
from services.gateway.faces.openai.exchange import (
    JSON,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    HttpLimits,
    unless_disconnected,
)
from services.gateway.faces.openai.requests import offer, set_chat
from services.gateway.faces.openai.types import ChatTurn, OfferedTool, UInt32, Unserved, parse_body

_encode: Final = msgspec.json.Encoder().encode


class TokenizeBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    model: str
    prompt: str | None = None
    messages: list[ChatTurn] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[OfferedTool] | None = None

    add_special_tokens: Unserved = UNSET
    add_generation_prompt: Unserved = UNSET
    continue_final_message: Unserved = UNSET
    return_token_strs: Unserved = UNSET
    chat_template: Unserved = UNSET
    mm_processor_kwargs: Unserved = UNSET


class DetokenizeBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    model: str
    tokens: list[UInt32]


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: None = None


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


class TokenCalls(Protocol):
    """What the routes need of the service; raises the tree of ``core/errors.py``."""

    async def token_ids(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, Sequence[int]]:
        """Return the route and the token ids of an input, within the model's context."""

    async def text_of(self, principal: Principal, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids of a model."""

    def max_context_tokens(self, route: Route) -> int: ...


class TokensFace:
    """The handlers of the routes."""

    def __init__(self, service: TokenCalls, limits: HttpLimits, bodies: BodyReader) -> None:
        self._service = service
        self._limits = limits
        self._bodies = bodies

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        tenant = Access.TENANT
        return (
            ApiEndpoint(
                "POST",
                "/tokenize",
                tenant,
                self.tokenize,
                "a prompt or messages; returns token ids",
                takes=(JSON,),
                body=TokenizeBody,
                answer=TokenizeAnswer,
            ),
            ApiEndpoint(
                "POST",
                "/detokenize",
                tenant,
                self.detokenize,
                "token ids; returns their text",
                takes=(JSON,),
                body=DetokenizeBody,
                answer=DetokenizeAnswer,
            ),
        )

    async def tokenize(self, exchange: Exchange) -> None:
        request = await self._bodies.read(exchange, self._limits, tokenize_request)
        work = self._service.token_ids(exchange.caller, request)
        route, ids = await unless_disconnected(exchange.receive, exchange.reply, work)
        most = self._service.max_context_tokens(route)
        await exchange.reply.json(200, _encode(TokenizeAnswer(len(ids), most, ids)))

    async def detokenize(self, exchange: Exchange) -> None:
        body = await self._bodies.read(exchange, self._limits, lambda data: parse_body(data, DetokenizeBody))
        work = self._service.text_of(exchange.caller, body.model, body.tokens)
        text = await unless_disconnected(exchange.receive, exchange.reply, work)
        await exchange.reply.json(200, _encode(DetokenizeAnswer(text)))


def tokenize_request(data: bytes) -> inference_pb2.CountTokensRequest:
    """Return the request of a /tokenize body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, TokenizeBody, waived=_without_effect)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("send either prompt or messages", field="prompt")
    request = inference_pb2.CountTokensRequest(model=body.model)
    if body.messages is not None:
        if not body.messages:
            raise InvalidInput("messages is empty", field="messages")
        set_chat(request.chat, body.messages, body.chat_template_kwargs or {})
        offer(request.chat, body.tools or ())
    else:
        request.prompt = body.prompt or ""
    return request


def _without_effect(body: TokenizeBody) -> tuple[str, ...]:
    """A chat template writes the special tokens itself."""
    return ("add_special_tokens",) if body.messages is not None else ()
