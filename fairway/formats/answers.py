"""An output by its meaning: content, reasoning and calls of tools, in parts and as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is a JSON object, or empty."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of an output that is neither reasoning nor a call."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of what the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The next piece of call ``index`` of a choice. Only the first piece of a call has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


OutputPart = ContentText | ReasoningText | CallDelta


@dataclass(frozen=True, slots=True)
class AssistantAnswer:
    """A whole output by its meaning."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def answer_of(parts: Iterable[OutputPart]) -> AssistantAnswer:
    """Return the output that the parts of a choice make up, in their order."""
    content: list[str] = []
    reasoning: list[str] = []
    heads: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallDelta(index):
                heads.setdefault(index, part)
                arguments.setdefault(index, []).append(part.arguments)
    calls = (ToolCall(head.id, head.name, "".join(arguments[index])) for index, head in heads.items())
    return AssistantAnswer("".join(content), "".join(reasoning), tuple(calls))
