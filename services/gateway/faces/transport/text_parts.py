"""Texts of request bodies that come whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct, structs

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import Short, require_neutral

# The fields of what a tool found that have its texts, in the order in which they are read.
_FOUND: Final = (
    *("title", "url", "filename", "text", "stdout", "stderr", "logs", "lines", "tool_name", "error_code"),
    *("message", "tool_references", "content", "output", "outputs", "results", "error"),
)


class ServedPart(Struct, frozen=True):
    """A call of a tool that another server ran, and what it found, in the fields of every dialect."""

    type: str
    id: Short | None = None
    status: Short | None = None
    action: Any = None
    content: Any = None
    output: Any = None
    outputs: Any = None
    results: Any = None
    error: Any = None


class TypedPart(Protocol):
    """A part of a content, of a dialect's struct."""

    @property
    def type(self) -> str: ...


P = TypeVar("P", bound=TypedPart)


def required(value: str | None, path: str) -> str:
    """Return a field that must be present. Raises InvalidInput."""
    if value is None:
        raise InvalidInput(f"{path} is required", field=path)
    return value


def text_of(
    content: str | Sequence[P], path: str, kinds: Collection[str], read: Callable[[P], str | None]
) -> str:
    """Return the text of a content whose parts may be of ``kinds``.

    Raises InvalidInput, UnsupportedFeature.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        own = f"{path}[{number}]."
        if part.type not in kinds:
            raise UnsupportedFeature(f"{own}type: only text is offered by this server", field=f"{own}type")
        assert isinstance(part, Struct)
        require_neutral(part, own)
        texts.append(required(read(part), f"{own}text"))
    return "".join(texts)


def found_text(part: ServedPart, path: str) -> str:
    """Return the texts that a tool of another server found, a line each; the rest of it is left out.

    Raises UnsupportedFeature for an image or a document that is no text.
    """
    texts: list[str] = []
    # The walk uses no recursion, since a client chooses the depth.
    waiting: list[Any] = [structs.asdict(part)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            waiting += value[::-1]
        elif isinstance(value, dict):
            source = value.get("source")
            if isinstance(source, dict) and source.get("type") != "text":
                raise UnsupportedFeature(
                    f"{path}: of images and documents only text is offered by this server", field=path
                )
            waiting += [source.get("data")] if isinstance(source, dict) else []
            waiting += [value[name] for name in _FOUND[::-1] if name in value]
    return "\n".join(filter(None, texts))
