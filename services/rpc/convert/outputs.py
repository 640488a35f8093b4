"""Tools, calls and output parts as messages of fairway.v1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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
from services.core.outputs.tools import Tool, ToolChoice, ToolMode, name_for_model

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
