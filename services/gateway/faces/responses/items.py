"""Items of the Responses API as turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Raw

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import (
    CalledFunction,
    ChatTurn,
    MadeCall,
    TypedTool,
    parse_part,
    require_neutral,
)
from services.gateway.faces.responses.tools import function_name, text_arguments
from services.gateway.faces.responses.types import ResponsesItem, ResponsesPart
from services.gateway.faces.transport.text_parts import ServedPart, found_text, required, text_of

_CALLS: Final = ("function_call", "custom_tool_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
# Types of calls that another server's tools ran; the text that they found is part of the turn.
_SERVED: Final = (
    *("web_search_call", "tool_search_call", "tool_search_output", "file_search_call", "mcp_list_tools"),
    *("mcp_call", "code_interpreter_call", "image_generation_call"),
)
_KNOWN: Final = ("message", "reasoning", *_CALLS, *_OUTPUTS)
_KINDS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


@dataclass(slots=True)
class _Assistant:
    """One turn of the assistant, from consecutive items."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[MadeCall] = field(default_factory=list)

    def turn(self) -> ChatTurn:
        return ChatTurn(
            "assistant",
            "".join(self.texts) if self.texts or not self.calls else None,
            tool_calls=self.calls or None,
            reasoning_content="".join(self.reasoning) or None,
        )


def items_of(given: str | Sequence[Raw]) -> list[ResponsesItem]:
    """Return the items of an input. Raises InvalidInput, UnsupportedFeature."""
    if isinstance(given, str):
        return [ResponsesItem(role="user", content=[ResponsesPart("input_text", given)])]
    found = []
    for number, item in enumerate(given):
        path = f"input[{number}]"
        kind = parse_part(item, TypedTool, path).type
        if kind in _SERVED:
            served = parse_part(item, ServedPart, path)
            text = found_text(served, path) or None
            found.append(ResponsesItem(kind, served.id, served.status, action=served.action, output=text))
        elif kind is None or kind in _KNOWN:
            found.append(parse_part(item, ResponsesItem, path))
        else:
            raise _unserved(kind, f"{path}.")
    return found


def turns_of(items: Sequence[ResponsesItem], name: str) -> list[ChatTurn]:
    """Return the turns of items. ``name`` is the field's that has them. Raises InvalidInput,
    UnsupportedFeature.

    Consecutive items of the assistant are one turn: its reasoning, a message and its calls.
    """
    turns: list[ChatTurn] = []
    assistant: _Assistant | None = None
    for number, item in enumerate(items):
        path = f"{name}[{number}]."
        require_neutral(item, path)
        if item.type in _SERVED and not item.output:
            continue
        if item.type in (*_CALLS, *_SERVED, "reasoning") or item.role == "assistant":
            # A message or new reasoning after calls begins another turn.
            if assistant is not None and assistant.calls and item.type not in (*_CALLS, *_SERVED):
                turns.append(assistant.turn())
                assistant = None
            assistant = assistant or _Assistant()
            _add(assistant, item, path)
            continue
        if assistant is not None:
            turns.append(assistant.turn())
            assistant = None
        turns.append(_other(item, path))
    if assistant is not None:
        turns.append(assistant.turn())
    return turns


def _add(assistant: _Assistant, item: ResponsesItem, path: str) -> None:
    if item.type in _CALLS:
        arguments = item.arguments or ""
        if item.type == "custom_tool_call":
            arguments = text_arguments(required(item.input, f"{path}input"))
        name = function_name(required(item.name, f"{path}name"), item.namespace)
        called = CalledFunction(name, arguments)
        assistant.calls.append(MadeCall(called, required(item.call_id, f"{path}call_id")))
    elif item.type == "reasoning":
        assistant.reasoning.append(_text(item.content, f"{path}content"))
    elif item.type == "message":
        assistant.texts.append(_text(item.content, f"{path}content"))
    elif item.type in _SERVED:
        assistant.texts.append(_text(item.output, f"{path}output") + "\n")
    else:
        raise _unserved(item.type, path)


def _other(item: ResponsesItem, path: str) -> ChatTurn:
    if item.type in _OUTPUTS:
        call_id = required(item.call_id, f"{path}call_id")
        return ChatTurn("tool", _text(item.output, f"{path}output"), tool_call_id=call_id)
    if item.type != "message":
        raise _unserved(item.type, path)
    role = required(item.role, f"{path}role")
    if role not in ("user", "system", "developer"):
        raise InvalidInput(f"{path}role: {role[:64]!r} is no role of a message", field=f"{path}role")
    if item.content is None:
        raise InvalidInput(f"{path}content is required", field=f"{path}content")
    return ChatTurn(role, _text(item.content, f"{path}content"))


def _text(content: str | Sequence[ResponsesPart] | None, path: str) -> str:
    if content is None:
        return ""
    return text_of(content, path, _KINDS, lambda part: part.refusal if part.type == "refusal" else part.text)


def _unserved(kind: str, path: str) -> UnsupportedFeature:
    instead = ": send the item itself, as SDKs do with store: false" if kind == "item_reference" else ""
    return UnsupportedFeature(
        f"{path}type: {kind[:64]!r} is not offered by this server{instead}", field=f"{path}type"
    )
