"""JSON schemas drawn at random, what is valid by them, and schemas that a hostile client might send.

Drawn are the keywords that the grammars hold to; others, such as uniqueItems, are refused by name.
"""

from __future__ import annotations

import json
import re
from datetime import date
from random import Random
from typing import Any, Final

import jsonschema

Schema = dict[str, Any]

NAMES: Final = ("id", "name", "kind", "size", "tags", "note", "when", "flag", "next", "items")
WORDS: Final = ("x", "yy", "red", "green", "a b", "ü", '"', "\\", "")
PATTERNS: Final = ("^[a-z]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(on|off)$")
FORMATS: Final = ("date", "time", "ipv4", "uuid")
KEYS: Final = ("^[a-c]$", "^k[0-9]$")
DEPTH: Final = 2
_TIME: Final = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


def _is_date(value: object) -> bool:
    if not isinstance(value, str):
        return True
    if _DATE.fullmatch(value) is None:
        return False
    leap = "2000" if value.startswith("0000") else value[:4]
    return bool(date.fromisoformat(leap + value[4:]))


def _checker() -> jsonschema.FormatChecker:
    """Return the checks of the drawn formats.

    The package's own has neither the time of RFC 3339 nor the dates of the year 0.
    """
    checker = jsonschema.FormatChecker(("ipv4", "uuid"))
    checker.checks("time")(_is_time)
    checker.checks("date", raises=ValueError)(_is_date)
    return checker


_CHECKER: Final = _checker()


def is_valid(text: str, schema: Schema) -> bool:
    """Whether a text is JSON that is valid by a schema, its formats included."""
    try:
        jsonschema.validate(
            json.loads(text), schema, cls=jsonschema.Draft202012Validator, format_checker=_CHECKER
        )
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def drawn(seed: int) -> Schema:
    """Return the schema of a seed: an object whose values are short."""
    rng = Random(seed)
    schema = _object(rng, DEPTH)
    if rng.random() < 0.3:  # a definition that the schema refers to
        schema["$defs"] = {"part": _value(rng, 0)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": names if rng.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _value(rng: Random, depth: int) -> Schema:
    kinds = [_text, _integer, _number, _enum, _constant, _multiple, _all_of]
    if depth > 0:
        kinds += [_object_below, _array, _either, _one_of, _tuple, _patterned]
    return rng.choice(kinds)(rng, depth)


def _object_below(rng: Random, depth: int) -> Schema:
    return _object(rng, depth)


def _text(rng: Random, depth: int) -> Schema:
    match rng.randrange(3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
    shortest = rng.randint(0, 2)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 4)}


def _integer(rng: Random, depth: int) -> Schema:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 100)}


def _number(rng: Random, depth: int) -> Schema:
    least = rng.randint(-5, 5)
    return {"type": "number", "exclusiveMinimum": least, "maximum": least + rng.randint(1, 9)}


def _enum(rng: Random, depth: int) -> Schema:
    return {"enum": rng.sample((*WORDS, 0, 1.5, True, None), rng.randint(1, 4))}


def _constant(rng: Random, depth: int) -> Schema:
    return {"const": rng.choice((*WORDS, 7, False, None))} if rng.random() < 0.7 else {"type": "boolean"}


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _multiple(rng: Random, depth: int) -> Schema:
    """Of a number that binary fractions have exactly: jsonschema divides floats."""
    step, kind = rng.choice(((3, "integer"), (7, "integer"), (0.5, "number")))
    return {"type": kind, "multipleOf": step, "minimum": -rng.randint(0, 30), "maximum": rng.randint(0, 60)}


def _all_of(rng: Random, depth: int) -> Schema:
    least, shortest = rng.randint(-50, 50), rng.randint(0, 2)
    numbers = [{"type": "integer", "minimum": least}, {"maximum": least + rng.randint(0, 100)}]
    texts = [{"type": "string", "minLength": shortest}, {"maxLength": shortest + rng.randint(0, 4)}]
    return {"allOf": rng.choice((numbers, texts))}


def _one_of(rng: Random, depth: int) -> Schema:
    """Of disjoint types: others are refused."""
    return {"oneOf": [_integer(rng, depth), _text(rng, depth), {"type": "null"}]}


def _tuple(rng: Random, depth: int) -> Schema:
    items = [_value(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    rest = rng.choice((False, _value(rng, depth - 1)))
    most = len(items) + (0 if rest is False else 1)
    return {"type": "array", "prefixItems": items, "items": rest, "minItems": len(items), "maxItems": most}


def _patterned(rng: Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {rng.choice(KEYS): _value(rng, depth - 1)},
        "additionalProperties": False,
    }


def _either(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def hostile(number: int) -> str:
    """Return one of the schemas that take much, never the same for two numbers."""
    wide = number % 7 * 100 + 200
    kinds: tuple[Schema, ...] = (
        {
            "type": "object",
            "properties": {f"p{number}_{n}": {"type": "integer"} for n in range(wide)},
        },
        {"enum": [f"k{number}_{place}" for place in range(10 * wide)]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        _branching(13, number),
        {"type": "string", "pattern": f"((a{{1,{wide}}}b?){{1,{wide}}}c?){{1,{wide}}}{number}"},
        {"$ref": f"https://example.com/{number}.json"},
        {"allOf": [{"anyOf": [{"required": [f"p{n}"]}, {"required": [f"q{n}"]}]} for n in range(12)]},
    )
    return json.dumps(kinds[number % len(kinds)])


def harmless(number: int) -> str:
    """Return a schema that takes little, never the same for two numbers."""
    return json.dumps({"type": "object", "properties": {f"p{number}": {"type": "integer"}}})


def _branching(times: int, number: int) -> Schema:
    schema: Schema = {"type": "integer", "minimum": number}
    for _ in range(times):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema
