"""JSON schemas as the grammar engine holds outputs to them exactly.

The engine ignores unknown keywords and refuses by name what it lacks. What it would hold to otherwise than
the schema demands is rewritten here, or refused with its place:

- It has numbers as 64-bit floats, which it reads and writes exactly up to 2^53, the decimal point aside.
  Bounds with more digits are narrowed to 15, other numbers refused.
- It sees that branches of ``oneOf`` exclude each other by types and literals in place only. Where that
  follows from references, required properties or bounds too, the branches become those of ``anyOf``.
- A subschema that no finite document matches becomes ``false``: the engine would nest without an end.
- Names of free properties may repeat, so several of them cannot be required by their number.

The rules for finite documents and for exclusion leave conditions out where there are too many. So each errs
towards what is certain: a document may exist, two branches may both match.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from itertools import combinations, product
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from services.ports.grammars import GrammarRefused

# Formats that the engine has; any other is an annotation.
FORMATS: Final = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
MAX_STEPS: Final = 40_000  # about 0.1 s
MAX_WAYS: Final = 256
MAX_DEPTH: Final = 6  # the depth of properties in the proof that branches exclude each other
EXACT: Final = 2**53  # up to here a float has each integer
DIGITS: Final = 15  # the digits of numbers that a float has exactly
_LEAST: Final = Decimal("1e-22")  # the step of such numbers is not smaller
_TOP: Final = Decimal(9223372036854770000)  # the largest of those below 2^63, where the engine's integers end
_LONG: Final = 10**18  # bound beyond which the engine needs bounds on both sides
_MAX_MULTIPLE: Final = 2**32 - 1
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # the characters that take \u
_NO_CONTROLS: Final = "control characters other than \\b \\f \\n \\r \\t cannot come; leave them out"
_CONTROL: Final = (  # one of these in a pattern
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[av]|\\(?:x|u00|U000000)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
    r"|\\[xuU]\{0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}"
)
# The engine leaves out those that are not among others in a class.
_PIECES: Final = re.compile(
    rf"(?P<lost>\[(?:{_CONTROL})\]|{_CONTROL})|\[(?:\\.|[^\]\\])*\]?|\\.|[^\\]", re.DOTALL
)
_IN_MAPS: Final = ("properties", "patternProperties")
_IN_PLACE: Final = (
    "items",
    "additionalItems",
    "additionalProperties",
    "prefixItems",
    "allOf",
    "anyOf",
    "oneOf",
)
_SIZES: Final = {"string": "Length", "array": "Items", "object": "Properties"}
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
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


def exact_schema(schema: Any, options: dict[str, object]) -> str:
    """Return the JSON of a schema that the engine takes, with its options. Raises GrammarRefused.

    The schema is changed in place.
    """
    holder = [{} if schema is True else schema]
    if isinstance(schema, dict):
        _Document(holder).rewrite()
    if not isinstance(holder[0], dict):
        raise GrammarRefused("#: no output can match it" if schema is False else "it is no JSON schema")
    return json.dumps(
        holder[0] | {"x-guidance": options}, allow_nan=False, default=float, separators=(",", ":")
    )


class _Document:
    """One schema with all that it refers to; subschemas are known by their identity."""

    def __init__(self, holder: list[Any]) -> None:
        self._root: Schema = holder[0]
        # Subschemas that the engine reads, each with its path and the container and key of its place.
        self._found: dict[int, tuple[Schema, str, Any, Any]] = {}
        self._targets: dict[int, Any] = {}
        self._resources: dict[str, tuple[Any, Any]] = {"": (holder, 0)}
        self._bases: dict[int, str] = {}
        self._ways: dict[int, list[Parts]] = {}
        self._admits: dict[int, tuple[set[str], set[Key] | None]] = {}
        self._finite: set[int] = set()
        # References by way of ``oneOf``, with the names of their pointers and whose branches these are.
        self._into_branches: list[tuple[Schema, list[str], dict[int, Schema]]] = []
        # Literals by number: to look one up costs the same for each.
        self._keys: dict[Key, int] = {}
        self._steps = 0
        self._name(holder, 0)
        self._find(holder)

    def rewrite(self) -> None:
        for node, path, _, _ in self._found.values():
            _check_literals(node, path)
        while self._grow():
            pass
        if id(self._root) not in self._finite:
            raise GrammarRefused(self._endless())
        live = [entry for key, entry in self._found.items() if key in self._finite]
        for node, path, _, _ in live:
            if isinstance(node.get("oneOf"), list):
                self._check_branches(node, path)
        if any("multipleOf" in node for node, _, _, _ in live):
            for node, path, _, _ in live:
                self._check_multiples(node, path)
        self._follow_branches()
        for key, (_, _, container, place) in self._found.items():
            if key not in self._finite:
                container[place] = False
        for node, path, _, _ in live:
            _write(node, path)

    def _find(self, holder: list[Any]) -> None:
        waiting: list[tuple[Any, Any, str]] = [(holder, 0, "#")]
        while waiting:
            container, key, path = waiting.pop()
            node = container[key]
            if not isinstance(node, dict) or id(node) in self._found:
                continue
            self._found[id(node)] = (node, path, container, key)
            for name in _IN_MAPS:
                if isinstance(under := node.get(name), dict):
                    waiting += [(under, each, f"{path}/{name}/{_escaped(each)}") for each in under]
            for name in _IN_PLACE:
                if isinstance(under := node.get(name), list):
                    waiting += [(under, each, f"{path}/{name}/{each}") for each in range(len(under))]
                elif name in node:
                    waiting.append((node, name, f"{path}/{name}"))
            if isinstance(reference := node.get("$ref"), str):
                waiting.append(self._resolve(node, reference, path))

    def _name(self, container: Any, key: Any) -> None:
        """Collect what references name: resources by their URL, anchors behind it. Refuse unread numbers."""
        waiting: list[tuple[Any, Any, str, str]] = [(container, key, "", "#")]
        while waiting:
            container, key, base, path = waiting.pop()
            node = container[key]
            if isinstance(node, Unreadable):
                raise GrammarRefused(f"{path}: {node.problem}")
            if isinstance(node, dict):
                if isinstance(name := node.get("$id"), str):
                    base = self._joined(base, name)
                    self._resources.setdefault(base, (container, key))
                if isinstance(name := node.get("$anchor"), str):
                    self._resources.setdefault(f"{base}#{name}", (container, key))
                self._bases[id(node)] = base
            if isinstance(node, dict | list):
                waiting += [
                    (node, each, base, f"{path}/{_escaped(str(each))}")
                    for each in (node if isinstance(node, dict) else range(len(node)))
                ]

    def _joined(self, base: str, reference: str) -> str:
        self._step((len(base) + len(reference)) // 32)
        return urldefrag(urljoin(base, reference)).url

    def _resolve(self, node: Schema, reference: str, path: str) -> tuple[Any, Any, str]:
        """Return the place that a reference names."""
        url, fragment = self._joined(self._bases[id(node)], reference), urldefrag(reference).fragment
        names = fragment.split("/") if fragment.startswith("/") else [""]
        within: dict[int, Schema] = {}
        try:
            container, key = self._resources[
                url if fragment.startswith("/") or not fragment else f"{url}#{fragment}"
            ]
            for place, name in enumerate(names[1:], 1):
                container = container[key]
                key = unquote(name).replace("~1", "/").replace("~0", "~")
                key = key if isinstance(container, dict) else int(key.removeprefix("-"))
                if key == "oneOf" and isinstance(container, dict):
                    within[place] = container
            self._targets[id(node)] = container[key]
        except (LookupError, ValueError, TypeError):
            raise GrammarRefused(
                f"{path}/$ref: {reference[:64]!r} is no place in the schema; a reference begins with #/ and "
                "names one"
            ) from None
        if within:
            self._into_branches.append((node, names, within))
        return container, key, reference

    def _follow_branches(self) -> None:
        """Let references into branches name where ``_write`` puts these."""
        for node, names, within in self._into_branches:
            for place, holder in within.items():
                if id(holder) in self._finite and isinstance(holder.get("oneOf"), list):
                    moved = f"allOf/{len(list_of(holder, 'allOf'))}/anyOf"
                    names[place] = moved if "anyOf" in holder else "anyOf"
            node["$ref"] = f"{urldefrag(node['$ref']).url}#{'/'.join(names)}"

    def _step(self, size: int = 1) -> None:
        self._steps += size
        if self._steps > MAX_STEPS:
            raise GrammarRefused("#: it has too many branches within branches; send fewer")

    def _ways_of(self, node: Any, above: tuple[int, ...] = ()) -> list[Parts]:
        """Return the ways to match a subschema in place; none for one that is itself again."""
        if not isinstance(node, dict):
            return [] if node is False else [()]
        if id(node) in above:
            return []
        if (kept := self._ways.get(id(node))) is not None:
            return kept
        self._step()
        groups: list[list[Any]] = [[each] for each in list_of(node, "allOf")]
        groups += [list_of(node, name) for name in ("anyOf", "oneOf") if isinstance(node.get(name), list)]
        groups += [[self._targets[id(node)]]] if id(node) in self._targets else []
        ways: list[Parts] = [(node,)]
        for group in groups:
            options: list[Parts] = []
            for each in group:
                options += self._ways_of(each, (*above, id(node)))
                if len(ways) * len(options) > MAX_WAYS:
                    break
            else:
                ways = [before + after for before in ways for after in options]
                self._step(sum(map(len, ways)) // 16)
        if not above:  # else branches that come back to a subschema above are missing
            self._ways[id(node)] = ways
        return ways

    def _grow(self) -> bool:
        """Add subschemas with a document of the finite ones so far; what this never reaches is endless."""
        grew = False
        for key, (node, _, _, _) in reversed(self._found.items()):
            if key in self._finite:
                continue
            self._step()
            if any(map(self._ends, self._ways_of(node))):
                self._finite.add(key)
                grew = True
        return grew

    def _ends(self, parts: Parts) -> bool:
        self._step(len(parts))
        return any(all(map(self._is_finite, self._needs(kind, parts))) for kind in self._types(parts))

    def _is_finite(self, node: Any) -> bool:
        return node is not False and (not isinstance(node, dict) or id(node) in self._finite)

    def _needs(self, kind: str, parts: Parts) -> Sequence[Any]:
        """Return subschemas such that every document of a type contains a part for each."""
        if kind == "array":
            return [item for index in least_items(parts) for item in items_of(parts, index)]
        if kind != "object":
            return ()
        required = list(self._required(parts))
        if not required and largest(parts, "minProperties") > 0:
            names = [*dict.fromkeys(name for part in parts for name in dict_of(part, "properties")), None]
            self._step(len(names))
            choices = [properties_of(parts, name) for name in names]
            return next((each for each in choices if all(map(self._is_finite, each))), choices[0])
        return [each for name in required for each in properties_of(parts, name)]

    def _endless(self) -> str:
        """Return why no finite document matches, with the place that comes back to itself."""
        seen, node = set[int](), self._root
        while id(node) not in seen:
            seen.add(id(node))
            needs = (
                each
                for way in self._ways_of(node)
                for kind in sorted(self._types(way))
                for each in self._needs(kind, way)
                if isinstance(each, dict) and id(each) not in self._finite
            )
            if (following := next(needs, None)) is None:
                return f"{self._found[id(node)][1]}: no output can match it"
            node = following
        path = self._found[id(node)][1]
        return (
            f"{path}: no finite document matches it, since each contains another; make the property optional "
            "or the list possibly empty, or allow null there"
        )

    def _check_branches(self, node: Schema, path: str) -> None:
        for (first, one), (second, other) in combinations(enumerate(node["oneOf"]), 2):
            ways = product(self._ways_of(one), self._ways_of(other))
            if not all(self._clash((node, *way, *other_way)) for way, other_way in ways):
                raise GrammarRefused(
                    f"{path}/oneOf: branches {first} and {second} may both match; send anyOf, or let them "
                    "differ by type, by a required property with its own const, or by bounds"
                )

    def _types(self, parts: Parts) -> set[str]:
        """Return the types that all parts admit."""
        return set(TYPES).intersection(*(self._admitted(part)[0] for part in parts))

    def _admitted(self, part: Schema) -> tuple[set[str], set[Key] | None]:
        if (kept := self._admits.get(id(part))) is None:
            types, values = admitted(part)
            if values is not None:
                values = {(key[0], self._keys.setdefault(key, len(self._keys))) for key in values}
            kept = self._admits[id(part)] = types, values
        return kept

    def _required(self, parts: Parts) -> Iterator[str]:
        seen = set[str]()
        for part in parts:
            for name in list_of(part, "required"):
                self._step()
                if isinstance(name, str) and name not in seen:
                    seen.add(name)
                    yield name

    def _clash(self, parts: Parts, depth: int = 0) -> bool:
        """Whether no document matches all parts, as far as that is certain."""
        self._step(1 + len(parts))
        return all(self._clash_in(kind, parts, depth) for kind in self._types(parts))

    def _clash_in(self, kind: str, parts: Parts, depth: int) -> bool:
        literals = [keys for part in parts if (keys := self._admitted(part)[1]) is not None]
        if literals:
            fewest = min(literals, key=len)
            self._step(len(fewest) // 16)
            if not any(key[0] == kind and all(key in keys for keys in literals) for key in fewest):
                return True
        if kind == "number":
            low, high = range_of(parts)
            return low is not None and high is not None and low > high
        if (size := _SIZES.get(kind)) and largest(parts, f"min{size}") > smallest(parts, f"max{size}"):
            return True
        if depth == MAX_DEPTH:
            return False
        places: Iterator[list[Any]] = iter(())
        if kind == "object":
            places = (properties_of(parts, name) for name in self._required(parts))
        elif kind == "array":
            places = (items_of(parts, index) for index in least_items(parts))
        return any(self._clash_at(place, depth + 1) for place in places)

    def _clash_at(self, nodes: Sequence[Any], depth: int) -> bool:
        self._step(1 + len(nodes))
        ways = [self._ways_of(node) for node in nodes]
        if math.prod(map(len, ways)) > MAX_WAYS:
            return False
        return all(self._clash(sum(way, ()), depth) for way in product(*ways))

    def _check_multiples(self, node: Schema, path: str) -> None:
        """Refuse steps that hold together and whose common multiple the engine does not have."""
        for way in self._ways_of(node):
            self._step(len(way))
            steps = {abs(decimal_of(part["multipleOf"])) for part in way if is_number(part.get("multipleOf"))}
            shift = max((-int(step.as_tuple().exponent) for step in steps), default=0)
            if math.prod(step.scaleb(shift) for step in steps) > _MAX_MULTIPLE:
                raise GrammarRefused(
                    f"{path}: multipleOf has at most {_MAX_MULTIPLE} steps of its last decimal, all of one "
                    "place multiplied; send a smaller one"
                )


# What is written for the engine.


def _write(node: Schema, path: str) -> None:
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
        del node["format"]
    bounds = [decimal_of(node[name]) for name in _BOUNDS if is_number(node.get(name))]
    if any(abs(bound) >= EXACT or not _is_exact(bound) for bound in bounds):
        _narrow(node, path)
    free = node.get("additionalProperties") is not False or "patternProperties" in node
    if free and largest((node,), "minProperties") - len(required_of((node,))) > 1:
        raise GrammarRefused(
            f"{path}/minProperties: at most one property more than those in required can be enforced, since "
            "names may repeat; name the others in required"
        )
    if isinstance(node.get("oneOf"), list):
        name, branches = "anyOf", node["oneOf"]
        if "anyOf" in node:
            name, branches = "allOf", [*list_of(node, "allOf"), {"anyOf": branches}]
        entries = [
            (name, branches) if key == "oneOf" else (key, each) for key, each in node.items() if key != name
        ]
        node.clear()
        node.update(entries)  # the order stays, since it is that of properties in the output


def _check_literals(node: Schema, path: str) -> None:
    """Refuse what the engine would write otherwise than it is."""
    for name in ("const", "enum"):
        if name in node:
            _check_literal(node[name], f"{path}/{name}")
    patterns = [("pattern", node.get("pattern"))]
    patterns += [("patternProperties", name) for name in dict_of(node, "patternProperties")]
    for name, pattern in patterns:
        if isinstance(pattern, str) and any(found["lost"] for found in _PIECES.finditer(pattern)):
            raise GrammarRefused(f"{path}/{name}: {_NO_CONTROLS}")


def _check_literal(value: Any, path: str) -> None:
    if isinstance(value, str) and _UNWRITABLE.search(value):
        raise GrammarRefused(f"{path}: {_NO_CONTROLS}")
    if is_number(value) and not _is_exact(decimal_of(value)):
        raise GrammarRefused(
            f"{path}: a number of more than {DIGITS} digits is not enforced exactly; send it as a string"
        )
    if isinstance(value, list | dict):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_literal(each, path)


def _is_exact(value: Decimal) -> bool:
    _, digits, exponent = value.as_tuple()
    scale = int(exponent)
    return int("".join(map(str, digits)) or 0) <= EXACT and abs(scale) <= -_LEAST.adjusted()


def _narrow(node: Schema, path: str) -> None:
    """Put numbers that the engine has exactly in place of a subschema's bounds, within these."""
    low, high = range_of((node,))
    for name in _BOUNDS:
        node.pop(name, None)
    least, most = _put(node, low, up=True), _put(node, high, up=False)
    if least is not None and least >= _LONG and most is None:
        most = _TOP
        node["maximum"] = int(most)
    if most is not None and most <= -_LONG and least is None:
        least = -_TOP
        node["minimum"] = int(least)
    if least is not None and most is not None and least > most:
        raise GrammarRefused(
            f"{path}: no number of {DIGITS} digits below 2^63 is within its bounds; send wider ones, or "
            "numbers as strings"
        )


def _put(node: Schema, bound: Bound | None, *, up: bool) -> Decimal | None:
    if bound is None:
        return None
    value, strict = bound
    if strict and abs(value) >= EXACT:  # the next float is further away than the next integer
        value += strict
    rounding = ROUND_CEILING if up else ROUND_FLOOR
    near = Context(prec=DIGITS, rounding=rounding).create_decimal(value)
    if int(near.as_tuple().exponent) < _LEAST.adjusted():
        near = near.quantize(_LEAST, rounding=rounding)
    near = max(near, -_TOP) if up else min(near, _TOP)
    name = "inimum" if up else "aximum"
    name = f"exclusiveM{name}" if strict and near == bound[0] else f"m{name}"
    node[name] = int(near) if near == near.to_integral_value() else float(near)
    return near


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
