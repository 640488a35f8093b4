"""The tools of a Responses request as those of chat completions: functions, which the client runs.

A custom tool is a function of one text. The functions of a namespace have its name before theirs. A search
that a server runs is left out: the model does not call it. ``client_tools`` turns calls back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import (
    SEARCHES,
    AllowedTools,
    ChosenFunction,
    ChosenTool,
    OfferedFunction,
    OfferedTool,
    ToolSelection,
    TypedTool,
    left_out,
    parse_part,
)
from services.gateway.faces.responses.types import PromptFields, ResponsesTool, ResponsesToolChoice

_TYPES: Final = ("function", "custom", "namespace")
_TEXT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class _Text(msgspec.Struct):
    """The arguments of a custom tool's function."""

    input: str


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool by the client's names. ``namespace`` is the function's; empty: none."""

    tool: ResponsesTool
    namespace: str = ""

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    def function(self) -> OfferedFunction:
        tool = self.tool
        name = function_name(tool.name, self.namespace)
        if not self.is_custom:
            return OfferedFunction(name, tool.description, tool.parameters, tool.strict)
        grammar = tool.format and tool.format.get("definition")
        shown = f"{tool.description or ''}\nThe input matches this grammar:\n{grammar}" if grammar else None
        return OfferedFunction(name, shown or tool.description, _TEXT)


def function_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a function."""
    return f"{namespace}.{name}" if namespace else name


def text_arguments(text: str) -> str:
    """Return the arguments by which a model passes a text to a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def text_of_arguments(arguments: str) -> str:
    """Return the text that a model passes to a custom tool, as far as it goes; else what the model wrote."""
    for end in ("", '"}'):
        try:
            return msgspec.json.decode(arguments + end, type=_Text).input
        except (msgspec.DecodeError, RecursionError):
            continue
    return arguments


def client_tools(tools: Raw) -> Mapping[str, ClientTool]:
    """Return the tools of a response by the names that the model calls them by."""
    found = _client_tools(msgspec.json.decode(tools, type=list[Raw]), "tools")
    return {function_name(each.tool.name, each.namespace): each for each in found}


def tool_fields(body: PromptFields) -> dict[str, Any]:
    """Return the fields of a chat body that have the tools. Raises InvalidInput, UnsupportedFeature."""
    tools = [OfferedTool("function", each.function()) for each in _client_tools(body.tools or (), "tools")]
    choice = body.tool_choice
    selection = choice if choice is None or isinstance(choice, str) else _selection(choice)
    return {"tools": tools, "tool_choice": selection, "parallel_tool_calls": body.parallel_tool_calls}


def _client_tools(tools: Sequence[Raw], field: str, namespace: str = "") -> Iterator[ClientTool]:
    types = _TYPES[:2] if namespace else _TYPES
    for number, given in enumerate(tools):
        path = f"{field}[{number}]"
        kind = parse_part(given, TypedTool, path).type or ""
        if kind.startswith(SEARCHES):
            continue
        if kind not in types:
            raise UnsupportedFeature(
                f"{path}.type: {kind[:64]!r} is not offered by this server: {', '.join(types)} are",
                field=f"{path}.type",
            )
        tool = parse_part(given, ResponsesTool, path)
        if kind == "namespace":
            yield from _client_tools(tool.tools or (), f"{path}.tools", tool.name)
        else:
            yield ClientTool(tool, namespace)


def _selection(choice: ResponsesToolChoice) -> ToolSelection | str:
    if choice.type in ("function", "custom") and choice.name is not None:
        return ToolSelection("function", ChosenFunction(function_name(choice.name, choice.namespace)))
    if choice.type.startswith(SEARCHES):
        raise left_out(choice.type, "tool_choice.type")
    if choice.type == "allowed_tools" and choice.tools:
        allowed = [
            ChosenTool("function", ChosenFunction(_name(tool, number)))
            for number, tool in enumerate(choice.tools)
            if not str(tool.get("type")).startswith(SEARCHES)
        ]
        if not allowed and choice.mode == "required":
            raise left_out(str(choice.tools[0]["type"]), "tool_choice.tools[0].type")
        if not allowed:
            return "none"
        return ToolSelection("allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", allowed))
    raise UnsupportedFeature(
        f"tool_choice.type {choice.type[:64]!r} is not offered by this server: function and custom with a "
        "name, and allowed_tools with tools are",
        field="tool_choice.type",
    )


def _name(tool: dict[str, Any], number: int) -> str:
    name, namespace = tool.get("name"), tool.get("namespace")
    if tool.get("type") not in ("function", "custom") or not isinstance(name, str):
        field = f"tool_choice.tools[{number}]"
        raise InvalidInput(f"{field} must be a function or a custom tool with a name", field=field)
    return function_name(name, namespace if isinstance(namespace, str) else None)
