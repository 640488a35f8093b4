"""The tools of a chat request in the OpenAI dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import (
    SEARCHES,
    ChatBody,
    ChosenTool,
    OfferedTool,
    ToolSelection,
)

MAX_TOOLS = 128  # the bound in the proto
_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


def set_tools(generation: inference_pb2.Generation, body: ChatBody) -> Mapping[str, str]:
    """Write the tools and the choice among them; return the client's names of their fields.

    Raises InvalidInput, UnsupportedFeature.
    """
    choice = generation.tool_choice
    choice.single = body.parallel_tool_calls is False
    if isinstance(body.tool_choice, ToolSelection):
        _set_selection(choice, body.tool_choice)
    elif body.tool_choice is not None:
        choice.mode = _MODES[body.tool_choice]
    if not body.tools or choice.mode == inference_pb2.TOOL_MODE_NONE:
        generation.ClearField("tool_choice")
        if choice_needs_tools(body):
            raise InvalidInput(
                "tool_choice asks for a call, and there are no tools that this server offers; those that a "
                f"server runs ({', '.join(SEARCHES)}) are left out: send functions, or tool_choice auto",
                field="tool_choice",
            )
        return {}
    offer(generation.chat, body.tools)
    if not choice.ByteSize():
        generation.ClearField("tool_choice")
    names = {f"chat.tools[{index}].": f"tools[{index}].function." for index in range(len(body.tools))}
    return {**names, "chat.tools": "tools", "tool_choice.names": "tool_choice"}


def choice_needs_tools(body: ChatBody) -> bool:
    """Whether the choice is one of calls."""
    return body.tool_choice not in (None, "none", "auto")


def offer(chat: inference_pb2.Chat, tools: Sequence[OfferedTool]) -> None:
    """Write the tools that the template shows. Raises InvalidInput, UnsupportedFeature."""
    if len(tools) > MAX_TOOLS:
        raise InvalidInput(f"there are {len(tools)} tools; at most {MAX_TOOLS} are taken", field="tools")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type != "function":
            raise UnsupportedFeature(
                f"{path}.type {tool.type[:64]!r} is not offered by this server: function is",
                field=f"{path}.type",
            )
        if tool.function is None:
            raise InvalidInput(f"{path}.function is required", field=f"{path}.function")
        function = tool.function
        parameters = function.parameters
        chat.tools.add(
            name=function.name,
            description=function.description or "",
            parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
            strict=bool(function.strict),
        )


def _set_selection(choice: inference_pb2.ToolChoice, selection: ToolSelection) -> None:
    if selection.type == "function" and selection.function is not None:
        choice.mode = inference_pb2.TOOL_MODE_REQUIRED
        choice.names.append(selection.function.name)
        choice.single = True  # who names a function expects one call of it
    elif selection.type == "allowed_tools" and selection.allowed_tools is not None:
        choice.mode = _MODES[selection.allowed_tools.mode]
        choice.names.extend(
            _chosen(tool, f"tool_choice.allowed_tools.tools[{index}]")
            for index, tool in enumerate(selection.allowed_tools.tools[: MAX_TOOLS + 1])
        )
    else:
        raise UnsupportedFeature(
            f"tool_choice of the type {selection.type[:64]!r} is not offered by this server: none, auto, "
            "required, a function by its name, and allowed_tools are",
            field="tool_choice",
        )


def _chosen(tool: ChosenTool, path: str) -> str:
    if tool.type != "function" or tool.function is None:
        raise UnsupportedFeature(f"{path} has to name a function", field=path)
    return tool.function.name
