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
from fairway.mirror import Mirror, Pair
from fairway.v1 import common_pb2, inference_pb2
from services.core.outputs.tools import Tool, ToolChoice, ToolMode, name_for_model

_NAMES: Final = {"name": Pair("name", read=name_for_model)}
TOOL: Final = Mirror(Tool, inference_pb2.Tool, _NAMES)
CALL: Final = Mirror(ToolCall, inference_pb2.ToolCall, _NAMES)
_DELTA: Final = Mirror(CallDelta, common_pb2.ToolCallDelta)
TOOL_MODES: Final = {
    ToolMode.AUTO: inference_pb2.TOOL_MODE_AUTO,
    ToolMode.NONE: inference_pb2.TOOL_MODE_NONE,
    ToolMode.REQUIRED: inference_pb2.TOOL_MODE_REQUIRED,
}
_MODES: Final = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    **{number: mode for mode, number in TOOL_MODES.items()},
}


def tools_from_proto(messages: Iterable[inference_pb2.Tool]) -> tuple[Tool, ...]:
    return tuple(map(TOOL.from_proto, messages))


def tool_choice_from_proto(message: inference_pb2.ToolChoice) -> ToolChoice:
    return ToolChoice(_MODES[message.mode], tuple(map(name_for_model, message.names)), message.single)


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


def answer_to_proto(answer: AssistantAnswer) -> inference_pb2.AssistantAnswer:
    return inference_pb2.AssistantAnswer(
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=map(CALL.to_proto, answer.calls),
    )
