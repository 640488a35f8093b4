"""An output as a sequence of blocks: text, reasoning and calls of tools, in the order of the output.

The blocks depend only on the output, not on how it was split into events: a stream that is read again has
the same blocks and the same deltas, put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText
from services.core.generation import FinishReason
from services.gateway.events import ChoiceResult, Tokens


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """``texts``: its pieces so far; of a call the arguments. ``call``: the call's number in the output.

    ``cut``: the output reached its longest length within the block, or a safety pack ended it there.
    """

    kind: BlockKind
    call: int = -1
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing from a call; of text that is not known."""
        return self.kind is BlockKind.CALL and is_object(self.text)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    index: int
    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    index: int
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    index: int
    block: Block


BlockEvent = BlockOpened | BlockDelta | BlockClosed


class AnswerBlocks:
    """The blocks of one choice of a request for parts. At most one is open, the last."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def add(self, event: Tokens) -> Iterator[BlockEvent]:
        """Add output and yield what follows from it."""
        yield from self._add(event.parts)

    def end(self, result: ChoiceResult) -> Iterator[BlockEvent]:
        """Add the last output, and close the open block, if there is one."""
        yield from self._add(result.parts)
        if self._open:
            cut = result.finish_reason in (FinishReason.LENGTH, FinishReason.FILTERED)
            self.blocks[-1].cut = cut and not self.blocks[-1].is_whole
        yield from self._close()

    def _add(self, parts: Iterable[OutputPart]) -> Iterator[BlockEvent]:
        for part in parts:
            kind, call = _place(part)
            last = self.blocks[-1] if self._open else None
            if last is None or (last.kind, last.call) != (kind, call):
                if isinstance(part, ContentText | ReasoningText) and not part.text:
                    continue
                yield from self._close()
                yield self._begin(kind, call, part)
            block, text = self.blocks[-1], _text(part)
            if text:
                block.texts.append(text)
                yield BlockDelta(len(self.blocks) - 1, block, text)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open:
            self._open = False
            yield BlockClosed(len(self.blocks) - 1, self.blocks[-1])

    def _begin(self, kind: BlockKind, call: int, part: OutputPart) -> BlockOpened:
        block = Block(kind, call)
        if isinstance(part, CallDelta):
            block.call_id, block.name = part.id, part.name
        self.blocks.append(block)
        self._open = True
        return BlockOpened(len(self.blocks) - 1, block)


def _place(part: OutputPart) -> tuple[BlockKind, int]:
    if isinstance(part, CallDelta):
        return BlockKind.CALL, part.index
    return (BlockKind.TEXT if isinstance(part, ContentText) else BlockKind.REASONING), -1


def _text(part: OutputPart) -> str:
    return part.arguments if isinstance(part, CallDelta) else part.text
