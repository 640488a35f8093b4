"""The tools of a Responses request: functions, which the client runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import require_neutral
from services.gateway.faces.responses.types import PromptFields, ResponsesToolChoice
from services.gateway.faces.transport.tool_fields import add_tool, set_tool_choice

_MODES: Final = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


def set_tools(generation: inference_pb2.Generation, body: PromptFields) -> None:
    """Write the tools and the choice among them. Raises InvalidInput, UnsupportedFeature."""
    generation.parts = True
    if body.tool_choice == "none":
        return
    for number, tool in enumerate(body.tools or ()):
        path = f"tools[{number}]."
        if tool.type != "function":
            raise UnsupportedFeature(
                f"{path}type: {tool.type[:64]!r} is not offered by this server: functions are",
                field=f"{path}type",
            )
        require_neutral(tool, path)
        if tool.name is None:
            raise InvalidInput(f"{path}name is required", field=f"{path}name")
        add_tool(generation, tool.name, tool.description, tool.parameters, strict=bool(tool.strict))
    single = body.parallel_tool_calls is False
    if isinstance(body.tool_choice, ResponsesToolChoice):
        mode, names = _named(body.tool_choice)
        set_tool_choice(generation, _MODES[mode], names, single=single)
    elif body.tool_choice is not None or single:
        set_tool_choice(generation, _MODES[body.tool_choice or "auto"], single=single)


def _named(choice: ResponsesToolChoice) -> tuple[str, Sequence[str]]:
    """Return the mode and the names of the tools that may be called."""
    if choice.type == "function" and choice.name is not None:
        return "required", (choice.name,)
    if choice.type == "allowed_tools" and choice.tools:
        return choice.mode or "auto", [_name(tool, number) for number, tool in enumerate(choice.tools)]
    raise UnsupportedFeature(
        f"tool_choice.type {choice.type[:64]!r} is not offered by this server: function with a name and "
        "allowed_tools with tools are",
        field="tool_choice.type",
    )


def _name(tool: dict[str, Any], number: int) -> str:
    name = tool.get("name")
    if tool.get("type") != "function" or not isinstance(name, str):
        field = f"tool_choice.tools[{number}]"
        raise InvalidInput(f"{field} must be a function with a name", field=field)
    return name
