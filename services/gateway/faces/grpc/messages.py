"""The gateway's events, and the answers of fixed-cost models, as messages of fairway.v1."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import inference_pb2
from services.core.aliases import PassedSize, SizeChoice
from services.core.safety import SafetyPins
from services.gateway.events import Accepted, ChoiceResult, Event, Finished, Heartbeat, Tokens
from services.gateway.policy.degrade import Degradation, DegradationKind
from services.gateway.requests.streaming import Completion
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.gateway.rows.work import RowsAnswer
from services.gateway.safety.moderation import Moderated, ModeratedCategory, Moderation
from services.gateway.service import ServedModel
from services.rpc.convert.inference import (
    FINISH_REASONS,
    answer_to_proto,
    parts_to_proto,
    stage_clock,
    token_logprobs,
    usage,
)
from services.rpc.convert.rows import TENSOR

_SLICE_ENTRIES: Final = 256  # entries of one slice: with their alternatives they take a few milliseconds
_CHOICE: Final = Mirror(
    ChoiceResult,
    inference_pb2.ChoiceResult,
    {
        "finish_reason": Pair("finish_reason", FINISH_REASONS.__getitem__),
        "parts": Pair("parts", parts_to_proto),
    },
    apart=("reasoning_tokens",),
)
_DEGRADATION: Final = Mirror(
    Degradation,
    inference_pb2.Degradation,
    {"kind": enum_pair("kind", numbers_of(DegradationKind, inference_pb2.DegradationKind))},
)
_SIZE: Final = Mirror(
    SizeChoice,
    inference_pb2.SizeChoice,
    {"passed": Mirror(PassedSize, inference_pb2.PassedSize).each("passed")},
)
_SAFETY: Final = Mirror(SafetyPins, inference_pb2.SafetyDigests, apart=("model", "step", "shadow_digest"))
accepted_message: Final = Mirror(
    Accepted,
    inference_pb2.Accepted,
    {
        "degradations": _DEGRADATION.each("degradations"),
        "size": _SIZE.one("size", unset=True),
        "safety": _SAFETY.one("safety", unset=True),
    },
    apart=("received_unix_us", "request_rate", "token_rate", "form"),
).to_proto
finished_message: Final = Mirror(
    Finished,
    inference_pb2.Finished,
    {
        "choices": _CHOICE.each("choices"),
        "usage": Pair("usage", usage),
        "clock": Pair("clock", stage_clock),
    },
    apart=("answer",),
).to_proto
moderate_response: Final = Mirror(
    Moderated,
    inference_pb2.ModerateResponse,
    {
        "results": Mirror(
            Moderation,
            inference_pb2.Moderation,
            {"categories": Mirror(ModeratedCategory, inference_pb2.ModeratedCategory).each("categories")},
        ).each("results")
    },
).to_proto
served_model: Final = Mirror(ServedModel, inference_pb2.ServedModel).to_proto
# The fields that every answer has.
_ANSWER: Final = Mirror(
    RowsAnswer,
    inference_pb2.EmbedResponse,
    {"usage": Pair("usage", usage)},
    apart=("outputs", "tokens", "clock", "request_rate", "token_rate"),
)


def generate_response(event: Event) -> inference_pb2.GenerateResponse:
    if isinstance(event, Tokens):
        response = inference_pb2.GenerateResponse()
        chunk = response.chunk  # filled in place: a separate chunk would be copied
        chunk.choice = event.choice
        chunk.offset = event.offset
        chunk.ids.extend(event.ids)
        chunk.text = event.text
        if event.logprobs:
            chunk.logprobs.extend(token_logprobs(event.logprobs))
        if event.parts:
            chunk.parts.extend(parts_to_proto(event.parts))
        return response
    if isinstance(event, Accepted):
        return inference_pb2.GenerateResponse(accepted=accepted_message(event))
    if isinstance(event, Heartbeat):
        return inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
    return inference_pb2.GenerateResponse(finished=finished_message(event))


def complete_response(completion: Completion) -> Generator[None, None, inference_pb2.CompleteResponse]:
    """Return the response of a whole answer, in steps of a few milliseconds."""
    response = inference_pb2.CompleteResponse(
        accepted=accepted_message(completion.accepted),
        choices=[
            inference_pb2.CompletedChoice(
                choice=choice,
                text=text,
                ids=ids,
                answer=answer_to_proto(completion.answers[choice]) if completion.answers else None,
            )
            for choice, (text, ids) in enumerate(zip(completion.texts, completion.ids, strict=True))
        ],
        finished=finished_message(completion.finished),
    )
    for choice, entries in zip(response.choices, completion.logprobs, strict=True):
        for first in range(0, len(entries), _SLICE_ENTRIES):
            choice.logprobs.extend(token_logprobs(entries[first : first + _SLICE_ENTRIES]))
            yield
    return response


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
