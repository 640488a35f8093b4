"""Models of texts in the dialects of OpenAI, vLLM, Jina and Cohere: requests, answers, routes."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.errors import named
from services.gateway.faces.openai.exchange import (
    JSON,
    RUN_HEADERS,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    Handler,
    HttpLimits,
    rate_headers,
    unless_disconnected,
)
from services.gateway.faces.openai.requests import PRIORITIES
from services.gateway.faces.openai.types import UInt32, Unserved, parse_body
from services.gateway.faces.transport.event_stream import REPLAYED
from services.gateway.rows.inputs import MAX_ROWS
from services.gateway.rows.results import LABEL, PROBABILITIES, label_names
from services.gateway.rows.service import Embeddings, Inferred, RowsService, Scores
from services.gateway.rows.work import RowsAnswer
from services.gateway.service_types import RowsMessage
from services.ports.clock import Clock

_MAX_CUT = 1_048_576
_DATA_URL = re.compile(r"data:image/(?:png|jpe?g);base64,", re.IGNORECASE)
# Bounded, since a whole picture in base64 could begin a scheme.
_SCHEME = re.compile(r"\s{0,31}[a-z][a-z0-9+.-]{0,31}:", re.IGNORECASE)
# The bounds of InferRequest.images, checked before anything is decoded.
_MAX_PICTURES = 64
_MAX_PICTURE_BYTES = 4 * 1024 * 1024
_MAX_PICTURE_CHARS = 4 * (_MAX_PICTURE_BYTES // 3 + 1) + 32  # base64 and the beginning of a data URL
Cut = Annotated[int, Meta(ge=-1, le=_MAX_CUT)]
Texts = str | list[str]
_encode: Final = msgspec.json.Encoder().encode
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


class RowOptions(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields of every dialect. ``truncate_prompt_tokens`` has vLLM's name: -1 is the model's most."""

    model: str
    user: str | None = None
    priority: Literal["batch", "standard", "interactive"] | None = None
    truncate_prompt_tokens: Cut | None = None

    add_special_tokens: Unserved = UNSET


class EmbeddingsBody(RowOptions, forbid_unknown_fields=True, frozen=True, kw_only=True):
    input: str | list[str | int | list[UInt32]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: UInt32 | None = None


class RerankText(Struct, forbid_unknown_fields=True, frozen=True):
    text: str


class RerankBody(RowOptions, forbid_unknown_fields=True, frozen=True, kw_only=True):
    query: str
    documents: list[str | RerankText]
    top_n: UInt32 | None = None
    return_documents: bool | None = None

    rank_fields: Unserved = UNSET
    max_chunks_per_doc: Unserved = UNSET
    max_tokens_per_doc: Unserved = UNSET


class ScoreBody(RowOptions, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The two texts of each pair, by any of the names that vLLM's releases take."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class ClassifyBody(RowOptions, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``image``: files in base64, plain or as data URLs."""

    input: Texts | None = None
    image: Texts | None = None


class EmbeddingsCall(Struct, frozen=True):
    """One /v1/embeddings request. ``base64``: how the client reads a vector."""

    message: inference_pb2.EmbedRequest
    base64: bool


class RerankCall(Struct, frozen=True):
    """One rerank request. ``with_documents``: whether the answer repeats them."""

    message: inference_pb2.RerankRequest
    with_documents: bool


def embeddings_request(data: bytes) -> EmbeddingsCall:
    """Return the request of a /v1/embeddings body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, EmbeddingsBody)
    message = inference_pb2.EmbedRequest(dimensions=_dimensions(body.dimensions))
    _set_options(message, body)
    _set_cut(message, body)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not inputs:
        raise InvalidInput("input is empty", field="input")
    kind = type(inputs[0])
    if any(type(entry) is not kind for entry in inputs):
        raise InvalidInput("input mixes texts and token ids", field="input")
    if kind is int:
        rows = [[entry for entry in inputs if isinstance(entry, int)]]
    else:
        _check_count(len(inputs), "input")
        rows = [entry for entry in inputs if isinstance(entry, list)]
        message.inputs.extend(entry for entry in inputs if isinstance(entry, str))
    for row in rows:
        if row and (min(row) < 0 or max(row) > 0xFFFF_FFFF):
            raise InvalidInput("input holds a number that is no token id", field="input")
        message.token_ids.add(ids=row)
    return EmbeddingsCall(message, body.encoding_format == "base64")


def rerank_request(data: bytes) -> RerankCall:
    """Return the request of a rerank body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, RerankBody)
    _check_count(len(body.documents), "documents")
    message = inference_pb2.RerankRequest(query=body.query, top_n=body.top_n or 0)
    message.documents.extend(entry if isinstance(entry, str) else entry.text for entry in body.documents)
    _set_options(message, body)
    _set_cut(message, body)
    return RerankCall(message, body.return_documents is not False)


def score_request(data: bytes) -> inference_pb2.ScoreRequest:
    """Return the request of a score body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ScoreBody)
    named = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
    present = [names for names in named if any(getattr(body, name) is not None for name in names)]
    if len(present) != 1:
        raise InvalidInput("send text_1 and text_2, or queries and documents", field="text_1")
    message = inference_pb2.ScoreRequest()
    for name, field in zip(present[0], (message.firsts, message.seconds), strict=True):
        texts: Texts | None = getattr(body, name)
        if texts is None:
            raise InvalidInput(f"{name} is required", field=name)
        _check_count(1 if isinstance(texts, str) else len(texts), name)
        field.extend([texts] if isinstance(texts, str) else texts)
    _set_options(message, body)
    _set_cut(message, body)
    return message


def classify_request(data: bytes) -> inference_pb2.InferRequest:
    """Return the request of a classify body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ClassifyBody)
    if (body.input is None) == (body.image is None):
        raise InvalidInput("send either input or image", field="input")
    field, given = ("input", body.input) if body.image is None else ("image", body.image)
    rows = [given] if isinstance(given, str) else given or []
    _check_count(len(rows), field, MAX_ROWS if body.image is None else _MAX_PICTURES)
    message = inference_pb2.InferRequest()
    if body.image is None:
        message.texts.extend(rows)
    else:
        message.images.extend(_file(entry, f"image[{index}]") for index, entry in enumerate(rows))
    _set_options(message, body)
    _set_cut(message, body)
    return message


def _file(text: str, field: str) -> bytes:
    """Return the bytes of a picture. Raises InvalidInput, UnsupportedFeature."""
    if len(text) > _MAX_PICTURE_CHARS:
        raise InvalidInput(
            f"{field} has {len(text)} characters of base64; a file has at most {_MAX_PICTURE_BYTES} bytes",
            field=field,
        )
    if found := _DATA_URL.match(text):
        text = text[found.end() :]
    elif _SCHEME.match(text):
        raise UnsupportedFeature(
            f"{field} is a URL, and the server fetches nothing: send the file in base64, or as a data URL "
            "of image/png or image/jpeg",
            field=field,
        )
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise InvalidInput(f"{field} is not base64", field=field) from None


def _set_options(message: RowsMessage, body: RowOptions) -> None:
    message.model = body.model
    message.session_key = message.user = body.user or ""
    if body.priority is not None:
        message.priority = PRIORITIES[body.priority]


def _set_cut(message: RowsMessage, body: RowOptions) -> None:
    cut = body.truncate_prompt_tokens
    if cut == 0:
        raise InvalidInput(
            "truncate_prompt_tokens must be at least 1, or -1 for the most that the model takes",
            field="truncate_prompt_tokens",
        )
    if cut is not None:
        message.truncate_tokens = max(0, cut)


def _dimensions(requested: int | None) -> int:
    if requested == 0:
        raise InvalidInput("dimensions must be at least 1", field="dimensions")
    return requested or 0


def _check_count(count: int, field: str, most: int = MAX_ROWS) -> None:
    """Checked before a message of that size is made."""
    if not 1 <= count <= most:
        problem = f"has {count} elements; at most {most} are taken" if count else "is empty"
        raise InvalidInput(f"{field} {problem}", field=field)


def embeddings_answer(request: EmbeddingsCall, found: Embeddings) -> bytes:
    """Return the answer of /v1/embeddings. A vector in base64 is its 32-bit little-endian floats."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(vector.tobytes()).decode() if request.base64 else vector.tolist(),
        }
        for index, vector in enumerate(found.vectors)
    ]
    answer = found.answer
    return _encode({"object": "list", "data": data, "model": answer.model, "usage": _usage(answer)})


def rerank_answer(request: RerankCall, found: Scores) -> bytes:
    """Return the answer of /v1/rerank, the best document first."""
    results: list[dict[str, Any]] = []
    for index in found.best_first(request.message.top_n):
        result: dict[str, Any] = {"index": index, "relevance_score": found.scores[index]}
        if request.with_documents:
            result["document"] = {"text": request.message.documents[index]}
        results.append(result)
    answer = found.answer
    return _encode(
        {
            "id": f"rerank-{answer.request_id}",
            "model": answer.model,
            "usage": _usage(answer),
            "results": results,
        }
    )


def score_answer(found: Scores, created_unix_s: int) -> bytes:
    """Return the answer of /v1/score, in the order of the pairs."""
    answer = found.answer
    return _encode(
        {
            "id": f"score-{answer.request_id}",
            "object": "list",
            "created": created_unix_s,
            "model": answer.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(found.scores)
            ],
            "usage": _usage(answer),
        }
    )


def classify_answer(found: Inferred, created_unix_s: int) -> bytes:
    """Return the answer of /v1/classify, in the order of the inputs."""
    answer, outputs = found.answer, {tensor.name: tensor for tensor in found.outputs}
    probabilities = np.frombuffer(outputs[PROBABILITIES].data, np.float64)
    rows = probabilities.reshape(outputs[PROBABILITIES].shape).tolist()
    return _encode(
        {
            "id": f"classify-{answer.request_id}",
            "object": "list",
            "created": created_unix_s,
            "model": answer.model,
            "data": [
                {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
                for index, (label, probs) in enumerate(zip(label_names(outputs[LABEL]), rows, strict=True))
            ],
            "usage": _usage(answer),
        }
    )


def replay_headers(answer: RowsAnswer) -> tuple[tuple[bytes, bytes], ...]:
    """Return the mark of an answer that an earlier request with the same key received; none for another."""
    return (REPLAYED,) if answer.replayed else ()


def _usage(answer: RowsAnswer) -> dict[str, int]:
    tokens = answer.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


class RowsFace:
    """The handlers of the routes."""

    def __init__(self, service: RowsService, clock: Clock, limits: HttpLimits, bodies: BodyReader) -> None:
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
        request: EmbeddingsCall = await self._bodies.read(exchange, self._limits, embeddings_request)
        found = await self._called(exchange, self._service.embed, request.message)
        await self._reply(exchange, found, embeddings_answer(request, found))

    async def rerank(self, exchange: Exchange) -> None:
        request: RerankCall = await self._bodies.read(exchange, self._limits, rerank_request)
        found = await self._called(exchange, self._service.rerank, request.message)
        await self._reply(exchange, found, rerank_answer(request, found))

    async def score(self, exchange: Exchange) -> None:
        request = await self._bodies.read(exchange, self._limits, score_request)
        found = await self._called(exchange, self._service.score, request)
        await self._reply(exchange, found, score_answer(found, int(self._clock.unix_s())))

    async def classify(self, exchange: Exchange) -> None:
        request = await self._bodies.read(exchange, self._limits, classify_request)
        found = await self._called(exchange, self._service.infer, request)
        await self._reply(exchange, found, classify_answer(found, int(self._clock.unix_s())))

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
