"""Core values of a generation as messages of fairway.v1."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.formats.answers import (
    AssistantAnswer,
    CallDelta,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCall,
)
from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import InvalidInput
from services.core.generation import (
    Constraint,
    ConstraintKind,
    FinishReason,
    StageClock,
    TokenLogprobs,
    Usage,
)
from services.core.outputs.forms import Tool, ToolChoice, ToolMode, name_for_model
from services.core.records import Priority


def seconds_of(message: Duration | Timestamp) -> float:
    """Return a span in seconds, or a moment in seconds of Unix time."""
    return message.seconds + message.nanos / 1e9


def duration_of(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1_000_000))
    return found


_NAMES: Final = {"name": Pair("name", read=name_for_model)}
TOOL: Final = Mirror(Tool, inference_pb2.Tool, _NAMES)
CALL: Final = Mirror(ToolCall, inference_pb2.ToolCall, _NAMES)
_DELTA: Final = Mirror(CallDelta, common_pb2.ToolCallDelta)
_CHOICE: Final = Mirror(
    ToolChoice,
    inference_pb2.ToolChoice,
    {
        "mode": enum_pair("mode", numbers_of(ToolMode, inference_pb2.ToolMode), ToolMode.AUTO),
        "names": Pair("names", read=lambda names: tuple(map(name_for_model, names))),
    },
)
tool_choice_from_proto: Final = _CHOICE.from_proto
_ANSWER: Final = Mirror(AssistantAnswer, inference_pb2.AssistantAnswer, {"calls": CALL.each("tool_calls")})
answer_to_proto: Final = _ANSWER.to_proto


def tools_from_proto(messages: Iterable[inference_pb2.Tool]) -> tuple[Tool, ...]:
    return tuple(map(TOOL.from_proto, messages))


def parts_to_proto(parts: Iterable[OutputPart]) -> list[common_pb2.OutputPart]:
    return list(map(_part, parts))


def _part(part: OutputPart) -> common_pb2.OutputPart:
    match part:
        case ContentText(text):
            return common_pb2.OutputPart(content=text)
        case ReasoningText(text):
            return common_pb2.OutputPart(reasoning=text)
        case CallDelta():
            return common_pb2.OutputPart(call=_DELTA.to_proto(part))


FINISH_REASONS: Final = numbers_of(FinishReason, common_pb2.FinishReason)
FINISH_REASONS_BACK: Final = {number: reason for reason, number in FINISH_REASONS.items()}
PRIORITIES: Final = numbers_of(Priority, common_pb2.Priority)
# Keyed by number, as in message fields.
PRIORITY_OF: Final[Mapping[int, Priority]] = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.STANDARD,
    **{number: priority for priority, number in PRIORITIES.items()},
}


PRIORITY: Final = enum_pair("priority", PRIORITIES, Priority.STANDARD)
TENANT: Final = Pair("tenant_id")
DIGEST: Final = Pair("version_digest")

usage: Final = Mirror(
    Usage,
    common_pb2.Usage,
    {"device_s": Pair("device_us", lambda device_s: round(device_s * 1e6), lambda us: us / 1e6)},
).to_proto
stage_clock: Final = Mirror(StageClock, common_pb2.StageClock).to_proto
LOGPROBS: Final = Mirror(TokenLogprobs, common_pb2.TokenLogprobs)


def token_logprobs(values: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return list(map(LOGPROBS.to_proto, values))


def constraint_to_proto(constraint: Constraint) -> common_pb2.Constraint:
    if constraint.kind is ConstraintKind.CHOICE:
        return common_pb2.Constraint(choice=common_pb2.Choices(texts=json.loads(constraint.source)))
    message = common_pb2.Constraint()
    setattr(message, constraint.kind.value, constraint.source)
    return message


def constraint_from_proto(message: common_pb2.Constraint) -> Constraint:
    """Return the constraint. Raises InvalidInput for one without content."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidInput("the constraint has no kind", field="sampling.constraint")
    if kind == "choice":
        if not message.choice.texts:
            raise InvalidInput("choice is empty", field="sampling.constraint.choice")
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(message.choice.texts), ensure_ascii=False))
    source: str = getattr(message, kind)
    if not source:
        raise InvalidInput(f"{kind} is empty", field=f"sampling.constraint.{kind}")
    return Constraint(ConstraintKind(kind), source)


def timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMicroseconds(round(unix_s * 1_000_000))
    return found
