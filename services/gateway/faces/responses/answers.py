"""Answers in the Responses dialect: whole, and as the numbered events of a stream.

Their numbers are those of ``EventNumbers``, by which a stream that is read again, on any gateway, continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, structs

from services.core.errors import FairwayError, InternalError
from services.core.generation import FinishReason
from services.gateway.events import Accepted, Finished, Tokens
from services.gateway.faces.openai.errors import public_message
from services.gateway.faces.responses.requests import (
    ClientTool,
    client_tools,
    function_name,
    text_arguments,
    text_of_arguments,
)
from services.gateway.faces.responses.types import (
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    ModelResponse,
    OutputItem,
    OutputRefusal,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningPart,
    ResponsesFailure,
    ResponsesUsage,
)
from services.gateway.faces.transport.blocks import (
    AnswerBlocks,
    Block,
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockKind,
    BlockOpened,
)
from services.gateway.faces.transport.event_ids import EventNumbers
from services.gateway.faces.transport.event_stream import AnswerFrames, original
from services.runtime.ids import ANSWER_PREFIXES

_DELTAS: Final = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}
_CUSTOM: Final = "response.custom_tool_call_input"
_ITEM_PREFIXES: Final = {BlockKind.TEXT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}
_REFUSAL: Final = "A safety policy ended this output."
_INCOMPLETE: Final = {FinishReason.LENGTH: "max_output_tokens", FinishReason.FILTERED: "content_filter"}
_encode: Final = msgspec.json.Encoder().encode

# Called with the complete response, before its client receives it. Returns whether it is stored.
Keep = Callable[[ModelResponse], Awaitable[bool]]


class ResponseEvents:
    """Writes the numbered events of one response, those that its client lacks."""

    def __init__(self, numbers: EventNumbers) -> None:
        self._numbers = numbers

    def on_accepted(self, request_id: str) -> None:
        self._numbers.on_accepted(0, request_id)

    def opening(self, response: ModelResponse) -> bytes:
        begun = self._event("response.created", response=response)
        return begun + self._event("response.in_progress", response=response)

    def block(self, response_id: str, event: BlockEvent, tools: Mapping[str, ClientTool]) -> bytes:
        """Return the events of output."""
        item = _item(response_id, event.index, event.block, tools, is_open=not isinstance(event, BlockClosed))
        place = {"item_id": item.id, "output_index": event.index}
        if isinstance(event, BlockDelta):
            # The text of a custom tool is in its arguments, and follows when they are complete.
            is_custom = isinstance(item, CustomCallItem)
            return b"" if is_custom else self._delta(_DELTAS[event.block.kind], place, event.text)
        if isinstance(event, BlockOpened):
            added = self._event(
                "response.output_item.added", event.block.name, output_index=event.index, item=item
            )
            return added + self._part("response.content_part.added", place, event.block.kind, "")
        return self._closed(event, place, item)

    def refusal(self, index: int, item: MessageItem, text: str) -> bytes:
        """Return the events of an item that states why the output ended."""
        part: dict[str, Any] = {"item_id": item.id, "output_index": index, "content_index": 0}
        begun = structs.replace(item, status="in_progress", content=[])
        opened = self._event("response.output_item.added", output_index=index, item=begun)
        opened += self._event("response.content_part.added", **part, part=OutputRefusal(""))
        delta = self._delta("response.refusal", part, text)
        done = self._event("response.refusal.done", **part, refusal=text)
        done += self._event("response.content_part.done", **part, part=OutputRefusal(text))
        return opened + delta + done + self._event("response.output_item.done", output_index=index, item=item)

    def end(self, response: ModelResponse) -> bytes:
        """Return the last event, also to a client that has others of its number."""
        name = f"response.{response.status}"
        return self._written(name, response=response) if self._numbers.end(name) else b""

    def failure(self, response: ModelResponse) -> bytes:
        """Return the end of a stream that an error ends."""
        self._numbers.fail()
        return self._written(f"response.{response.status}", response=response)

    def _closed(self, event: BlockClosed, place: dict[str, Any], item: OutputItem) -> bytes:
        block, text = event.block, event.block.text
        name = f"{_DELTAS[block.kind]}.done"
        if isinstance(item, CustomCallItem):
            done = self._delta(_CUSTOM, place, item.input)
            done += self._event(f"{_CUSTOM}.done", **place, input=item.input)
        elif isinstance(item, FunctionCallItem):
            done = self._event(name, **place, name=item.name, arguments=text)
        elif block.kind is BlockKind.TEXT:
            done = self._event(name, **place, content_index=0, text=text, logprobs=())
        else:
            done = self._event(name, **place, content_index=0, text=text)
        part = self._part("response.content_part.done", place, block.kind, text)
        return done + part + self._event("response.output_item.done", output_index=event.index, item=item)

    def _part(self, name: str, place: dict[str, Any], kind: BlockKind, text: str) -> bytes:
        """Return the event of a part of an item; a call has none."""
        if kind is BlockKind.CALL:
            return b""
        part = OutputText(text) if kind is BlockKind.TEXT else ReasoningPart(text)
        return self._event(name, **place, content_index=0, part=part)

    def _delta(self, name: str, place: dict[str, Any], text: str) -> bytes:
        text = self._numbers.rest(text)
        if not text:
            return b""
        if name in (_DELTAS[BlockKind.TEXT], _DELTAS[BlockKind.REASONING]):
            place = {**place, "content_index": 0}
        if name == _DELTAS[BlockKind.TEXT]:
            place["logprobs"] = ()
        return self._written(f"{name}.delta", **place, delta=text)

    def _event(self, name: str, /, mark: str = "", **fields: Any) -> bytes:
        """Return an event of more than a delta. ``mark`` is what two events of the same name differ by."""
        return self._written(name, **fields) if self._numbers.counts(f"{name} {mark}") else b""

    def _written(self, name: str, /, **fields: Any) -> bytes:
        body = _encode({"type": name, "sequence_number": self._numbers.number, **fields})
        return self._numbers.id_line() + b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


class ResponseFrames(AnswerFrames):
    """The answer of one request: its items, its end, and the events of both."""

    def __init__(
        self,
        head: ModelResponse,
        *,
        request_id: str,
        keep: Keep,
        events: ResponseEvents,
        now_s: Callable[[], float],
    ) -> None:
        """``head``: the response as it begins; without an id it takes that of the request."""
        self.response = head
        self._request_id = request_id
        self._tools = client_tools(head.tools)
        self._blocks = AnswerBlocks()
        self._keep = keep
        self._out = events
        self._now_s = now_s

    def on_accepted(self, number: int, accepted: Accepted) -> None:
        found: dict[str, Any] = {"model": accepted.model, "status": "in_progress"}
        if not self.response.created_at:
            request_id, created_unix_s = self._request_id, int(self._now_s())
            if accepted.received_unix_us:
                request_id, created_unix_s = original(accepted, number)
            found |= {"id": ANSWER_PREFIXES["responses"] + request_id, "created_at": created_unix_s}
        self.response = structs.replace(self.response, **found)
        self._out.on_accepted(accepted.request_id)

    def opening(self) -> bytes:
        return self._out.opening(self.response)

    def output(self, number: int, event: Tokens) -> bytes:
        return self._events(self._blocks.add(event))

    async def ending(self, number: int, event: Finished) -> bytes:
        last = self._events(self._blocks.end(event.choices[0]))
        items, cut = self._items(), _INCOMPLETE.get(event.choices[0].finish_reason)
        if event.choices[0].finish_reason is FinishReason.FILTERED:
            refusal = _refusal(self.response.id, len(items))
            last += self._out.refusal(len(items), refusal, _REFUSAL)
            items.append(refusal)
        self.response = structs.replace(
            self.response,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails(cut) if cut else None,
            completed_at=None if cut else int(self._now_s()),
            output=items,
            usage=_usage(event),
        )
        if self.response.store and not await self._keep(self.response):
            self.response = structs.replace(self.response, store=False)
        return last + self._out.end(self.response)

    def failed(self, error: FairwayError) -> bytes:
        return self._out.failure(failed_response(self.response, error))

    def _events(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join(self._out.block(self.response.id, event, self._tools) for event in events)

    def _items(self) -> list[OutputItem]:
        return [
            _item(self.response.id, index, block, self._tools, is_open=False)
            for index, block in enumerate(self._blocks.blocks)
        ]


def failed_response(head: ModelResponse, error: FairwayError) -> ModelResponse:
    """Return a response that ended with an error."""
    code = "server_error" if isinstance(error, InternalError) else error.reason.lower()
    failure = ResponsesFailure(code, public_message(error))
    return structs.replace(head, status="failed", error=failure, store=head.store and head.background)


def replayed(response: ModelResponse, events: ResponseEvents) -> bytes:
    """Return the stream of a response that has ended: the events that its first stream had."""
    begun = structs.replace(
        response,
        status="in_progress",
        output=[],
        usage=None,
        completed_at=None,
        incomplete_details=None,
        error=None,
    )
    found, tools = [events.opening(begun)], client_tools(response.tools)
    for index, item in enumerate(response.output):
        if isinstance(item, MessageItem) and isinstance(said := item.content[0], OutputRefusal):
            found.append(events.refusal(index, item, said.refusal))
            continue
        block = _block(item)
        for event in (
            BlockOpened(index, block),
            BlockDelta(index, block, block.text),
            BlockClosed(index, block),
        ):
            found.append(events.block(response.id, event, tools))
    return b"".join((*found, events.end(response)))


def _block(item: OutputItem) -> Block:
    cut = item.status == "incomplete"
    match item:
        case MessageItem():
            texts = [part.text for part in item.content if isinstance(part, OutputText)]
            return Block(BlockKind.TEXT, texts=texts, cut=cut)
        case ReasoningItem():
            return Block(BlockKind.REASONING, texts=[part.text for part in item.content], cut=cut)
        case FunctionCallItem():
            name = function_name(item.name, item.namespace or None)
            return Block(BlockKind.CALL, call_id=item.call_id, name=name, texts=[item.arguments], cut=cut)
        case CustomCallItem():
            arguments = text_arguments(item.input)
            name = function_name(item.name, item.namespace or None)
            return Block(BlockKind.CALL, call_id=item.call_id, name=name, texts=[arguments], cut=cut)


def _refusal(response_id: str, index: int) -> MessageItem:
    """Return the item that follows an output which a safety pack ended."""
    number = f"{response_id.removeprefix(ANSWER_PREFIXES['responses'])}_{index}"
    return MessageItem(f"{_ITEM_PREFIXES[BlockKind.TEXT]}{number}", "completed", [OutputRefusal(_REFUSAL)])


def _item(
    response_id: str, index: int, block: Block, tools: Mapping[str, ClientTool], *, is_open: bool
) -> OutputItem:
    number = f"{response_id.removeprefix(ANSWER_PREFIXES['responses'])}_{index}"
    item_id, text = f"{_ITEM_PREFIXES[block.kind]}{number}", "" if is_open else block.text
    status = "in_progress" if is_open else "incomplete" if block.cut else "completed"
    match block.kind:
        case BlockKind.TEXT:
            return MessageItem(item_id, status, [] if is_open else [OutputText(text)])
        case BlockKind.REASONING:
            return ReasoningItem(item_id, status, [] if is_open else [ReasoningPart(text)])
        case BlockKind.CALL:
            called = tools.get(block.name)
            if called is None:
                return FunctionCallItem(item_id, status, block.call_id, block.name, text)
            name, namespace = called.tool.name, called.namespace or UNSET
            if called.is_custom:
                text = "" if is_open else text_of_arguments(text)
                return CustomCallItem(f"ctc_{number}", status, block.call_id, name, text, namespace)
            return FunctionCallItem(item_id, status, block.call_id, name, text, namespace)


def _usage(finished: Finished) -> ResponsesUsage:
    usage, reasoning = finished.usage, finished.choices[0].reasoning_tokens
    return ResponsesUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.output_tokens,
        OutputTokensDetails(UNSET if reasoning is None else reasoning),
        usage.prompt_tokens + usage.output_tokens,
    )
