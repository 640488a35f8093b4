"""The Anthropic Messages API: requests as chat completions, answers whole and as events, and its routes.

The translation and the checks of a request are those of chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from fairway.v1 import inference_pb2
from services.core.errors import (
    BudgetExceeded,
    FairwayError,
    InvalidInput,
    ThreadNotFound,
    UnsupportedFeature,
)
from services.core.generation import FinishReason, Usage
from services.gateway.events import Accepted, Finished, Tokens
from services.gateway.faces.messages.types import (
    AnswerBlock,
    CountBody,
    Message,
    MessagesBody,
    MessagesErrorBody,
    MessagesErrorDetail,
    MessagesErrorDetails,
    MessagesPart,
    MessagesTool,
    MessagesTurn,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    TokensCount,
    ToolUseBlock,
)
from services.gateway.faces.openai.errors import PARAMS, field_and_message, status_of
from services.gateway.faces.openai.exchange import (
    JSON,
    STREAM_HEADERS,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    HttpLimits,
    unless_disconnected,
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
from services.gateway.faces.transport.blocks import (
    AnswerBlocks,
    Block,
    BlockDelta,
    BlockEvent,
    BlockKind,
    BlockOpened,
    is_object,
)
from services.gateway.faces.transport.event_ids import EventNumbers, keyed_numbers
from services.gateway.faces.transport.event_stream import (
    AnswerFrames,
    CountedStreams,
    EventStream,
    answer_headers,
    collect,
    original,
)
from services.gateway.faces.transport.text_parts import ServedPart, found_text, required, text_of
from services.ports.clock import Clock
from services.runtime.ids import ANSWER_PREFIXES

# Fields of chat completions and of fairway.v1 with another name in this dialect; the first that fits.
NAMES: Final = (
    ("chat.tools", "tools"),
    ("max_output_tokens", "max_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("sampling.constraint", "output_config.format"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("chat_template_kwargs", "thinking"),
    ("chat.template_variables", "thinking"),
    ("user", "metadata.user_id"),
    ("session_key", "metadata.user_id"),
    *PARAMS,
)
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode: Final = msgspec.json.Encoder().encode
# Precedes the result of a tool that failed: chat templates have no place for that.
_ERROR: Final = "Error: "
# Blocks of tools that another server ran: of their results the text is kept.
_SERVED_CALLS: Final = ("server_tool_use", "mcp_tool_use")
_SERVED_RESULT: Final = "_tool_result"
_EFFORTS: Final = {"max": "xhigh"}
_REASONS: Final = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.FILTERED: "refusal",
}
_EMPTY: Final = Raw(b"{}")
_VERSION: Final = ("anthropic-version",)


def messages_error(error: FairwayError) -> bytes:
    """Return the JSON of an error. It omits a bug's own text and contains only its incident id."""
    status = status_of(error)
    field, message = field_and_message(error, NAMES)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, BudgetExceeded):
        kind = "billing_error"
    details = MessagesErrorDetails(error.reason.lower(), field or UNSET)
    return _encode(MessagesErrorBody(MessagesErrorDetail(kind, message, details)))


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


class _TextDelta(Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class _ThinkingDelta(Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class _InputDelta(Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


class MessageFrames(AnswerFrames):
    """The answer of one request: its blocks, its end, and the events of both."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request_id: str, numbers: EventNumbers) -> None:
        self._request_id = request_id
        self._numbers = numbers
        self._blocks = AnswerBlocks()
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None

    def on_accepted(self, number: int, accepted: Accepted) -> None:
        self._accepted = accepted
        if accepted.received_unix_us:
            self._request_id, _ = original(accepted, number)
        self._numbers.on_accepted(number, accepted.request_id)

    def opening(self) -> bytes:
        return self._event("message_start", message=self.message())

    def output(self, number: int, event: Tokens) -> bytes:
        return self._events(self._blocks.add(event))

    async def ending(self, number: int, event: Finished) -> bytes:
        last = self._events(self._blocks.end(event.choices[0]))
        self._finished = event
        message = self.message()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        end = self._event("message_delta", delta=delta, usage=message.usage)
        return last + end + (self._written("message_stop") if self._numbers.end("message_stop") else b"")

    def message(self) -> Message:
        """Return the answer so far: without content before its end, as the stream's first event has it."""
        accepted, finished = self._accepted, self._finished
        assert accepted is not None, "an answer without an acceptance"
        head: dict[str, Any] = {"id": ANSWER_PREFIXES["messages"] + self._request_id, "model": accepted.model}
        if finished is None:
            return Message(**head, content=[], usage=MessagesUsage(accepted.prompt_tokens, 0))
        result = finished.choices[0]
        reason = "stop_sequence" if result.stop else _REASONS.get(result.finish_reason, "end_turn")
        return Message(
            **head,
            content=[_block(block) for block in self._blocks.blocks],
            stop_reason=reason,
            stop_sequence=result.stop or None,
            usage=_usage(finished.usage),
        )

    def _events(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join(map(self._block_event, events))

    def _block_event(self, event: BlockEvent) -> bytes:
        if isinstance(event, BlockOpened):
            opened = _opened(event.block)
            return self._event(
                "content_block_start", event.block.name, index=event.index, content_block=opened
            )
        if isinstance(event, BlockDelta):
            text = self._numbers.rest(event.text)
            delta = _delta(event.block.kind, text)
            return self._written("content_block_delta", index=event.index, delta=delta) if text else b""
        return self._event("content_block_stop", index=event.index)

    def _event(self, name: str, /, mark: str = "", **fields: Any) -> bytes:
        """Return an event of more than a delta. ``mark`` is what two events of the same name differ by."""
        return self._written(name, **fields) if self._numbers.counts(f"{name} {mark}") else b""

    def _written(self, name: str, /, **fields: Any) -> bytes:
        body = _encode({"type": name, **fields})
        return self._numbers.id_line() + b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def _opened(block: Block) -> AnswerBlock:
    """Return a block without its content, which follows in deltas."""
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock("")
        case BlockKind.REASONING:
            return ThinkingBlock("")
        case BlockKind.CALL:
            return ToolUseBlock(block.call_id, block.name, _EMPTY)


def _block(block: Block) -> AnswerBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(block.text)
        case BlockKind.REASONING:
            return ThinkingBlock(block.text)
        case BlockKind.CALL:
            return ToolUseBlock(block.call_id, block.name, _arguments(block.text))


def _arguments(text: str) -> Raw:
    """Return the arguments of a call; none where the output was cut short in the middle of them."""
    return Raw(text.encode()) if is_object(text) else _EMPTY


def _delta(kind: BlockKind, text: str) -> _TextDelta | _ThinkingDelta | _InputDelta:
    match kind:
        case BlockKind.TEXT:
            return _TextDelta(text)
        case BlockKind.REASONING:
            return _ThinkingDelta(text)
        case BlockKind.CALL:
            return _InputDelta(text)


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.output_tokens, cached)


class MessagesFace:
    """The handlers of the routes."""

    def __init__(
        self,
        service: CountedStreams,
        clock: Clock,
        limits: HttpLimits,
        bodies: BodyReader,
        event_secret: bytes,
    ) -> None:
        """``event_secret`` keys the ids of events; the same on every gateway."""
        self._service = service
        self._clock = clock
        self._limits = limits
        self._bodies = bodies
        self._event_secret = event_secret

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        return (
            ApiEndpoint(
                "POST",
                "/v1/messages",
                Access.TENANT,
                self.create,
                "a request of Anthropic's Messages API; `stream: true` returns its events",
                error_body=messages_error,
                error_event="error",
                body=MessagesBody,
                takes=(JSON,),
                headers=(*STREAM_HEADERS, *_VERSION),
                answer=Message,
                error=MessagesErrorBody,
                streams=True,
            ),
            ApiEndpoint(
                "POST",
                "/v1/messages/count_tokens",
                Access.TENANT,
                self.count,
                "what decides the prompt of such a request; returns its tokens",
                error_body=messages_error,
                body=CountBody,
                takes=(JSON,),
                headers=_VERSION,
                answer=TokensCount,
                error=MessagesErrorBody,
            ),
        )

    async def create(self, exchange: Exchange) -> None:
        _add_request_id(exchange)
        timeout_s = exchange.headers.timeout_s()
        request = await self._bodies.read(exchange, self._limits, messages_request)
        generation = request.generations[0]
        exchange.headers.apply_to(generation)
        numbers = keyed_numbers(exchange, self._event_secret, "messages", stream=request.stream)
        frames = MessageFrames(exchange.received.request_id, numbers)
        source = self._service.stream(
            exchange.caller,
            generation,
            received=replace(exchange.received, delivered=numbers.delivered()),
            timeout_s=timeout_s,
            withdraws=exchange.withdrawn,
        )
        if request.stream:
            due_s = exchange.received.monotonic_s + self._limits.status_wait_s
            stream = EventStream(frames, exchange.reply, lambda: self._clock.monotonic_s() >= due_s)
            await unless_disconnected(exchange.receive, exchange.reply, stream.run([source]))
            return
        accepted = await unless_disconnected(exchange.receive, exchange.reply, collect(source, frames))
        for header in answer_headers(accepted):
            exchange.reply.add_header(*header)
        await exchange.reply.json(200, _encode(frames.message()))

    async def count(self, exchange: Exchange) -> None:
        _add_request_id(exchange)
        request = await self._bodies.read(exchange, self._limits, count_request)
        work = self._service.count_tokens(exchange.caller, request)
        _, tokens = await unless_disconnected(exchange.receive, exchange.reply, work)
        await exchange.reply.json(200, _encode(TokensCount(tokens)))


def _add_request_id(exchange: Exchange) -> None:
    """Name the request where Anthropic's clients look for it."""
    exchange.reply.add_header(b"request-id", exchange.received.request_id.encode())
