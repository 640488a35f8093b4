"""JSON schemas as they are read, and the conditions of one by itself, without those that it refers to.

Malformed conditions are none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

TYPES: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))

Schema = dict[str, Any]
MOST_DIGITS: Final = 400  # the length of a number that is read
# Schemas of one place, which all hold.
Parts = tuple[Schema, ...]
# The type of a value, and what is equal for equal values.
Key = tuple[str, Any]
# A number, and on which side of it the values are if it is none itself: 1, -1, else 0.
Bound = tuple[Decimal, int]


def admitted(part: Schema) -> tuple[set[str], set[Key] | None]:
    """Return the types and the values of a subschema; integers are numbers, and None is any value."""
    found, named, values = set(TYPES), part.get("type"), _literals(part)
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else named
        found &= {"number" if name == "integer" else str(name) for name in names}
    return (found if values is None else found & {kind for kind, _ in values}), values


def _literals(part: Schema) -> set[Key] | None:
    """Return what const and enum admit; None without them."""
    found = [[part["const"]]] if "const" in part else []
    if isinstance(part.get("enum"), list):
        found.append(part["enum"])
    return set.intersection(*({_key(value) for value in values} for values in found)) if found else None


def _key(value: Any) -> Key:
    """Return the type of a value, and what is equal for equal values."""
    if is_number(value):
        return "number", decimal_of(value)
    match value:
        case list():
            return "array", tuple(map(_key, value))
        case dict():
            return "object", frozenset((name, _key(each)) for name, each in value.items())
        case bool():
            return "boolean", value
    return ("null" if value is None else "string"), value


def required_of(parts: Parts) -> list[str]:
    return list(
        dict.fromkeys(name for part in parts for name in list_of(part, "required") if isinstance(name, str))
    )


def properties_of(parts: Parts, name: str | None) -> list[Any]:
    """Return the subschemas of a property, as far as names give them; None stands for one with another
    name."""
    return [
        dict_of(part, "properties").get(
            name, "patternProperties" in part or part.get("additionalProperties", True)
        )
        for part in parts
    ]


def items_of(parts: Parts, index: int) -> list[Any]:
    """Return the subschemas of an item."""
    found = []
    for part in parts:
        first, rest = list_of(part, "prefixItems"), part.get("items", True)
        if isinstance(rest, list):  # drafts before 2020-12 write it so
            first, rest = rest, part.get("additionalItems", True)
        found.append(first[index] if index < len(first) else rest)
    return found


def least_items(parts: Parts) -> range:
    """Return the places of items that each document has; of those with one subschema, one."""
    named = max((len(list_of(part, name)) for part in parts for name in ("prefixItems", "items")), default=0)
    return range(int(min(largest(parts, "minItems"), named + 1)))


def range_of(parts: Parts) -> tuple[Bound | None, Bound | None]:
    low = [bound for part in parts for bound in _bounds(part, "minimum", "exclusiveMinimum", 1)]
    high = [bound for part in parts for bound in _bounds(part, "maximum", "exclusiveMaximum", -1)]
    return max(low, default=None), min(high, default=None)


def _bounds(part: Schema, name: str, exclusive: str, side: int) -> Iterator[Bound]:
    value, strict = part.get(name), part.get(exclusive)
    if is_number(value):  # the flag is that of draft 4
        yield decimal_of(value), side if strict is True else 0
    if is_number(strict):
        yield decimal_of(strict), side


def largest(parts: Parts, name: str) -> float:
    return max((part[name] for part in parts if isinstance(part.get(name), int)), default=0)


def smallest(parts: Parts, name: str) -> float:
    return min((part[name] for part in parts if isinstance(part.get(name), int)), default=math.inf)


def list_of(node: Schema, name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []


def dict_of(node: Schema, name: str) -> dict[str | None, Any]:
    found = node.get(name)
    return found if isinstance(found, dict) else {}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def decimal_of(value: Any) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


class Unreadable:
    """In place of what is no number, or one whose arithmetic would take long."""

    def __init__(self, text: str) -> None:
        self.problem = f"{text} is no JSON" if text[-1].isalpha() else "too many digits; send it as a string"


def _number(text: str) -> float | Decimal | Unreadable:
    """A float where it has the same digits."""
    near = float(text)
    try:
        value = Decimal(text)
    except ArithmeticError:
        return Unreadable(text)
    if len(text) <= MOST_DIGITS and decimal_of(near) == value:
        return near
    long = len(text) > MOST_DIGITS or math.isinf(near) or value.adjusted() < -MOST_DIGITS
    return Unreadable(text) if long else value


def _integer(text: str) -> int | Unreadable:
    return int(text) if len(text) <= MOST_DIGITS else Unreadable(text)


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_int=_integer, parse_constant=Unreadable)


def read(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins in a text, its numbers exact, and its end. Raises ValueError."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    found: tuple[Any, int] = _DECODER.raw_decode(text, start)
    return found
