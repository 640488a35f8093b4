"""Answers of fixed-cost models as messages of fairway.v1."""

from __future__ import annotations

from typing import Final

from fairway.mirror import Mirror, Pair
from fairway.v1 import inference_pb2
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.gateway.rows.work import RowsAnswer
from services.rpc.convert.inference import usage
from services.rpc.convert.rows import TENSOR

# The fields that every answer has.
_ANSWER: Final = Mirror(
    RowsAnswer,
    inference_pb2.EmbedResponse,
    {"usage": Pair("usage", usage)},
    apart=("outputs", "tokens", "clock", "request_rate", "token_rate"),
)


def embed_response(found: Embeddings) -> inference_pb2.EmbedResponse:
    embeddings = [
        inference_pb2.Embedding(values=vector.tolist(), prompt_tokens=tokens)
        for vector, tokens in zip(found.vectors, found.answer.tokens, strict=True)
    ]
    return _ANSWER.to_proto(found.answer, embeddings=embeddings)


def rerank_response(found: Scores, top_n: int) -> inference_pb2.RerankResponse:
    results = [
        inference_pb2.RankedDocument(index=index, score=found.scores[index])
        for index in found.best_first(top_n)
    ]
    return inference_pb2.RerankResponse(results=results, **_ANSWER.as_fields(found.answer))


def score_response(found: Scores) -> inference_pb2.ScoreResponse:
    return inference_pb2.ScoreResponse(scores=found.scores, **_ANSWER.as_fields(found.answer))


def infer_response(found: Inferred) -> inference_pb2.InferResponse:
    outputs = map(TENSOR.to_proto, found.outputs)
    return inference_pb2.InferResponse(outputs=outputs, **_ANSWER.as_fields(found.answer))
