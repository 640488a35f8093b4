"""The HTTP routes of models of texts: OpenAI's, and those of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from msgspec import Struct

from services.gateway.faces.openai.endpoint import JSON, RUN_HEADERS, Access, ApiEndpoint, Exchange, Handler
from services.gateway.faces.openai.errors import named
from services.gateway.faces.openai.exchange import BodyReader, HttpLimits, read_body, unless_disconnected
from services.gateway.faces.openai.row_answers import (
    classify_answer,
    embeddings_answer,
    replay_headers,
    rerank_answer,
    score_answer,
)
from services.gateway.faces.openai.row_requests import (
    ClassifyBody,
    EmbeddingsBody,
    EmbeddingsCall,
    RerankBody,
    RerankCall,
    ScoreBody,
    classify_request,
    embeddings_request,
    rerank_request,
    score_request,
)
from services.gateway.faces.transport.rate_headers import rate_headers
from services.gateway.rows.calls import RowsCalls
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.gateway.service_types import RowsMessage
from services.ports.clock import Clock

T = TypeVar("T")
# Fields of fairway.v1 with another name in these dialects.
ROW_NAMES: Final = (
    ("inputs", "input"),
    ("texts", "input"),
    ("images", "image"),
    ("token_ids", "input"),
    ("truncate_tokens", "truncate_prompt_tokens"),
    ("firsts", "text_1"),
    ("seconds", "text_2"),
)


class RowsFace:
    """The handlers of the routes."""

    def __init__(self, service: RowsCalls, clock: Clock, limits: HttpLimits, bodies: BodyReader) -> None:
        self._service = service
        self._clock = clock
        self._limits = limits
        self._bodies = bodies

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        routes: list[tuple[str, Handler, str, type[Struct]]] = [
            ("/v1/embeddings", self.embeddings, "texts or token ids to embed", EmbeddingsBody)
        ]
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            routes.append((path, self.rerank, "a query and documents to order", RerankBody))
        for path in ("/v1/score", "/score"):
            routes.append((path, self.score, "pairs of texts to score", ScoreBody))
        for path in ("/v1/classify", "/classify"):
            routes.append((path, self.classify, "texts or pictures to classify", ClassifyBody))
        return tuple(
            ApiEndpoint(
                "POST", path, Access.TENANT, handler, accepts, body=body, takes=(JSON,), headers=RUN_HEADERS
            )
            for path, handler, accepts, body in routes
        )

    async def embeddings(self, exchange: Exchange) -> None:
        request: EmbeddingsCall = await self._read(exchange, embeddings_request)
        found = await self._called(exchange, self._service.embed, request.message)
        await self._reply(exchange, found, embeddings_answer(request, found))

    async def rerank(self, exchange: Exchange) -> None:
        request: RerankCall = await self._read(exchange, rerank_request)
        found = await self._called(exchange, self._service.rerank, request.message)
        await self._reply(exchange, found, rerank_answer(request, found))

    async def score(self, exchange: Exchange) -> None:
        request = await self._read(exchange, score_request)
        found = await self._called(exchange, self._service.score, request)
        await self._reply(exchange, found, score_answer(found, int(self._clock.unix_s())))

    async def classify(self, exchange: Exchange) -> None:
        request = await self._read(exchange, classify_request)
        found = await self._called(exchange, self._service.infer, request)
        await self._reply(exchange, found, classify_answer(found, int(self._clock.unix_s())))

    async def _read(self, exchange: Exchange, parse: Callable[[bytes], T]) -> T:
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            body = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            return await self._bodies.parse(parse, body)

    async def _called(
        self, exchange: Exchange, method: Callable[..., Coroutine[Any, Any, T]], message: RowsMessage
    ) -> T:
        """Call a method of the service with what the body and the headers state, while the client waits."""
        call = method(
            exchange.caller,
            _with_headers(message, exchange),
            received=exchange.received,
            timeout_s=exchange.headers.timeout_s(),
        )
        return await named(ROW_NAMES, unless_disconnected(exchange.receive, exchange.reply, call))

    async def _reply(self, exchange: Exchange, found: Embeddings | Inferred | Scores, body: bytes) -> None:
        for header in (*rate_headers(found.answer), *replay_headers(found.answer)):
            exchange.reply.add_header(*header)
        await exchange.reply.json(200, body)


def _with_headers(message: RowsMessage, exchange: Exchange) -> RowsMessage:
    """Return the request with what its headers state. Raises InvalidInput."""
    headers = exchange.headers
    message.idempotency_key, message.version = headers.idempotency_key(), headers.model_version()
    if (session_key := headers.session_key()) is not None:
        message.session_key = session_key
    return message
