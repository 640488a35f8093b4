"""The end of a sequence, as its gateway receives it."""

from __future__ import annotations

from typing import Final

from services.core.errors import ConstraintRefused
from services.core.generation import NOT_FINITE, FinishReason, SequenceEnd
from services.core.poison.suspicion import LossCause, StepRole
from services.worker import engine_protocol as wire
from services.worker.streams.live_sequence import WorkerSequence

# The client's stream ends with these reasons, so text that was held back becomes final. With other reasons
# the sequence is placed again and continues with its own held-back text.
FLUSHED: Final = frozenset(
    {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.DEADLINE,
        FinishReason.SLOW_READER,
        FinishReason.ERROR,
    }
)


def end_of(
    sequence: WorkerSequence,
    reason: FinishReason,
    error: tuple[str, str],
    loss: tuple[LossCause, StepRole],
    embedding: bytes,
) -> SequenceEnd:
    """Return the end of a sequence. ``error``: its reason and message; ``loss``: its part in a step that
    ended its engine; ``embedding``: empty for a generation."""
    started_s, first_s = sequence.prefill_started_s, sequence.first_token_s
    return SequenceEnd(
        reason=reason,
        stop=sequence.text.stop,
        output_tokens=sequence.output_tokens,
        cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
        engine_wait_us=_microseconds(sequence.accepted_s, started_s),
        prefill_us=_microseconds(started_s, first_s),
        error_reason=error[0],
        error_message=error[1],
        device_us=sequence.device_us,
        loss_cause=loss[0],
        step_role=loss[1],
        embedding=embedding,
    )


def engine_end(event: wire.Stepped, sequence: WorkerSequence) -> tuple[FinishReason, tuple[str, str]]:
    """Return the reason by which the engine finished a sequence, with the reason and message of an error."""
    message = event.errors.get(sequence.number, "")
    match event.finished[sequence.number]:
        case "constraint":
            return FinishReason.ERROR, (ConstraintRefused.reason, message)
        case "error":
            began = sequence.prefill_started_s is not None
            return FinishReason.ERROR, ("INTERNAL" if began else "INVALID_INPUT", message)
        case "not_finite":  # possibly the worker's fault: another worker may continue it
            return FinishReason.ENGINE_LOST, (NOT_FINITE, message)
        case reason:
            return FinishReason(reason), ("", "")


def last_rows(event: wire.Stepped) -> dict[int, int]:
    """Return the row of the last token of each finished sequence, by number; -1 without a token."""
    if not event.finished:
        return {}
    rows = dict(zip(event.handles, range(len(event.handles)), strict=True))
    return {number: rows.get(number, -1) for number in event.finished}


def _microseconds(start_s: float | None, end_s: float | None) -> int:
    return 0 if start_s is None or end_s is None else max(0, round((end_s - start_s) * 1e6))
