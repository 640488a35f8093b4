"""The tools of a Responses request as those of chat completions: functions, which the client runs."""

from __future__ import annotations

from typing import Any

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import (
    AllowedTools,
    ChosenFunction,
    ChosenTool,
    OfferedFunction,
    OfferedTool,
    ToolSelection,
    require_neutral,
)
from services.gateway.faces.responses.types import PromptFields, ResponsesToolChoice


def tool_fields(body: PromptFields) -> dict[str, Any]:
    """Return the fields of a chat body that have the tools. Raises InvalidInput, UnsupportedFeature."""
    tools = []
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
        function = OfferedFunction(tool.name, tool.description, tool.parameters, tool.strict)
        tools.append(OfferedTool("function", function))
    choice = body.tool_choice
    asked = _selection(choice) if isinstance(choice, ResponsesToolChoice) else choice
    return {"tools": tools, "tool_choice": asked, "parallel_tool_calls": body.parallel_tool_calls}


def _selection(choice: ResponsesToolChoice) -> ToolSelection:
    if choice.type == "function" and choice.name is not None:
        return ToolSelection("function", ChosenFunction(choice.name))
    if choice.type == "allowed_tools" and choice.tools:
        allowed = [
            ChosenTool("function", ChosenFunction(_name(tool, number)))
            for number, tool in enumerate(choice.tools)
        ]
        return ToolSelection("allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", allowed))
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
