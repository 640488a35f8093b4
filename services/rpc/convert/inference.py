"""Core values of a generation as messages of fairway.v1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fairway.v1 import common_pb2
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.core.records import Priority

FINISH_REASONS: Final = {
    reason: common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
FINISH_REASONS_BACK: Final = {number: reason for reason, number in FINISH_REASONS.items()}
PRIORITIES: Final = {
    Priority.BATCH: common_pb2.PRIORITY_BATCH,
    Priority.STANDARD: common_pb2.PRIORITY_STANDARD,
    Priority.INTERACTIVE: common_pb2.PRIORITY_INTERACTIVE,
}
# Keyed by number, as in message fields.
PRIORITY_OF: Final[Mapping[int, Priority]] = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.STANDARD,
    **{number: priority for priority, number in PRIORITIES.items()},
}


def usage(value: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=value.prompt_tokens,
        output_tokens=value.output_tokens,
        cached_tokens=value.cached_tokens,
        device_us=round(value.device_s * 1e6),
    )


def stage_clock(value: StageClock) -> common_pb2.StageClock:
    return common_pb2.StageClock(
        received_unix_us=value.received_unix_us,
        validate_us=value.validate_us,
        admit_us=value.admit_us,
        queue_us=value.queue_us,
        dispatch_us=value.dispatch_us,
        engine_wait_us=value.engine_wait_us,
        prefill_us=value.prefill_us,
        decode_us=value.decode_us,
        send_us=value.send_us,
    )


def token_logprobs(values: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            sampled=value.sampled,
            top_ids=value.top_ids,
            top_logprobs=value.top_logprobs,
            top_tokens=value.top_tokens,
            token=value.token,
        )
        for value in values
    ]
