"""Schemas as outputs are held to them: walks through the masks, judged by the package jsonschema."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.adapters.grammars import GuidanceGrammars, grammars_of
from services.adapters.json_schemas import FORMATS, exact_schema, read
from services.core.generation import Constraint, ConstraintKind
from services.ports.grammars import GrammarRefused, MaskRequest

CHECKPOINT = Path(__file__).parents[3] / "models/tiny/checkpoint/tokenizer.json"
Schema = Any
MAX_TOKENS: Final = 400
BIG: Final = 2**53
CONTROLS: Final = [chr(code) for code in (*range(0x20), 0x7F)]
NODE: Final = {"$ref": "#/$defs/n"}
# A property of its own type that it has to have.
ENDLESS: Final = {"type": "object", "properties": {"child": NODE}, "required": ["child"]}


class Walker:
    """Draws documents token by token, each of those that the mask allows; those that end texts more often."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT))
        (self.eos,) = self.tokenizer.encode("<|end|>", add_special_tokens=False).ids
        size = self.tokenizer.get_vocab_size()
        self.grammars: GuidanceGrammars = grammars_of(
            CHECKPOINT.read_text(), eos_ids=[self.eos], vocab_size=size
        )
        texts = [self.tokenizer.decode([token]) for token in range(size)]
        self.closing = np.array([text[:1] in ("]", "}", '"') for text in texts])

    def document(self, constraint: Constraint, rng: Random) -> str | None:
        """Return a document, None where it does not end in time. Raises GrammarRefused."""
        matcher, bits = self.grammars.compile(constraint), np.zeros((1, self.grammars.row_bytes), np.uint8)
        produced: list[int] = []
        while len(produced) < MAX_TOKENS:
            assert self.grammars.fill([MaskRequest(matcher, 0, produced[-1:])], bits) == {}
            allowed = np.flatnonzero(np.unpackbits(bits[0], bitorder="little")[: len(self.closing)])
            if self.eos in allowed and rng.random() < 0.6:
                break
            allowed = allowed[allowed != self.eos]
            if len(allowed) == 0:
                break
            closing = allowed[self.closing[allowed]]
            produced.append(int(rng.choice(closing if len(closing) and rng.random() < 0.6 else allowed)))
        else:
            return None
        return self.tokenizer.decode(produced)

    def takes(self, constraint: Constraint, text: str) -> bool:
        """Whether a whole output may be a text. Raises GrammarRefused."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.grammars.compile(constraint).fitting([*ids, self.eos]) == len(ids) + 1


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def of(schema: Schema) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def exact(text: str) -> Any:
    """Numbers as they are written, so that no rounding hides a difference."""
    return json.loads(text, parse_float=Decimal)


def is_valid(text: str, schema: Schema) -> bool:
    validator = jsonschema.Draft202012Validator(exact(json.dumps(schema)))
    return bool(validator.is_valid(exact(text)))


def refusal(walker: Walker, schema: Schema) -> str:
    with pytest.raises(GrammarRefused) as refused:
        walker.grammars.compile(of(schema))
    return str(refused.value)


class Drawer:
    """A schema of a seed: definitions that refer to each other, with all that schemas are refused for."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.names = [f"d{number}" for number in range(self.rng.randint(1, 4))]

    def schema(self) -> dict[str, Any]:
        later = {name: self.names[place + 1 :] for place, name in enumerate(self.names)}
        definitions = {name: self.structure(2, later[name]) for name in self.names}
        return {"$ref": f"#/$defs/{self.rng.choice(self.names)}", "$defs": definitions}

    def any(self, depth: int, names: Sequence[str] | None = None) -> Any:
        """``names``: the definitions that it may refer to; in place, none that may come back to it."""
        found = self.names if names is None else names
        if found and depth > 0 and self.rng.random() < 0.5:
            return {"$ref": f"#/$defs/{self.rng.choice(found)}"}
        return self.structure(depth - 1, found) if depth > 1 else self.leaf()

    def structure(self, depth: int, names: Sequence[str]) -> Any:
        rng = self.rng
        match rng.randrange(6):
            case 0 | 1 | 2:
                keys = rng.sample(("a", "b", "kind", "é/~"), rng.randint(1, 3))
                found: dict[str, Any] = {
                    "type": "object",
                    "properties": {key: self.any(depth) for key in keys},
                }
                found["required"] = [key for key in keys if rng.random() < 0.6]
                if rng.random() < 0.6:
                    found["additionalProperties"] = rng.choice((False, self.any(depth - 1)))
                return found
            case 3:
                least = rng.randint(0, 2)
                found = {"type": "array", "items": self.any(depth), "minItems": least, "maxItems": least + 1}
                return found | ({"prefixItems": [self.any(depth)]} if rng.random() < 0.4 else {})
            case 4:
                return {"anyOf": [self.any(depth, names) for _ in range(rng.randint(1, 3))]}
        return {"oneOf": [self.branch(depth, names) for _ in range(rng.randint(2, 3))]}

    def branch(self, depth: int, names: Sequence[str]) -> Any:
        kind = {"const": self.rng.choice(("x", "y", "z", 1))}
        tagged = {"type": "object", "properties": {"kind": kind, "v": self.any(depth)}, "required": ["kind"]}
        return self.rng.choice((tagged, tagged, self.any(depth, names), self.leaf()))

    def leaf(self) -> Any:
        rng = self.rng
        match rng.randrange(7):
            case 0:
                return {"type": "null"}
            case 1:
                name = rng.choice((*sorted(FORMATS), "password", "binary", "path", "int64", "entity_id"))
                return {"type": rng.choice(("string", "integer")), "format": name}
            case 2:
                text = f"a{rng.choice(CONTROLS)}b"
                drawn = ({"const": self.number()}, {"enum": [self.number(), "a", None]}, {"const": text})
                return rng.choice(drawn)
            case 3:
                return {"type": "integer", "multipleOf": rng.choice((3, 7, 70, BIG + 1, 2**32))}
        kind = rng.choice(("integer", "number"))
        low, high = sorted((self.number(), self.number()))
        lower = rng.choice(("minimum", "exclusiveMinimum", "title"))
        return {"type": kind, lower: low, rng.choice(("maximum", "exclusiveMaximum")): high}

    def number(self) -> float:
        rng = self.rng
        size = rng.choice((rng.randint(0, 99), BIG + rng.randint(-3, 3), rng.randint(0, 2**64), rng.random()))
        return rng.choice((1, -1)) * size


def has_document(schema: Schema, root: Mapping[str, Any], depth: int) -> bool:
    """Whether a drawn schema has a document of a depth, as far as objects, lists and references decide."""
    if not isinstance(schema, dict) or depth == 0:
        return schema is True
    if "$ref" in schema:
        return has_document(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth - 1)
    if (branches := schema.get("anyOf") or schema.get("oneOf")) is not None:
        return any(has_document(branch, root, depth - 1) for branch in branches)
    if schema.get("type") == "object":
        inner = [schema["properties"][name] for name in schema["required"]]
        return all(has_document(each, root, depth - 1) for each in inner)
    if schema.get("type") == "array" and schema["minItems"]:
        places = [*schema.get("prefixItems", ()), schema["items"], schema["items"]][: schema["minItems"]]
        return all(has_document(each, root, depth - 1) for each in places)
    return True


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_walks_through_drawn_schemas_end_in_valid_documents(walker: Walker, first: int) -> None:
    served = walked = endless = 0
    for seed in range(first, first + 40):
        schema = Drawer(seed).schema()
        finite = has_document(schema, schema, 16)
        try:
            texts = [walker.document(of(schema), Random(seed * 10 + turn)) for turn in range(6)]
        except GrammarRefused as refused:
            message = str(refused)
            assert ("no finite document" in message or "no output can match" in message) <= (not finite), seed
            assert message.startswith("#") or "Unsatisfiable" in message or "xclusiveM" in message, message
            endless += not finite
            continue
        assert finite, (seed, schema)
        served += 1
        for text in texts:
            walked += text is not None
            assert text is None or is_valid(text, schema), (seed, text, schema)
    assert served > 5
    assert walked > 3 * served
    assert endless > 0


ONE_OF: Final = {
    "types by reference": ([{"type": "integer"}, {"$ref": "#/$defs/list"}], ["1", "[1, 2]"]),
    "null beside a reference": ([{"type": "null"}, {"$ref": "#/$defs/chain"}], ["null", "[1, 2]"]),
    "constants": ([{"const": "a"}, {"enum": ["b", 1]}, {"const": None}], ['"a"', "1", "null"]),
    "bounds": ([{"maximum": 0, "type": "number"}, {"exclusiveMinimum": 0, "type": "integer"}], ["0", "1"]),
    "lengths": ([{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}], ['"a"', '"ab"']),
    "items": (
        [
            {"$ref": "#/$defs/list"},
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
        ],
        ["[1, 2]", "[null]"],
    ),
    "required constants": (
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        ['{"k": "cat"}', '{"k": "dog"}'],
    ),
    "a required name that the other lacks": (
        [{"$ref": "#/$defs/cat"}, {"type": "object", "properties": {"z": {}}, "additionalProperties": False}],
        ['{"k": "cat"}', '{"z": 1}', "{}"],
    ),
    "unions": (
        [
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cat"}]},
            {"oneOf": [{"$ref": "#/$defs/dog"}, {"const": 1}]},
        ],
        ["null", '{"k": "cat"}', '{"k": "dog"}', "1"],
    ),
}
DEFS: Final = {
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "chain": {"$ref": "#/$defs/link"},
    "link": {"allOf": [{"$ref": "#/$defs/list"}]},
    **{
        kind: {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]}
        for kind in ("cat", "dog")
    },
}


@pytest.mark.parametrize("what", ONE_OF)
def test_branches_that_exclude_each_other_are_served(walker: Walker, what: str) -> None:
    branches, texts = ONE_OF[what]
    schema = {"oneOf": branches, "$defs": DEFS}
    assert all(walker.takes(of(schema), text) and is_valid(text, schema) for text in texts)
    assert not walker.takes(of(schema), "[true]")
    nested = {"type": "array", "items": {"title": "x", "oneOf": branches}, "minItems": 1, "$defs": DEFS}
    assert walker.takes(of(nested), f"[{', '.join(texts)}]")


def test_what_stands_beside_one_of_counts_for_its_branches(walker: Walker) -> None:
    kinds = [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b")]
    assert walker.takes(of({"type": "object", "oneOf": kinds}), '{"k": "b"}')
    assert "#/oneOf: branches 0 and 1" in refusal(walker, {"oneOf": kinds})  # both match null
    both = {"anyOf": [{"const": 1}, {"const": "a"}], "oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert walker.takes(of(both), "1")
    assert not walker.takes(of(both), "2")


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "null"}, {}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"$ref": "#/$defs/cat"}, {"type": "object", "properties": {"z": {}}}],
        [{"$ref": "#/$defs/list"}, {"type": "array"}],
        [{"const": 1}, {"const": 1.0}],
        [{"maximum": 1, "type": "number"}, {"minimum": 1, "type": "number"}],
    ],
)
def test_branches_that_may_both_match_are_refused_with_their_place(walker: Walker, branches: Schema) -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "array", "items": {"oneOf": branches}}},
        "$defs": DEFS,
    }
    message = refusal(walker, schema)
    assert message.startswith("#/properties/a~1b/items/oneOf: branches 0 and 1 may both match; send anyOf")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (ENDLESS, "#/$defs/n/properties/child"),
        ({"type": "array", "minItems": 1, "items": NODE}, "#/$defs/n/items"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}, NODE]}, "#/$defs/n/prefixItems/1"),
        (
            {"allOf": [{"properties": {"child": NODE}}, {"type": "object", "required": ["child"]}]},
            "#/$defs/n",
        ),
        ({"anyOf": [ENDLESS, {"type": "array", "items": NODE, "minItems": 1}]}, "#/$defs/n"),
        ({"oneOf": [ENDLESS, {"type": "array", "items": NODE, "minItems": 1}]}, "#/$defs/n"),
        ({"type": "object", "additionalProperties": NODE, "minProperties": 1}, "#/$defs/n"),
        ({"type": "object", "additionalProperties": NODE, "required": ["x"]}, "#/$defs/n"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": NODE, "minItems": 1}},
                "required": ["a"],
            },
            "#/$defs/n",
        ),
        ({"anyOf": [{"type": "null"}, ENDLESS], "type": "object"}, "#/$defs/n"),
        ({"allOf": [ENDLESS, {"$ref": "#/$defs/other"}]}, "#/$defs/n"),
        (NODE, "#/properties/x"),
        ({"type": "string", "const": 1}, "#/properties/x"),
    ],
)
def test_schemas_without_a_finite_document_are_refused_with_a_place(
    walker: Walker, schema: Schema, place: str
) -> None:
    whole = {"type": "object", "properties": {"x": NODE}, "required": ["x"]}
    message = refusal(walker, whole | {"$defs": {"n": schema, "other": {"type": "object"}}})
    assert message.startswith(place), message
    assert "no finite document" in message or "no output can match" in message
    # Where it does not have to be, it never is.
    optional = whole | {"required": [], "$defs": {"n": schema, "other": {"type": "object"}}}
    assert walker.takes(of(optional), "{}")
    assert not any(walker.takes(of(optional), f'{{"x": {text}') for text in ("{", "[", "null}", "1}"))
    either = {"anyOf": [NODE, {"type": "boolean"}], "$defs": {"n": schema, "other": {"type": "object"}}}
    assert walker.takes(of(either), "true")
    assert not any(walker.takes(of(either), text) for text in ("{", "["))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "properties": {"c": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}, "required": ["c"]},
        {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#"}, {}]}, "minProperties": 1},
        {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]},
    ],
)
def test_recursion_that_may_end_is_served(walker: Walker, schema: Schema) -> None:
    texts = [walker.document(of(schema), Random(seed)) for seed in range(20)]
    found = [text for text in texts if text is not None]
    assert found
    assert all(is_valid(text, schema) for text in found)


@pytest.mark.parametrize("name", ["date", "ipv4", "uuid", "password", "idn-email", "int64", "unknown", "x"])
@pytest.mark.parametrize(
    "around",
    [
        lambda leaf: leaf,
        lambda leaf: {"$ref": "#/$defs/x", "$defs": {"x": leaf}},
        lambda leaf: {"anyOf": [leaf, {"type": "null"}]},
        lambda leaf: {"allOf": [leaf]},
        lambda leaf: {"oneOf": [leaf, {"type": "null"}]},
    ],
)
def test_formats_that_are_known_hold_and_others_are_annotations(
    walker: Walker, name: str, around: Any
) -> None:
    schema = around({"type": "string", "format": name})
    assert walker.takes(of(schema), '"no format"') == (name not in FORMATS)
    schema = {"type": "object", "patternProperties": {"^k$": schema}, "additionalProperties": False} | (
        {"$defs": schema["$defs"]} if "$defs" in schema else {}
    )
    assert walker.takes(of(schema), '{"k": "no format"}') == (name not in FORMATS)


def test_the_engine_has_the_formats_that_are_enforced(walker: Walker) -> None:
    for name in FORMATS:
        assert not walker.takes(of({"type": "string", "format": name}), '"a b"'), name


@pytest.mark.parametrize(
    "value", [BIG + 1, -BIG - 1, 2**60, 2**64, 1e300, 451705.20289303036, [[BIG + 1]], {"a": BIG + 1}]
)
def test_numbers_that_the_engine_would_round_are_refused(walker: Walker, value: Any) -> None:
    for schema, path in (({"const": value}, "#/const"), ({"enum": [1, value]}, "#/enum")):
        assert refusal(walker, schema).startswith(f"{path}: a number of more than 15 digits")
    assert refusal(walker, '{"const": 9007199254740993.0}').startswith("#/const")


@pytest.mark.parametrize(
    "text", ["1" * 5000, f"1.{'1' * 5000}", "1e999999", "1e400", "-1e-99999999999999999999"]
)
def test_numbers_of_too_many_digits_are_refused_by_their_place(walker: Walker, text: str) -> None:
    for name in ("const", "minimum", "multipleOf", "title", "minItems"):
        schema = f'{{"properties": {{"a": {{"{name}": {text}}}}}}}'
        assert refusal(walker, schema) == f"#/properties/a/{name}: too many digits; send it as a string"
        grammar = Constraint(ConstraintKind.GRAMMAR, f"start: %json {schema}")
        with pytest.raises(GrammarRefused, match=f"#/properties/a/{name}: too many digits"):
            walker.grammars.compile(grammar)
    for name in ("Infinity", "-Infinity", "NaN"):
        assert refusal(walker, f'{{"enum": [1, {name}]}}') == f"#/enum/1: {name} is no JSON"


def test_control_characters_that_have_no_short_escape_are_refused_in_literals(walker: Walker) -> None:
    for code in (*range(0x21), 0x7F, 0x80, 0x2028):
        text = f"a{chr(code)}b"
        for schema, value in (({"const": text}, text), ({"enum": [{"k": [text]}]}, {"k": [text]})):
            if (code in range(0x20) and chr(code) not in "\b\f\n\r\t") or code == 0x7F:
                assert refusal(walker, schema).startswith(f"#/{next(iter(schema))}: control characters")
            else:
                found = walker.document(of(schema), Random(code))
                assert found is not None
                assert json.loads(found) == value
        for written in (chr(code), f"\\x{code:02x}", f"\\u{code:04x}", f"\\u{{{code:x}}}"):
            for pattern in (f"^a{written}b$", f"^a[{written}]b$", f"^(a{written}|c)b$"):
                for name, where in (("pattern", pattern), ("patternProperties", {pattern: {}})):
                    if code == 0x7F or (code < 0x20 and chr(code) not in "\b\f\n\r\t"):
                        assert refusal(walker, {name: where}).startswith(f"#/{name}: control characters"), (
                            pattern
                        )
                    elif code < 0x80 or written == chr(code):
                        walker.grammars.compile(of({name: where}))
        named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
        found = walker.document(of(named | {"additionalProperties": False}), Random(code))
        assert found is not None
        assert json.loads(found) == {text: 1}


@pytest.mark.parametrize(
    "pattern", [r"^a[^\x00-\x1f]b$", r"^\\x01$", r"^[a-z\x01]$", r"^\x41\t\u{7e}$", r"^\d\[x]$"]
)
def test_patterns_that_leave_control_characters_out_are_served(walker: Walker, pattern: str) -> None:
    found = walker.document(of({"type": "string", "pattern": pattern}), Random(1))
    assert found is not None
    assert is_valid(found, {"type": "string", "pattern": pattern.replace("u{7e}", "x7e")})


def test_steps_are_exact_or_refused(walker: Walker) -> None:
    assert walker.takes(of({"type": "integer", "multipleOf": 70}), "140")
    pair = {"allOf": [{"multipleOf": 65536}, {"$ref": "#/$defs/s"}], "$defs": {"s": {"multipleOf": 65537}}}
    for schema in (pair, {"type": "integer", "multipleOf": BIG + 1}, {"multipleOf": 2**32}):
        assert refusal(walker, schema).startswith("#: multipleOf")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_any_size_hold_exactly(walker: Walker, kind: str, seed: int) -> None:
    rng = Random(seed)
    edges = (BIG - 1, BIG, BIG + 1, 10**17 + 1, 10**18, 2**60 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**25, 0, 7)
    low, high = sorted(rng.choice((1, -1)) * rng.choice(edges) for _ in range(2))
    lower, upper = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
    schema = {"type": kind} | rng.choice(({lower: low}, {upper: high}, {lower: low, upper: high}))
    try:
        walker.grammars.compile(of(schema))
    except GrammarRefused as refused:
        assert "within its bounds" in str(refused) or "Unsatisfiable" in str(refused)  # noqa: PT017
        return
    near = {edge + step for edge in (low, high, 0, 10**12, -(10**12)) for step in (-1025, -1, 0, 1, 1025)}
    for value in sorted(near | {Decimal(low) + Decimal("0.5"), Decimal(high) - Decimal("0.5")}):
        if walker.takes(of(schema), f"{value:f}"):
            assert is_valid(f"{value:f}", schema), (schema, value)
    # What has fewer digits than a float, and is within the 64-bit integers, stays possible.
    for value in (0, 10**12, -(10**12), 10**15):
        if is_valid(str(value), schema):
            assert walker.takes(of(schema), str(value)), (schema, value)


def test_a_free_property_takes_no_name_of_another_by_escapes(walker: Walker) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^b": {"const": 1}},
    }
    assert walker.takes(of(schema), '{"a": 1, "c": "x"}')
    for name in ("\\u0061", "\\u0062"):
        assert not walker.takes(of(schema), f'{{"a": 1, "{name}": "x"}}')
    assert refusal(walker, {"type": "object", "minProperties": 2}).startswith("#/minProperties: ")


HOLDS: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPTIONS: Final = {"lenient": True, "coerce_one_of": True, "item_separator": ";", "key_separator": "=", "x": 1}
GRAMMARS: Final = (
    "start: %json {}",
    'start: "{}"? %json{}',
    '// "\nstart: %json\n {}',
    'start: A %json {}\nA: /"|%json/?',
    'start: A? %json {} # "\nA: "\\"%json"',
    "start: inner\ninner: %json {}",
    "start: %lark {{\nstart: %json {}\n}}",
)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_engine_are_no_clients(walker: Walker, option: str) -> None:
    for guidance in ({option: OPTIONS[option]}, 1, None, "lenient"):
        for schema in (HOLDS | {"x-guidance": guidance}, {"allOf": [HOLDS | {"x-guidance": guidance}]}):
            assert walker.takes(of(schema), '{"a": 1, "b": 2}')
            assert not walker.takes(of(schema), '{"a": 1; "b": 2}')
        unserved = {"not": {"type": "null"}, "x-guidance": guidance}
        assert "not" in refusal(walker, unserved)
        for grammar in GRAMMARS:
            text = grammar.replace("{{", "{").replace("}}", "}").replace("{}", json.dumps(unserved), 2)
            with pytest.raises(GrammarRefused):
                walker.grammars.compile(Constraint(ConstraintKind.GRAMMAR, text))


def test_schemas_within_grammars_are_held_to_alike(walker: Walker) -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/s"}]}}} | {
        "type": "object",
        "$defs": {"s": {"type": "string", "format": "password"}},
    }
    text = f'start: A %json {json.dumps(schema)} B\nA: "%json "? /x|"/?\nB: "%json"?'
    grammar = Constraint(ConstraintKind.GRAMMAR, text)
    assert walker.takes(grammar, '{"a": "b"}')
    assert walker.takes(grammar, '%json {"a": null}%json')
    endless = Constraint(
        ConstraintKind.GRAMMAR, f"start: %json {json.dumps(NODE | {'$defs': {'n': ENDLESS}})}"
    )
    with pytest.raises(GrammarRefused, match=r"#/\$defs/n/properties/child: no finite document"):
        walker.grammars.compile(endless)


@pytest.mark.parametrize("kind", [ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_an_exact_constraint_is_compiled_as_it_is(walker: Walker, kind: ConstraintKind, first: int) -> None:
    served = 0
    for seed in range(first, first + 20):
        text = json.dumps(Drawer(seed).schema())
        drawn = Constraint(kind, text if kind is ConstraintKind.JSON_SCHEMA else f"start: %json {text}")
        try:
            exact, texts = walker.grammars.exact(drawn), [walker.document(drawn, Random(n)) for n in range(3)]
        except GrammarRefused:
            continue
        served += 1
        assert exact.exact
        assert walker.grammars.exact(exact) is exact
        assert [walker.document(exact, Random(n)) for n in range(3)] == texts
        # A worker of an earlier release rewrites it again.
        assert walker.grammars.exact(replace(exact, exact=False)) == exact
    assert served > 2
    # Only a gateway writes these; it is not analysed.
    lenient = '{"oneOf":[{"type":"integer"},{"type":"number"}],"x-guidance":{"coerce_one_of":true}}'
    source = lenient if kind is ConstraintKind.JSON_SCHEMA else f"start: %json {lenient}"
    assert walker.takes(Constraint(kind, source, exact=True), "1")
    with pytest.raises(GrammarRefused, match="may both match"):
        walker.grammars.compile(Constraint(kind, source))


def test_a_constraint_too_long_in_its_exact_form_stays_as_it_is(walker: Walker) -> None:
    for constraint in (
        of(f'{{"enum":["{"é" * 16_000}"]}}'),
        Constraint(ConstraintKind.REGEX, "a+"),
        Constraint(ConstraintKind.CHOICE, '["a"]'),
    ):
        assert walker.grammars.exact(constraint) is constraint
        walker.grammars.compile(constraint)
    with pytest.raises(GrammarRefused, match="longer"):
        walker.grammars.exact(of(f'{{"title":"{"é" * 40_000}"}}'))


def test_references_are_those_of_the_standard(walker: Walker) -> None:
    names = {"a/b": {"const": 1}, "c~d": {"const": 2}, "e f%": {"const": 3}}
    for pointer, value in (("a~1b", 1), ("c~0d", 2), ("e%20f%25", 3)):
        schema = {"$ref": f"#/$defs/{pointer}", "$defs": names}
        assert walker.takes(of(schema), str(value))
        assert not walker.takes(of(schema), str(value % 3 + 1))
    within = {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/oneOf/1"}}]}
    assert walker.takes(of(within), "[[], []]")
    branches: Schema = {"oneOf": [{"const": "x"}, {"const": 5}]}
    either: Schema = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    deeper: Schema = {"oneOf": [{"oneOf": [{"const": "y"}, {"const": 5}]}, {"type": "null"}]}
    # Where branches stand beside others, or nothing but the reference names them, and where these are used.
    for schema, pointer in (
        (branches, "oneOf/1"),
        (branches | either, "oneOf/1"),
        (branches | either | {"allOf": [{"minLength": 0}]}, "oneOf/1"),
        (deeper, "oneOf/0/oneOf/1"),
        (deeper | {"anyOf": [{"maxLength": 9}]}, "oneOf/0/oneOf/1"),
    ):
        for used in ({}, {"minProperties": 1, "additionalProperties": {"$ref": "#/$defs/a"}}):
            wanted: Schema = {"type": "object", "required": ["b"], **used}
            wanted |= {"properties": {"b": {"$ref": f"#/$defs/a/{pointer}"}}, "$defs": {"a": schema}}
            assert walker.takes(of(wanted), '{"b": 5}'), wanted
            assert not any(walker.takes(of(wanted), f'{{"b": {text}}}') for text in ("6", '"x"', '"z"'))
    recursive = {"$id": "T0", "type": "array", "items": {"$ref": "T0"}, "$anchor": "top", "maxItems": 2}
    elsewhere = {
        "$id": "https://example.com/a/b",
        "$ref": "c",
        "$defs": {"c": {"$id": "c", "format": "x", "const": 1}},
    }
    for schema, text in (
        ({"properties": {"a": recursive}, "type": "object"}, '{"a": [[], [[]]]}'),
        ({"$ref": "T0#top", "$defs": {"a": recursive}}, "[[], [[]]]"),
        ({"$ref": "T0#/items", "$defs": {"a": recursive}}, "[[], [[]]]"),
        (elsewhere, "1"),
        ({"$ref": "#n", "$defs": {"n": {"$anchor": "n", "enum": [1]}}}, "1"),
    ):
        assert walker.takes(of(schema), text)
        assert not walker.takes(of(schema), text.replace("[]", "[null]").replace("1", "2"))
    lost = {"type": "array", "items": {"$ref": "T0"}, "minItems": 1, "$id": "T0"}
    assert "no finite document" in refusal(walker, lost)
    for pointer in ("#/$defs/z", "#/", "#anchor", "z.json", "#/$defs/a~1b/0"):
        assert refusal(walker, {"items": {"$ref": pointer}, "$defs": names}).startswith("#/items/$ref: ")


def branching(times: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(times):
        schema = {"allOf": [{"anyOf": [schema, schema]}, {"anyOf": [schema, schema]}]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(800)} | {"800": {}},
        },
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
            | {"a60": {}},
        },
        branching(6),
        {
            "oneOf": [
                {"properties": {"k": {"const": n}}, "required": ["k"], "type": "object"} for n in range(600)
            ]
        },
        {"enum": [f"k{n}" for n in range(6000)]},
        {"properties": {f"p{n}": {"items": {"$ref": "#"}, "minItems": 1} for n in range(200)}},
        {"allOf": [{"multipleOf": 0.1**n} for n in range(1, 300)]},
        '{"multipleOf": 1e999999999, "maximum": 1e999999999, "minimum": -1e-999999999}',
        '{"multipleOf": 1e99999999999999999999}',
        '{"const": Infinity}',
        '{"minimum": 1e999999}',
        {
            "type": "object",
            "required": [f"n{n}" for n in range(3000)],
            "oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(60)],
        },
        {
            "type": "object",
            "required": ["a"] * 10_000,
            "oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(60)],
        },
        {"allOf": [{"anyOf": [{"minimum": n} for n in range(256)]}] + [{}] * 15_000},
        {
            "$ref": "#/$defs/b0",
            "$defs": {"a": {"anyOf": [{"minimum": 1}] * 200}}
            | {
                f"b{n}": {"anyOf": [{"$ref": "#/$defs/a"}] * 40 + [{"$ref": f"#/$defs/b{n + 1}"}]}
                for n in range(50)
            }
            | {"b50": {}},
        },
        {"pattern": "[" * 60_000},
        {"patternProperties": {"\\x{" + "0" * 60_000: {}}},
        {"$id": f"http://a/{'b/' * 9000}", "allOf": [{"$id": "x"}] * 3000},
        {
            "allOf": [{"const": list(range(5000))}, {"const": list(range(5000))}],
            "oneOf": [{"type": "array", "minItems": n, "maxItems": n} for n in range(200)],
        },
        '{"title": NaN, "maximum": -1e400}',
        "[" * 60_000,
        '{"items":' * 900 + "{}" + "}" * 900,
        '{"enum": ' + "[" * 900 + "]" * 900 + "}",
        {"$defs": [], "$ref": "#/$defs/0"},
        {"$defs": 1, "properties": {"a~b": {}, "c": {"$ref": "#/properties/a~0b"}}},
        {"type": 7, "required": 1, "enum": 1, "allOf": 1, "properties": [], "items": "x", "minItems": "y"},
        {"type": [1, {}], "required": [1], "anyOf": [1], "minimum": "z", "maximum": None, "format": 1},
    ],
)
def test_hostile_schemas_cost_little_and_end_in_an_answer(walker: Walker, schema: Schema) -> None:
    constraint, started = of(schema), time.process_time()
    with suppress(ValueError, TypeError, ArithmeticError, RecursionError, GrammarRefused):
        exact_schema(read(constraint.source)[0], {})
    # A text process ends after 0.25 s of its own interpreter; this finds what no number of steps bounds.
    assert time.process_time() - started < 2.0
    with suppress(GrammarRefused):
        walker.grammars.compile(constraint)
