"""Text that records which of its characters come from a message, while a chat template computes with it.

An ``OriginText`` string equals, measures and compares as its plain string, so a template makes the same
decisions and writes the same text. It also has an ``origin`` of the same length, one letter per character.
Cuts, joins and replacements keep the origin exactly. For any other operation ``settled`` derives it by a
second run on masked text. Where that is not possible, all of the result counts as a message's: no operation
loses the origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, SupportsIndex

from jinja2 import Undefined
from markupsafe import Markup

MESSAGE: Final = "m"
TEMPLATE: Final = "t"
# One of Unicode's noncharacters: valid in UTF-8, no character of any script.
_MASK: Final = "\ufdd0"


class OriginText(str):
    """A string with its origin, even without a character from a message."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str, origin: str = "") -> OriginText:
        """Without an origin, all of the text comes from a message."""
        found = super().__new__(cls, text)
        found._origin = origin or MESSAGE * len(found)
        return found

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return OriginText(super().__getitem__(key), self._origin[key])

    def __iter__(self) -> Iterator[str]:
        return map(OriginText, super().__iter__(), self._origin)

    def __add__(self, other: Any) -> str:
        # Text that is marked as safe escapes the text that it is added to.
        is_text = isinstance(other, str) and not isinstance(other, Markup)
        return join("", (self, other)) if is_text else NotImplemented

    def __radd__(self, other: Any) -> str:
        return join("", (other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return OriginText(super().__mul__(count), self._origin * count)

    __rmul__ = __mul__

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return replaced(self, old, new, count)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        ends = super().splitlines(keepends=True)
        return [line if keepends else line[: len(str.splitlines(line)[0])] for line in self._found(ends, "")]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._found(super().partition(sep), "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._found(super().rpartition(sep), "")
        return first, middle, last

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Return each character with its origin."""
        return zip(super().__iter__(), self._origin, strict=True)

    def _found(self, pieces: Iterable[str], sep: str | None) -> list[str]:
        """Return pieces of this text, in its order and separated by ``sep``, with their origin.

        Without ``sep``, only blanks separate them.
        """
        found, start = [], 0
        for piece in pieces:
            if sep is None:
                start = self.index(piece, start)
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return found


class TracedMarkup(Markup):
    """Text that is marked as safe: all of it, and every result made from it, counts as a message's."""

    __slots__ = ()

    def __str__(self) -> str:
        return OriginText(super().__str__())


def origin_of(text: str) -> str:
    """Return one letter per character: ``MESSAGE`` or ``TEMPLATE``."""
    if isinstance(text, OriginText):
        return text._origin
    return (MESSAGE if isinstance(text, TracedMarkup) else TEMPLATE) * len(text)


def join(separator: str, parts: Iterable[str]) -> str:
    """Return ``separator.join(parts)`` with the origin of each part."""
    texts = list(parts)
    joined = str.join(separator, texts)
    if {str}.issuperset(map(type, (separator, *texts))):
        return joined
    return OriginText(joined, origin_of(separator).join(map(origin_of, texts)))


def replaced(text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
    """Return ``text.replace(old, new, count)`` with the origin of each part."""
    if not old:
        return str(settled(str.replace, (text, old, new, count), {}))
    return join(new, text.split(old, count))


def concat(parts: Iterable[str]) -> str:
    """Return the concatenated parts."""
    return join("", parts)


def settled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``run(*args, **kwargs)``; text that may contain a message's characters is ``OriginText``."""
    result = run(*args, **kwargs)
    if not _has_plain_text(result):
        return result
    try:
        if not _is_traced((args, kwargs)):
            return result
        masked = run(*_masked(args), **_masked(kwargs))
    except Exception:  # The effect of masked text in the template is unpredictable.
        masked = None
    return _settled(result, masked)


class _UnknownError(Exception):
    """A value may contain text that cannot be inspected."""


def _has_plain_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_plain_text, value))
    return isinstance(value, str) and not isinstance(value, OriginText | TracedMarkup)


def _is_traced(value: Any) -> bool:
    """Return whether a value contains text of a message. Raises _UnknownError."""
    if isinstance(value, str):
        return isinstance(value, OriginText | TracedMarkup) and MESSAGE in origin_of(value)
    if isinstance(value, tuple | list):
        found = [_is_traced(item) for item in value]  # every item, since one may be unknown
        return any(found)
    if isinstance(value, dict):
        return bool(value) and _is_traced((*value, *value.values()))
    if value is None or isinstance(value, int | float | Undefined | range):
        return False
    raise _UnknownError


def _masked(value: Any) -> Any:
    """Return the value with each character that comes from a message replaced by the mask."""
    if isinstance(value, TracedMarkup):
        return Markup(_MASK * len(value))
    if isinstance(value, OriginText):
        return "".join([_MASK if where == MESSAGE else char for char, where in value.pairs()])
    if isinstance(value, dict):
        return {_masked(key): _masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_masked, value))
    return value


def _settled(result: Any, masked: Any) -> Any:
    if isinstance(result, list | tuple):
        others = (
            masked
            if isinstance(masked, list | tuple) and len(masked) == len(result)
            else [None] * len(result)
        )
        return type(result)(map(_settled, result, others))
    if not _has_plain_text(result):
        return result
    if isinstance(result, Markup):
        return TracedMarkup(result)
    if not isinstance(masked, str) or len(masked) != len(result):
        return OriginText(result)
    if any(mark not in (_MASK, char) for char, mark in zip(result, masked, strict=True)):
        return OriginText(result)
    return OriginText(result, "".join([MESSAGE if mark == _MASK else TEMPLATE for mark in masked]))
