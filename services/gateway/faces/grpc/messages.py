"""The gateway's events as messages of fairway.v1."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from fairway.v1 import inference_pb2
from services.gateway.events import Accepted, Event, Finished, Heartbeat, Tokens
from services.gateway.policy.degrade import DegradationKind
from services.gateway.requests.streaming import Completion
from services.rpc.convert.inference import FINISH_REASONS, stage_clock, token_logprobs, usage
from services.rpc.convert.outputs import answer_to_proto, parts_to_proto

_SLICE_ENTRIES: Final = 256  # entries of one slice: with their alternatives they take a few milliseconds
_DEGRADATIONS: Final = {
    DegradationKind.OUTPUT_CAPPED: inference_pb2.DEGRADATION_KIND_OUTPUT_CAPPED,
    DegradationKind.SMALLER_MODEL: inference_pb2.DEGRADATION_KIND_SMALLER_MODEL,
}


def accepted_message(event: Accepted) -> inference_pb2.Accepted:
    return inference_pb2.Accepted(
        request_id=event.request_id,
        model=event.model,
        version_digest=event.version_digest,
        route_revision=event.route_revision,
        seed=event.seed,
        prompt_tokens=event.prompt_tokens,
        replayed=event.replayed,
        cached=event.cached,
        degradations=[
            inference_pb2.Degradation(
                kind=_DEGRADATIONS[found.kind],
                original=found.original,
                applied=found.applied,
                pressure_ratio=found.pressure_ratio,
            )
            for found in event.degradations
        ],
    )


def finished_message(event: Finished) -> inference_pb2.Finished:
    return inference_pb2.Finished(
        choices=[
            inference_pb2.ChoiceResult(
                choice=result.choice,
                finish_reason=FINISH_REASONS[result.finish_reason],
                stop=result.stop,
                output_tokens=result.output_tokens,
                parts=parts_to_proto(result.parts),
            )
            for result in event.choices
        ],
        usage=usage(event.usage),
        clock=stage_clock(event.clock),
        resumes=event.resumes,
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
