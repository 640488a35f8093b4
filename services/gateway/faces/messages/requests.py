"""Converts the Messages dialect to a request of chat completions, whose translation and checks it shares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, ThreadNotFound, UnsupportedFeature
from services.gateway.faces.messages.types import (
    CountBody,
    MessagesBody,
    MessagesPart,
    MessagesTool,
    MessagesTurn,
)
from services.gateway.faces.openai.requests import ApiRequest, chat_of
from services.gateway.faces.openai.types import (
    SEARCHES,
    CalledFunction,
    ChatBody,
    ChatTurn,
    ChosenFunction,
    JsonSchemaFormat,
    MadeCall,
    OfferedFunction,
    OfferedTool,
    ResponseFormat,
    ToolSelection,
    TypedTool,
    left_out,
    parse_body,
    parse_part,
    require_neutral,
)
from services.gateway.faces.transport.text_parts import ServedPart, found_text, required, text_of

# Precedes the result of a tool that failed: chat templates have no place for that.
_ERROR: Final = "Error: "
# Blocks of tools that another server ran: of their results the text is kept.
_SERVED_CALLS: Final = ("server_tool_use", "mcp_tool_use")
_SERVED_RESULT: Final = "_tool_result"
_EFFORTS: Final = {"max": "xhigh"}


def messages_request(data: bytes) -> ApiRequest:
    """Return the request of a /v1/messages body. Raises InvalidInput, ThreadNotFound, UnsupportedFeature."""
    body = parse_body(data, MessagesBody)
    if body.thread is not None and body.thread.type == "continue":
        raise ThreadNotFound(
            "thread: no thread is held by this server: send all messages", field="thread.previous_message_id"
        )
    user = body.metadata.user_id if body.metadata is not None else None
    return chat_of(
        msgspec.structs.replace(
            _chat(body),
            max_completion_tokens=body.max_tokens,
            stream=body.stream,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            user=user,
        )
    )


def count_request(data: bytes) -> inference_pb2.CountTokensRequest:
    """Return the request of a /v1/messages/count_tokens body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, CountBody)
    generation = chat_of(_chat(body)).generations[0]
    return inference_pb2.CountTokensRequest(model=generation.model, chat=generation.chat)


def _chat(body: CountBody) -> ChatBody:
    if not body.messages:
        raise InvalidInput("messages is empty", field="messages")
    if body.messages[-1].role == "assistant":
        raise UnsupportedFeature(
            "messages: a last turn of the assistant, to be continued, is not offered by this server",
            field=f"messages[{len(body.messages) - 1}].role",
        )
    _check_context(body)
    turns: list[ChatTurn] = []
    if body.system is not None:
        turns.append(ChatTurn("system", _text_of(body.system, "system")))
    for index, turn in enumerate(body.messages):
        turns += _turns(turn, f"messages[{index}].")
    found = _tools(body)
    if body.thinking is not None:
        found["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config
    if config is not None:
        require_neutral(config, "output_config.")
        if config.format is not None:
            schema = JsonSchemaFormat("output", config.format.schema)
            found["response_format"] = ResponseFormat("json_schema", schema)
        if config.effort is not None:
            found["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    return ChatBody(model=body.model, messages=turns, **found)


def _check_context(body: CountBody) -> None:
    """Raise UnsupportedFeature for an edit that would take something out of the conversation."""
    edits = body.context_management.edits if body.context_management is not None else ()
    for number, edit in enumerate(edits):
        if not edit.type.startswith("clear_thinking") or edit.keep != "all":
            field = f"context_management.edits[{number}]"
            raise UnsupportedFeature(
                f"{field}: {edit.type[:64]!r} is not offered by this server: edit the messages",
                field=field,
            )


def _tools(body: CountBody) -> dict[str, Any]:
    """Return the tools and the choice among them. Raises InvalidInput, UnsupportedFeature."""
    tools, searches = [], dict[str | None, str]()
    for number, given in enumerate(body.tools or ()):
        path = f"tools[{number}]"
        typed = parse_part(given, TypedTool, path)
        kind = typed.type
        if kind is not None and kind.startswith(SEARCHES):
            searches[typed.name] = kind
            continue
        if kind not in (None, "custom"):
            raise UnsupportedFeature(
                f"{path}.type: {kind[:64]!r} is not offered by this server: the client's tools are",
                field=f"{path}.type",
            )
        tool = parse_part(given, MessagesTool, path)
        function = OfferedFunction(tool.name, tool.description, tool.input_schema, tool.strict)
        tools.append(OfferedTool("function", function))
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools}
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidInput("tool_choice.name is of the type tool", field="tool_choice.name")
    selection: str | ToolSelection = "required" if choice.type == "any" else choice.type
    if choice.name is not None:
        if choice.name in searches:
            raise left_out(searches[choice.name], "tool_choice.name")
        selection = ToolSelection("function", ChosenFunction(choice.name))
    single = bool(choice.disable_parallel_tool_use)
    return {"tools": tools, "tool_choice": selection, "parallel_tool_calls": not single}


def _turns(turn: MessagesTurn, path: str) -> Iterator[ChatTurn]:
    """Yield the turns of a message: each result of a tool is a turn of its own, before the text."""
    if isinstance(turn.content, str):
        yield ChatTurn(turn.role, turn.content)
        return
    if not turn.content and turn.role != "assistant":  # an answer may have been empty
        raise InvalidInput(f"{path}content is empty", field=f"{path}content")
    found = _Parts()
    for number, part in enumerate(turn.content):
        _read(part, turn.role, f"{path}content[{number}]", found)
    yield from found.results
    if found.texts or found.calls or found.thinking or turn.role == "assistant":
        text = "".join(found.texts)
        yield ChatTurn(
            turn.role,
            text if found.texts or not found.calls else None,
            tool_calls=found.calls or None,
            reasoning_content="".join(found.thinking) or None,
        )


@dataclass(slots=True)
class _Parts:
    """The blocks of a message, by kind."""

    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[MadeCall] = field(default_factory=list)
    results: list[ChatTurn] = field(default_factory=list)


def _read(given: Raw, role: str, path: str, found: _Parts) -> None:
    kind = parse_part(given, TypedTool, path).type or ""
    if kind == "container_upload" or (role == "assistant" and kind in _SERVED_CALLS):
        return
    if role == "assistant" and kind.endswith(_SERVED_RESULT):
        found.texts.append(found_text(parse_part(given, ServedPart, path), path) + "\n")
        return
    part, path = parse_part(given, MessagesPart, path), f"{path}."
    match part.type, role:
        case "text", _:
            found.texts.append(required(part.text, f"{path}text"))
        case "thinking", "assistant":
            found.thinking.append(required(part.thinking, f"{path}thinking"))
        case "redacted_thinking", "assistant":  # No model here reads what another server wrote.
            pass
        case "tool_use", "assistant":
            name = required(part.name, f"{path}name")
            written = part.input
            arguments = written if isinstance(written, str) else json.dumps(written or {}, ensure_ascii=False)
            found.calls.append(MadeCall(CalledFunction(name, arguments), required(part.id, f"{path}id")))
        case "tool_result", "user":
            content = "" if part.content is None else _text_of(part.content, f"{path}content")
            call_id = required(part.tool_use_id, f"{path}tool_use_id")
            if found.texts:
                raise InvalidInput(f"{path}type: results of tools precede the text", field=f"{path}type")
            if part.is_error:
                content = f"{_ERROR}{content}"
            found.results.append(ChatTurn("tool", content, tool_call_id=call_id))
        case _:
            raise UnsupportedFeature(
                f"{path}type: {part.type[:64]!r} of the {role} is not offered by this server",
                field=f"{path}type",
            )


def _text_of(content: str | Sequence[MessagesPart], path: str) -> str:
    return text_of(
        content,
        path,
        ("text", "tool_reference"),
        lambda part: part.tool_name if part.type == "tool_reference" else part.text,
    )
