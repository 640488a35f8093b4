"""Answers of fixed-cost models as messages of fairway.v1."""

from __future__ import annotations

from fairway.v1 import common_pb2, inference_pb2
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.rpc.convert.inference import usage


def embed_response(found: Embeddings) -> inference_pb2.EmbedResponse:
    answer = found.answer
    return inference_pb2.EmbedResponse(
        model=answer.model,
        version_digest=answer.version_digest,
        embeddings=[
            inference_pb2.Embedding(values=vector.tolist(), prompt_tokens=tokens)
            for vector, tokens in zip(found.vectors, answer.tokens, strict=True)
        ],
        request_id=answer.request_id,
        usage=usage(answer.usage),
        replayed=answer.replayed,
    )


def rerank_response(found: Scores, top_n: int) -> inference_pb2.RerankResponse:
    answer = found.answer
    return inference_pb2.RerankResponse(
        model=answer.model,
        version_digest=answer.version_digest,
        results=[
            inference_pb2.RankedDocument(index=index, score=found.scores[index])
            for index in found.best_first(top_n)
        ],
        request_id=answer.request_id,
        usage=usage(answer.usage),
        replayed=answer.replayed,
    )


def score_response(found: Scores) -> inference_pb2.ScoreResponse:
    answer = found.answer
    return inference_pb2.ScoreResponse(
        model=answer.model,
        version_digest=answer.version_digest,
        scores=found.scores,
        request_id=answer.request_id,
        usage=usage(answer.usage),
        replayed=answer.replayed,
    )


def infer_response(found: Inferred) -> inference_pb2.InferResponse:
    answer = found.answer
    return inference_pb2.InferResponse(
        model=answer.model,
        version_digest=answer.version_digest,
        outputs=[
            common_pb2.Tensor(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, data=tensor.data
            )
            for tensor in found.outputs
        ],
        request_id=answer.request_id,
        usage=usage(answer.usage),
        replayed=answer.replayed,
    )
