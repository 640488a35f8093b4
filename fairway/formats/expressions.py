"""Expressions of safety packs: the part of Python's syntax whose matches have a greatest width.

Literals, classes, ``\\d \\w \\s``, groups, ``|``, ``?`` and bounded repeats; ``\\b`` at either end. A text is
folded before it is searched (``folding``), so case makes no difference and white space is one space. Refused:
``*`` and ``+`` without a bound, back references, lookaround, flags, anchors, and what matches the empty text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any, Final

from fairway.formats.folding import fold, fold_char

MAX_WIDTH: Final = 256
MAX_SOURCE_CHARS: Final = 512
# Most character positions of one expression once its repeats are written out.
MAX_POSITIONS: Final = 2_048
# A longer range of a class is taken as it stands: only shorter ones are folded.
_MAX_FOLDED_RANGE: Final = 4_096
# Within a class these have another meaning in later versions of the syntax; the parser warns of them.
_AMBIGUOUS: Final = re.compile(r"^\[|--|&&|~~|\|\|")
_CLASS: Final = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters of folded text: those in the ranges, or of a kind by its letter in ``\\d \\w \\s``."""

    ranges: tuple[tuple[str, str], ...] = ()
    kinds: str = ""
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        found = any(first <= char <= last for first, last in self.ranges)
        return (found or any(_is_of(kind, char) for kind in self.kinds)) is not self.negated


@dataclass(frozen=True, slots=True)
class InOrder:
    items: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternatives:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    item: Node
    least: int
    most: int


Node = CharSet | InOrder | Alternatives | Repeated


@dataclass(frozen=True, slots=True)
class Expression:
    """What is to be found; at an edge, no character of a word is next to it."""

    node: Node
    edge_before: bool = False
    edge_after: bool = False


def parse(source: str) -> Expression:
    """Return an expression of 1 to ``MAX_WIDTH`` characters. Raises ValueError with the mend."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"it is longer than {MAX_SOURCE_CHARS} characters; split it")
    for found in _CLASS.finditer(source):
        if (doubled := _AMBIGUOUS.search(found[1] or "")) is not None:
            raise ValueError(f"{doubled[0]!r} in a class is ambiguous; escape its characters")
    if "  " in source:
        raise ValueError("white space of any length is one space; write one")
    try:
        parsed = sre_parser.parse(unicodedata.normalize("NFC", source))
    except (re.error, RecursionError, OverflowError) as exc:
        raise ValueError(f"it is no expression: {exc}") from exc
    if parsed.state.flags & ~re.UNICODE:
        raise ValueError("it has flags; remove them: case never makes a difference")
    items = list(parsed)
    before = items[:1] == [_EDGE]
    items = items[1:] if before else items
    after = items[-1:] == [_EDGE]
    node = _in_order(items[:-1] if after else items)
    least, most, positions = _measure(node)
    if not least:
        raise ValueError("it matches the empty text; make a part of it required")
    if most > MAX_WIDTH:
        raise ValueError(f"a match has up to {most} characters; bound its repeats to {MAX_WIDTH} in all")
    if positions > MAX_POSITIONS:
        raise ValueError(f"it has {positions} positions, more than {MAX_POSITIONS}; bound its repeats lower")
    return Expression(node, before, after)


_EDGE: Final = (sre.AT, sre.AT_BOUNDARY)
_KINDS: Final = {
    sre.CATEGORY_DIGIT: "d",
    sre.CATEGORY_NOT_DIGIT: "D",
    sre.CATEGORY_WORD: "w",
    sre.CATEGORY_NOT_WORD: "W",
    sre.CATEGORY_SPACE: "s",
    sre.CATEGORY_NOT_SPACE: "S",
}


def positions_of(expression: Expression) -> int:
    """Return how many character positions an expression has once its repeats are written out."""
    return _measure(expression.node)[2]


def is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _is_of(kind: str, char: str) -> bool:
    match kind.lower():
        case "d":
            found = char.isdecimal()
        case "w":
            found = is_word(char)
        case _:
            found = char.isspace()
    return found is kind.islower()


def _in_order(items: Any) -> Node:
    """Return a node of the parser's items. Raises ValueError for one that is not of the subset."""
    found = [_node(code, value) for code, value in items]
    return found[0] if len(found) == 1 else InOrder(tuple(found))


def _node(code: Any, value: Any) -> Node:
    match code:
        case sre.LITERAL:
            folded = tuple(CharSet(((char, char),)) for char in fold(chr(value)))
            return folded[0] if len(folded) == 1 else InOrder(folded)
        case sre.NOT_LITERAL:
            return CharSet(_folded(value, value), negated=True)
        case sre.ANY:
            return CharSet(negated=True)
        case sre.IN:
            return _class(value)
        case sre.BRANCH:
            return Alternatives(tuple(_in_order(items) for items in value[1]))
        case sre.SUBPATTERN if not value[1] and not value[2]:
            return _in_order(value[3])
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            return _repeated(*value)
        case sre.AT if value is sre.AT_BOUNDARY:
            raise ValueError(r"\b stands inside; write it at the beginning or the end")
    raise ValueError(f"{str(code).lower()} is not supported; write it without")


def _repeated(least: int, most: Any, items: Any) -> Node:
    item = _in_order(items)
    shortest, longest, _ = _measure(item)
    if not longest:
        return InOrder()
    if most is sre.MAXREPEAT or most > MAX_WIDTH:
        raise ValueError(f"a repeat has no bound of at most {MAX_WIDTH}; write {{{least},{max(least, 64)}}}")
    # A part that may be empty makes any smaller number of repeats possible.
    return Repeated(item, least if shortest else 0, most)


def _class(items: Any) -> CharSet:
    ranges: list[tuple[str, str]] = []
    kinds, negated = "", False
    for code, value in items:
        match code:
            case sre.NEGATE:
                negated = True
            case sre.LITERAL:
                ranges += _folded(value, value)
            case sre.RANGE:
                ranges += _folded(*value)
            case sre.CATEGORY:
                kinds += _KINDS[value]
    return CharSet(tuple(sorted(set(ranges))), kinds, negated)


@lru_cache(maxsize=256)
def _folded(first: int, last: int) -> tuple[tuple[str, str], ...]:
    """Return the ranges of what the characters between two become. Raises ValueError if that is nothing."""
    if last - first > _MAX_FOLDED_RANGE:
        return ((chr(first), chr(last)),)
    found = [fold_char(chr(code)) for code in range(first, last + 1)]
    singles = sorted({char for char in found if len(char) == 1})
    if not singles:
        raise ValueError(f"{chr(first)!r} has no single form; write it outside of a class")
    ranges: list[tuple[str, str]] = []
    for char in singles:
        if ranges and ord(char) == ord(ranges[-1][1]) + 1:
            ranges[-1] = (ranges[-1][0], char)
        else:
            ranges.append((char, char))
    return tuple(ranges)


def _measure(node: Node) -> tuple[int, int, int]:
    """Return the least and the greatest width of a match, and its positions with repeats written out."""
    match node:
        case CharSet():
            return 1, 1, 1
        case Repeated(item, least, most):
            shortest, longest, positions = _measure(item)
            return shortest * least, longest * most, positions * most
        case InOrder(items):
            parts = [_measure(item) for item in items]
            return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)
        case Alternatives(items):
            parts = [_measure(item) for item in items]
            return min(p[0] for p in parts), max(p[1] for p in parts), sum(p[2] for p in parts)
