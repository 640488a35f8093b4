"""Converts the Responses dialect to a request of chat completions, whose translation and checks it shares.

Its tools are those of chat completions: functions, which the client runs. A custom tool is a function of one
text. The functions of a namespace have its name before theirs. A search that a server runs is left out: the
model does not call it. ``client_tools`` turns calls back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw, structs

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.requests import chat_of
from services.gateway.faces.openai.types import (
    SEARCHES,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ChatTurn,
    ChosenFunction,
    ChosenTool,
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
from services.gateway.faces.responses.types import (
    ModelResponse,
    PromptFields,
    ResponsesBody,
    ResponsesItem,
    ResponsesPart,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)
from services.gateway.faces.transport.text_parts import ServedPart, found_text, required, text_of
from services.gateway.requests.tool_use import MAX_SCHEMA_DEPTH, depth_of

_TYPES: Final = ("function", "custom", "namespace")
_TEXT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_CALLS: Final = ("function_call", "custom_tool_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
# Types of calls that another server's tools ran; the text that they found is part of the turn.
_SERVED: Final = (
    *("web_search_call", "tool_search_call", "tool_search_output", "file_search_call", "mcp_list_tools"),
    *("mcp_call", "code_interpreter_call", "image_generation_call"),
)
_KNOWN: Final = ("message", "reasoning", *_CALLS, *_OUTPUTS)
_KINDS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
# Parts of an answer that only tools of a server have, or that the answer has in clear.
_INCLUDED: Final = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
_encode: Final = msgspec.json.Encoder().encode
_items: Final = msgspec.json.Decoder(list[list[ResponsesItem]]).decode


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


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request whose conversation is complete.

    ``head``: the response as it begins, without id, time and served model. ``items``: its own input items.
    """

    generation: inference_pb2.Generation
    head: ModelResponse
    items: tuple[ResponsesItem, ...]

    def digest(self) -> bytes:
        """Return a hash of everything that a repetition under the same idempotency key must have too."""
        generation = inference_pb2.Generation()
        generation.CopyFrom(self.generation)
        generation.ClearField("idempotency_key")
        found = hashlib.sha256(generation.SerializeToString(deterministic=True))
        found.update(_encode((self.head, self.items)))
        return found.digest()


def responses_body(data: bytes) -> ResponsesBody:
    """Return a body of /v1/responses. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ResponsesBody)
    if body.stream_options is not None:
        require_neutral(body.stream_options, "stream_options.")
    for number, included in enumerate(body.include or ()):
        if included not in _INCLUDED:
            raise UnsupportedFeature(
                f"include: {included[:64]!r} is not offered by this server", field=f"include[{number}]"
            )
    if depth_of(body.metadata) > MAX_SCHEMA_DEPTH:  # every answer repeats it
        raise InvalidInput(
            f"metadata is nested more than {MAX_SCHEMA_DEPTH} levels deep: send it as a text",
            field="metadata",
        )
    if body.background and body.store is False:
        raise InvalidInput("background needs store: its answer is retrieved", field="background")
    return body


def responses_request(body: ResponsesBody, earlier: bytes) -> ResponsesRequest:
    """Return the request. ``earlier``: JSON of the lists of items that it continues.

    Raises InvalidInput, UnsupportedFeature.
    """
    items = items_of(body.input)
    own = structs.replace(
        _chat(body, items, earlier),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        safety_identifier=body.safety_identifier,
        service_tier=body.service_tier,
        seed=body.seed,
        stop=body.stop,
        top_k=body.top_k,
        min_p=body.min_p,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
    )
    return ResponsesRequest(chat_of(own).generations[0], _head(body), tuple(items))


def prompt_fields(data: bytes) -> PromptFields:
    """Return a body of /v1/responses/input_tokens. Raises InvalidInput, UnsupportedFeature."""
    return parse_body(data, PromptFields)


def tokens_request(body: PromptFields, earlier: bytes) -> inference_pb2.CountTokensRequest:
    """Return the request that counts the tokens of a prompt. ``earlier`` as in ``responses_request``."""
    generation = chat_of(_chat(body, items_of(body.input), earlier)).generations[0]
    return inference_pb2.CountTokensRequest(model=generation.model, chat=generation.chat)


def _chat(body: PromptFields, own: Sequence[ResponsesItem], earlier: bytes) -> ChatBody:
    if not own:
        raise InvalidInput("input is empty", field="input")
    turns: list[ChatTurn] = []
    if body.instructions:
        turns.append(ChatTurn("system", body.instructions))
    before = [item for items in _items(earlier) for item in items]
    # Together, so that a call and what goes with it are one turn; the paths are those of the own items.
    turns += turns_of(before, "previous_response_id") + turns_of(own, "input")
    found = tool_fields(body)
    if body.text is not None and body.text.format is not None:
        found["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        found["reasoning_effort"] = body.reasoning.effort
    kwargs = body.chat_template_kwargs
    return ChatBody(model=body.model, messages=turns, chat_template_kwargs=kwargs, **found)


def _format(requested: TextFormat) -> ResponseFormat:
    if requested.type != "json_schema":
        return ResponseFormat(requested.type)
    if requested.schema is None or requested.name is None:
        missing = "text.format.name" if requested.name is None else "text.format.schema"
        raise InvalidInput(f"{missing} is required", field=missing)
    return ResponseFormat("json_schema", JsonSchemaFormat(requested.name, requested.schema, requested.strict))


def _head(body: ResponsesBody) -> ModelResponse:
    """Return the response as it begins. Its id, time and served model are set when they are decided."""
    requested = body.text.format if body.text is not None else None
    text: dict[str, Any] = {"format": requested if requested is not None else {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    reasoning = {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None}
    return ModelResponse(
        id="",
        created_at=0,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=Raw(_encode(reasoning)),
        service_tier=body.service_tier if body.service_tier not in (None, "auto") else "default",
        store=body.store is not False,
        temperature=body.temperature,
        text=Raw(_encode(text)),
        tool_choice=Raw(_encode(body.tool_choice if body.tool_choice is not None else "auto")),
        tools=Raw(_encode(body.tools or [])),
        top_p=body.top_p,
        user=body.user,
    )
