"""Texts of request bodies that come whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import require_neutral


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
    """Return the text of a content, of which parts of ``kinds`` are served.

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
