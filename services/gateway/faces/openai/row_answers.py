"""Answers of fixed-cost models in the shapes that the clients of OpenAI, vLLM, Jina and Cohere read."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final

import msgspec
import numpy as np

from services.gateway.faces.openai.event_stream import REPLAYED
from services.gateway.faces.openai.row_requests import EmbeddingsCall, RerankCall
from services.gateway.rows.results import LABEL, PROBABILITIES, label_names
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.gateway.rows.work import RowsAnswer

_encode: Final = msgspec.json.Encoder().encode


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
