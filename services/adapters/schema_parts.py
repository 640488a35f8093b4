"""The conditions of one JSON schema by itself, without those that it refers to; malformed ones are none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

TYPES: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))

Schema = dict[str, Any]
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
    """Return the subschemas of a property, as far as names give them; None: of one with another name."""
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
        if isinstance(rest, list):  # as before draft 2020-12
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
