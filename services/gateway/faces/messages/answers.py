"""Answers in the Messages dialect: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from services.core.errors import FairwayError
from services.core.generation import FinishReason, Usage
from services.gateway.events import Accepted, Finished, Tokens
from services.gateway.faces.messages.errors import messages_error
from services.gateway.faces.messages.types import (
    AnswerBlock,
    Message,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from services.gateway.faces.openai.event_stream import original
from services.gateway.faces.transport.blocks import (
    AnswerBlocks,
    Block,
    BlockDelta,
    BlockEvent,
    BlockKind,
    BlockOpened,
    is_object,
)
from services.gateway.faces.transport.event_numbers import EventNumbers
from services.runtime.ids import ANSWER_PREFIXES

_REASONS: Final = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_encode: Final = msgspec.json.Encoder().encode
_EMPTY: Final = Raw(b"{}")


class _TextDelta(Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class _ThinkingDelta(Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class _InputDelta(Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


class MessageFrames:
    """The answer of one request: its blocks, its end, and the events of both."""

    keep_alive: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request_id: str, numbers: EventNumbers) -> None:
        self._request_id = request_id
        self._numbers = numbers
        self._blocks = AnswerBlocks()
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None

    def on_accepted(self, accepted: Accepted) -> None:
        self._accepted = accepted
        if accepted.received_unix_us:
            self._request_id, _ = original(accepted, 0)
        self._numbers.on_accepted(accepted.request_id)

    def opening(self) -> bytes:
        return self._event("message_start", message=self.message())

    def output(self, event: Tokens) -> bytes:
        return self._events(self._blocks.add(event))

    async def ending(self, event: Finished) -> bytes:
        last = self._events(self._blocks.end(event.choices[0]))
        self._finished = event
        message = self.message()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        end = self._event("message_delta", delta=delta, usage=message.usage)
        return last + end + (self._written("message_stop") if self._numbers.end("message_stop") else b"")

    def failed(self, error: FairwayError) -> bytes:
        return b"event: error\ndata: " + messages_error(error) + b"\n\n"

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
