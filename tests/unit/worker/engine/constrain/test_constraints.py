"""Constrained outputs of an engine with the bundled checkpoint: whatever else goes on, the text matches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from msgspec import structs
from tokenizers import Tokenizer

from bench.guided.schemas import FORMATS, drawn, is_valid
from services.core.generation import JSON_OBJECT, Constraint, ConstraintKind
from services.worker.engine.constrain.constraints import SHARE_S
from services.worker.engine.core import Engine
from services.worker.engine.load.loading import load
from services.worker.engine_protocol import Cancel, Credit, EngineConfig, Park, Submit
from tests.support.submits import make_submit

FOLDER: Final = Path("models/tiny/checkpoint")
MOST: Final = 70
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def of_schema(schema: Mapping[str, Any] = SCHEMA) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def of_regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


PROMPT: Final = 'x = {"name": "a", "age": 3, "tags": ["x"]}\ny = '


@dataclass(slots=True)
class Run:
    """What came of an engine's sequences, by handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    proposed: int = 0
    accepted: int = 0
    preemptions: int = 0

    def text(self, handle: int) -> str:
        return str(tokenizer().decode(self.tokens[handle]))


def engine_of(**options: Any) -> Engine:
    config = EngineConfig("", str(FOLDER), threads=1, prefix_cache=False, kv_blocks=200)
    fields = {name: getattr(config, name) for name in config.__struct_fields__} | options
    engine = load(EngineConfig(**fields), lambda phase, ratio: None)[0]
    # With time that counts calls, what is planned is the same in each run, and proposals always pay.
    ticks = count()
    engine._clock = lambda: float(next(ticks))
    if engine._speculation is not None:
        engine._speculation._clock = lambda: 0.0
    return engine


def submit(handle: int, constraint: Constraint | None, *, prompt: str = PROMPT, **options: Any) -> Submit:
    ids = tokenizer().encode(prompt).ids
    options = {"max_tokens": MOST, "temperature": 0.0, "seed": handle} | options
    return make_submit(handle, ids, MOST, constraint=constraint, **options)


def run(engine: Engine, submits: Iterable[Submit] = (), *, steps: int | None = None) -> Run:
    """Run until nothing is left to do, or for so many steps."""
    found = Run()
    for each in submits:
        engine.apply(each)
    if engine._constraints is not None:  # how long compilations take decides nothing
        wait(engine._constraints._pending.values())
    while engine.has_work and steps != 0:
        stepped = engine.step()
        for handle, token in zip(stepped.handles, stepped.tokens, strict=True):
            found.tokens.setdefault(handle, []).append(token)
        found.finished |= stepped.finished
        found.errors |= stepped.errors
        for handle, entries in stepped.logprobs.items():
            found.logprobs.setdefault(handle, []).extend(entries)
        found.proposed += stepped.proposed_tokens
        found.accepted += stepped.accepted_tokens
        found.preemptions = stepped.preemptions
        steps = steps - 1 if steps is not None and stepped.handles else steps
    engine.check_integrity()
    return found


DRAWING: Final[Mapping[str, Any]] = {"temperature": 1.0, "top_p": 0.95}


def member(handle: int, **options: Any) -> Submit:
    """Return a sequence of ``alone``: greedy, drawn or unconstrained."""
    return submit(handle, None if handle == 2 else of_schema(), **(DRAWING if handle == 1 else {}), **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Run:
    """Greedy and drawn outputs, and an unconstrained one, in one batch."""
    return run(engine, map(member, (0, 1, 2)))


def test_outputs_match_their_schema(alone: Run) -> None:
    for handle in (0, 1):
        assert alone.finished[handle] == "stop"
        jsonschema.validate(json.loads(alone.text(handle)), SCHEMA)
    assert alone.text(0) != alone.text(1)


def test_an_output_without_a_constraint_is_what_it_is_alone(engine: Engine, alone: Run) -> None:
    assert run(engine, [member(2)]).tokens[2] == alone.tokens[2]


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 3, "max_sequences": 3},  # prompts in chunks of a token or two
        {"speculation": "prompt_lookup"},
        {"speculation": "draft", "draft_model_dir": str(FOLDER)},
        {"kv_blocks": 8, "max_model_len": 128},  # too few for three: the youngest is preempted
    ],
    ids=["chunked", "prompt_lookup", "draft", "preempted"],
)
def test_tokens_are_the_same_however_they_are_computed(alone: Run, options: dict[str, Any]) -> None:
    engine = engine_of(**options)
    found = run(engine, map(member, (2, 0, 1)))
    if "kv_blocks" in options:
        assert found.preemptions > 0
        resumed = [handle for handle, reason in found.finished.items() if reason == "preempted"]
        for handle in resumed:  # as the scheduler would, with its tokens
            made = found.tokens[handle]
            rest = run(engine, [member(handle, produced_ids=made)])
            found.tokens[handle] = made + rest.tokens[handle]
    if "speculation" in options:
        assert found.accepted > 0
    assert found.tokens == alone.tokens


@pytest.mark.parametrize("handle", [0, 1])
def test_a_resumed_output_goes_on_as_it_would_have(engine: Engine, alone: Run, handle: int) -> None:
    whole = alone.tokens[handle]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert run(engine, [member(handle, produced_ids=whole[:cut])]).tokens[handle] == whole[cut:]


def test_the_end_comes_exactly_where_the_output_is_complete(engine: Engine) -> None:
    constraints = [of_regex("ab?"), of_regex("a{3}"), Constraint(ConstraintKind.CHOICE, '["yes","no"]')]
    found = run(engine, [submit(number, each) for number, each in enumerate(constraints)])
    assert found.text(0) in ("a", "ab")
    assert found.text(1) == "aaa"
    assert found.text(2) in ("yes", "no")
    assert set(found.finished.values()) == {"stop"}


def test_an_output_that_is_complete_ends_before_min_tokens(engine: Engine) -> None:
    found = run(engine, [submit(0, of_regex("a{3}"), min_tokens=20), submit(1, of_regex("a*"), min_tokens=9)])
    assert found.text(0) == "aaa"
    assert found.finished[0] == "stop"
    assert len(found.tokens[1]) > 9


def test_ignored_ends_are_repeated(engine: Engine) -> None:
    found = run(engine, [submit(0, of_regex("a{3}"), ignore_eos=True, max_tokens=12)])
    assert found.finished == {0: "length"}
    assert found.text(0) == "aaa"
    assert len(found.tokens[0]) == 12


def test_a_grammar_and_any_object(engine: Engine) -> None:
    grammar = Constraint(ConstraintKind.GRAMMAR, 'start: "(" start ")" | "x"')
    found = run(engine, [submit(0, grammar, max_tokens=8), submit(1, of_schema(json.loads(JSON_OBJECT)))])
    assert set(found.text(0)) <= set("(x)")
    if found.finished[1] == "stop":
        assert isinstance(json.loads(found.text(1)), dict)


def test_log_probabilities_are_those_of_the_allowed_tokens(engine: Engine) -> None:
    found = run(engine, [submit(0, of_regex("[ab]"), logprobs=8)])
    first = found.logprobs[0][0]
    assert {tokenizer().decode([token]) for token in first.top_ids} == {"a", "b"}
    assert sum(2.718281828**each for each in first.top_logprobs) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("constraint", "word"),
    [
        (of_regex("["), "invalid regex"),
        (of_schema({"$ref": "#"}), "#: no output can match"),
        (of_schema({"$ref": "https://example.com/schema.json"}), "example.com"),
        (Constraint(ConstraintKind.CHOICE, "[1]"), "strings"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "property name"),
        # Keywords that are not held to: ``drawn`` has none of them.
        (of_schema({"type": "array", "uniqueItems": True, "maxItems": 2}), "uniqueItems"),
        (of_schema({"type": "array", "contains": {"const": 1}}), "contains"),
        (of_schema({"not": {"const": 1}}), "not"),
        (of_schema({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "number"}]}), "oneOf"),
    ],
)
def test_a_refused_constraint_fails_its_sequence_alone(
    engine: Engine, alone: Run, constraint: Constraint, word: str
) -> None:
    found = run(engine, [submit(0, of_schema()), submit(5, constraint)])
    assert found.finished == {0: "stop", 5: "constraint"}
    assert word in found.errors[5]
    assert found.tokens == {0: alone.tokens[0]}


def test_produced_tokens_that_do_not_match_fail_their_sequence_alone(engine: Engine, alone: Run) -> None:
    found = run(engine, [submit(0, of_schema()), submit(5, of_schema(), produced_ids=[9, 9])])
    assert found.finished == {0: "stop", 5: "constraint"}
    assert found.tokens == {0: alone.tokens[0]}


def test_commands_reach_a_sequence_whose_constraint_is_being_compiled(engine: Engine, alone: Run) -> None:
    engine.apply(submit(0, of_schema()))
    engine.apply(submit(1, of_schema()))
    engine.apply(Park([0]))
    engine.apply(Cancel([1]))
    engine.apply(Credit([0], [MOST]))
    found = run(engine)
    assert found.tokens == {0: alone.tokens[0]}


# --- masks that take long -----------------------------------------------------------------------------


class ManualExecutor(Executor):
    """Runs its tasks with ``run``."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(task(*arguments, **named))

        self.tasks.append(run)
        return future

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


def with_masks_of(engine: Engine, mask_s: float) -> Engine:
    """Return the engine with a clock of the processor by which each mask takes so long."""
    assert engine._constraints is not None
    readings = count()
    engine._constraints._processor_s = lambda: next(readings) * mask_s
    return engine


@pytest.mark.parametrize("mask_s", [SHARE_S, 0.0035, 1.0], ids=["quick", "late", "slow"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 3, "max_sequences": 3},
        {"speculation": "prompt_lookup"},
        {"kv_blocks": 8, "max_model_len": 128},
        {"prefix_cache": True},
    ],
    ids=["plain", "chunked", "prompt_lookup", "preempted", "cached"],
)
def test_tokens_are_the_same_however_long_masks_take(
    alone: Run, options: dict[str, Any], mask_s: float
) -> None:
    engine = with_masks_of(engine_of(**options), mask_s)
    found = run(engine, map(member, (2, 0, 1)))
    for handle in [handle for handle, reason in found.finished.items() if reason == "preempted"]:
        made = found.tokens[handle]
        found.tokens[handle] = made + run(engine, [member(handle, produced_ids=made)]).tokens[handle]
    assert found.tokens == alone.tokens
    assert not engine.has_work


def test_a_step_computes_masks_up_to_its_budget_and_the_others_in_the_next(alone: Run) -> None:
    engine = with_masks_of(engine_of(), 0.0035)
    submits = [submit(0, of_schema()), submit(3, of_schema()), submit(2, None)]
    first, second = (run(engine, each, steps=1) for each in (submits, ()))
    assert set(first.tokens) == {0, 2}
    assert set(second.tokens) == {3, 2}  # 0 was slow twice
    assert first.tokens[0] == second.tokens[3] == alone.tokens[0][:1]


def test_a_slow_output_delays_no_other_while_its_mask_is_computed(alone: Run) -> None:
    engine = with_masks_of(engine_of(), 1.0)
    assert engine._constraints is not None
    apart = engine._constraints._slow_masking = ManualExecutor()
    begun = run(engine, map(member, (0, 2)), steps=1)
    others = run(engine, steps=5)
    assert set(others.tokens) == {2}
    assert len(apart.tasks) == 1
    rest = Run()
    while 0 not in rest.finished:
        apart.run()
        step = run(engine, steps=1)
        rest.tokens.setdefault(0, []).extend(step.tokens.get(0, []))
        rest.finished |= step.finished
    assert begun.tokens[0] + rest.tokens[0] == alone.tokens[0]


def test_a_slow_output_whose_masks_become_quick_is_in_the_steps_again() -> None:
    engine = with_masks_of(engine_of(), 1.0)
    assert engine._constraints is not None
    run(engine, [submit(0, of_regex("a{3}"), max_tokens=120, ignore_eos=True)], steps=1)
    engine.apply(Credit([0], [120]))
    assert engine._constraints.is_slow(0)
    with_masks_of(engine, 0.0)
    run(engine, steps=90)
    assert not engine._constraints.is_slow(0)
    engine._constraints._slow_masking = ManualExecutor()  # which computes nothing
    assert run(engine).finished == {0: "length"}


def test_commands_reach_a_sequence_whose_mask_is_computed_apart() -> None:
    engine = with_masks_of(engine_of(), 1.0)
    assert engine._constraints is not None
    apart = engine._constraints._slow_masking = ManualExecutor()
    run(engine, map(member, (0, 1, 3)), steps=1)
    while len(apart.tasks) < 3:
        run(engine, steps=1)
    engine.apply(Cancel([1]))
    engine.apply(Park([0]))
    apart.run()
    assert run(engine, steps=1).tokens.keys() == {0, 3}
    assert len(apart.tasks) == 1, "0 has no credit"
    engine.apply(Cancel([3]))
    apart.run()
    assert engine.step().handles == []
    assert not engine.has_work
    engine.apply(Credit([0], [MOST]))
    assert engine.step().handles == []  # its row is late
    apart.run()
    assert run(engine, steps=1).tokens.keys() == {0}


def test_a_sequence_that_is_preempted_while_its_mask_is_computed_apart_goes_on(alone: Run) -> None:
    engine = with_masks_of(engine_of(kv_blocks=7, max_model_len=112), 1.0)
    assert engine._constraints is not None
    apart = engine._constraints._slow_masking = ManualExecutor()
    found = run(engine, [member(2), member(0)], steps=MOST)
    assert found.finished == {2: "length"}
    assert found.preemptions == 1
    for _ in range(3):  # it is prefilled again, and its row is late
        assert engine.step().handles == []
    assert len(apart.tasks) == 1
    while 0 not in found.finished:
        apart.run()
        stepped = engine.step()
        found.tokens[0] += stepped.tokens
        found.finished |= stepped.finished
    assert found.tokens == {0: alone.tokens[0], 2: alone.tokens[2]}


def test_suspects_are_masked_in_the_steps_that_they_have_alone(alone: Run) -> None:
    engine = with_masks_of(engine_of(), 1.0)
    assert engine._constraints is not None
    engine._constraints._slow_masking = ManualExecutor()
    found = run(engine, [structs.replace(member(0), apart_tokens=4), member(2)], steps=12)
    assert len(found.tokens[0]) == 4
    assert found.tokens[0] == alone.tokens[0][:4]


def test_an_engine_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    engine = load(EngineConfig("", str(tmp_path), executor="null"), lambda phase, ratio: None)[0]
    found = run(engine, [make_submit(0, [1, 2], 4, max_tokens=4, seed=0, constraint=of_regex("a"))])
    assert found.finished == {0: "constraint"}
    assert "tokenizer" in found.errors[0]


def test_an_engine_without_a_model_keeps_to_constraints_too() -> None:
    engine = engine_of(executor="null")
    found = run(engine, [submit(0, of_schema(), seed=3), submit(1, None, max_tokens=5)])
    assert len(found.tokens[1]) == 5
    if found.finished[0] == "stop":
        jsonschema.validate(json.loads(found.text(0)), SCHEMA)


def test_outputs_of_drawn_schemas_are_valid_whole_and_resumed(engine: Engine) -> None:
    schemas = dict(enumerate(map(drawn, range(20))))
    drawing: dict[str, Any] = {"temperature": 1.0}
    whole = run(engine, [submit(each, of_schema(schema), **drawing) for each, schema in schemas.items()])
    assert whole.errors == {}
    ended = [handle for handle, reason in whole.finished.items() if reason == "stop"]
    assert len(ended) > len(schemas) / 2
    for handle in ended:
        assert is_valid(whole.text(handle), schemas[handle]), (whole.text(handle), schemas[handle])
    halves = {handle: tokens[: len(tokens) // 2] for handle, tokens in whole.tokens.items()}
    again = [submit(n, of_schema(schemas[n]), produced_ids=half, **drawing) for n, half in halves.items()]
    resumed = run(engine, again)
    assert {n: half + resumed.tokens[n] for n, half in halves.items()} == whole.tokens


# Of each keyword that ``drawn`` has, and each format.
KEYWORDS: Final[Mapping[str, dict[str, Any]]] = {
    **{name: {"type": "string", "format": name} for name in FORMATS},
    "allOf": {"allOf": [{"type": "integer", "minimum": -9}, {"maximum": 40}]},
    "oneOf": {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 0}, {"type": "string", "maxLength": 2}]},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["a", 1]}],
        "items": False,
        "minItems": 1,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
    },
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 60},
}


def test_each_drawn_keyword_and_format_is_held_to(engine: Engine) -> None:
    assert all(any(word in json.dumps(drawn(seed)) for seed in range(200)) for word in KEYWORDS)
    asked = [(name, schema) for name, schema in KEYWORDS.items() for _ in range(6)]
    submits = [submit(n, of_schema(schema), temperature=1.0, seed=n) for n, (_, schema) in enumerate(asked)]
    found = run(engine, submits)
    assert found.errors == {}
    ended = {handle for handle, reason in found.finished.items() if reason == "stop"}
    assert {asked[handle][0] for handle in ended} == set(KEYWORDS)
    for handle in ended:
        assert is_valid(found.text(handle), asked[handle][1]), (asked[handle][0], found.text(handle))


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ("2024-02-29", "0000-02-29"), ("2023-02-30", "2023-2-3", "20230203", "2023-W01-1")),
        (
            "time",
            ("23:59:60Z", "12:00:00.25+01:30"),
            ("12:00:00", "24:00:00Z", "12:60:00Z", "12:00:00+24:00"),
        ),
        ("ipv4", ("127.0.0.1",), ("1.2.3", "1.2.3.256")),
        ("uuid", ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567e89b12d3a456426614174000", "x")),
    ],
)
def test_drawn_formats_are_checked(name: str, valid: tuple[str, ...], invalid: tuple[str, ...]) -> None:
    schema = {"type": "string", "format": name}
    assert all(is_valid(json.dumps(text), schema) for text in valid)
    assert not any(is_valid(json.dumps(text), schema) for text in invalid)
    assert name in FORMATS
