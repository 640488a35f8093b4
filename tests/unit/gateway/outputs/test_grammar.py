"""The grammar of outputs with calls, compiled for real: it takes what a model of the form writes, no more."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from services.adapters.grammars import GuidanceGrammars, grammars_of
from services.core.generation import Constraint, ConstraintKind
from services.core.outputs.forms import CALL_FORMS, REASONING_FORMS, OutputForm, Tool
from services.gateway.outputs.forms import CallRules, MarkToken, call_grammar, mark_tokens, reasoned_grammar

CHECKPOINT = Path(__file__).parents[4] / "models/tiny/checkpoint/tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [Tool("f", "", json.dumps(SCHEMA), strict=True), Tool("get"), Tool("get_x")]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
REQUIRED, AUTO, SINGLE = CallRules(required=True, by_schema=True), CallRules(), CallRules(single=True)
JSON = CallRules(content={"type": "object"})


class Model:
    def __init__(self, *, special: list[str], added: list[str]) -> None:
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT))
        self.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        self.tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
        (self.eos,) = self.tokenizer.encode("<|end|>", add_special_tokens=False).ids
        found = self.tokenizer.get_added_tokens_decoder().items()
        self.marks = mark_tokens(
            OutputForm(), (MarkToken(one.content, id_, one.special) for id_, one in found)
        )
        self.grammars: GuidanceGrammars = grammars_of(
            self.tokenizer.to_str(), eos_ids=[self.eos], vocab_size=self.tokenizer.get_vocab_size()
        )

    def takes(self, form: OutputForm, rules: CallRules, text: str) -> bool:
        """Whether a whole output may be the text, as this tokenizer writes it."""
        source = call_grammar(form, TOOLS, rules, self.marks)
        matcher = self.grammars.compile(Constraint(ConstraintKind.GRAMMAR, source))
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.fitting([*ids, self.eos]) == len(ids) + 1


@pytest.fixture(scope="module", params=["marks are text", "marks are tokens"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "marks are text":
        return Model(special=[], added=[])
    special = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    added = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    return Model(special=special, added=[*added, *DEEPSEEK])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("reasoning", [None, *REASONING_FORMS])
@pytest.mark.parametrize("name", CALL_FORMS)
def test_an_output_is_what_the_rules_permit(
    model: Model, name: str, reasoning: str | None, thinking: bool
) -> None:
    calls = CALL_FORMS[name]
    form = OutputForm(REASONING_FORMS[reasoning] if reasoning else None, calls, thinking)
    before = ""
    if form.reasoning is not None:
        before = f'{"" if thinking else form.reasoning.open}\nhm {{"name": \n{form.reasoning.close}\n\n'

    def call(tool: str, arguments: str) -> str:
        return f"{tool}{calls.middle}{arguments}{calls.close}"

    one = before + calls.begin + call("f", '{"a": 1}')
    two = one + calls.again + call("get_x", "{}")
    cases = {
        (one + calls.last, "call"): {REQUIRED, AUTO, SINGLE},
        (two + calls.last, "calls"): {REQUIRED, AUTO},
        (before + calls.begin + call("f", '{"a": "x"}') + calls.last, "against the schema"): set(),
        (before + calls.begin + call("h", "{}") + calls.last, "unknown tool"): set(),
        (before + calls.begin + call("get", '{"a": 1}') + calls.last, "no arguments"): {AUTO, SINGLE},
        (before + "Hello", "content"): {AUTO, SINGLE},
        (before, "nothing"): {AUTO, SINGLE},
    }
    if calls.mark:
        cases[before + "Hello\n" + calls.begin + call("f", '{"a": 1}') + calls.last, "both"] = {AUTO, SINGLE}
        cases[before + f"Hello {calls.mark} there", "a mark alone"] = set()
    for (text, what), wanted in cases.items():
        for rules in (REQUIRED, AUTO, SINGLE):
            assert model.takes(form, rules, text) == (rules in wanted), (what, rules, text)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", REASONING_FORMS)
def test_content_behind_reasoning_matches_its_schema(model: Model, name: str, thinking: bool) -> None:
    form = OutputForm(REASONING_FORMS[name], thinking=thinking)
    matcher = model.grammars.compile(
        Constraint(ConstraintKind.GRAMMAR, reasoned_grammar(form, SCHEMA, model.marks))
    )
    before = ("" if thinking else REASONING_FORMS[name].open) + 'hm {"a": "x"}' + REASONING_FORMS[name].close

    def takes(text: str) -> bool:
        ids = [*model.tokenizer.encode(text, add_special_tokens=False).ids, model.eos]
        return matcher.fitting(ids) == len(ids)

    assert takes(before + '\n\n{"a": 1}')
    assert takes('{"a": 1}') == (not thinking)
    assert not takes(before + '\n\n{"a": "x"}')
    assert not takes(before)


def test_free_text_does_not_spell_a_mark_in_pieces(model: Model) -> None:
    form = OutputForm(calls=CALL_FORMS["hermes"])
    source = call_grammar(form, TOOLS, AUTO, model.marks)
    matcher = model.grammars.compile(Constraint(ConstraintKind.GRAMMAR, source))
    pieces = [
        token
        for text in ("Hello <tool", "_call> there")
        for token in model.tokenizer.encode(text, add_special_tokens=False).ids
    ]
    assert matcher.fitting(pieces) < len(pieces)


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMS.items() if form.mark])
def test_content_beside_calls_matches_its_schema(model: Model, name: str) -> None:
    form = OutputForm(calls=CALL_FORMS[name])
    begin, middle, close, last = (
        getattr(CALL_FORMS[name], each) for each in ["begin", "middle", "close", "last"]
    )
    assert model.takes(form, JSON, '{"x": 1}')
    assert model.takes(form, JSON, f'{begin}f{middle}{{"a": 1}}{close}{last}')
    assert not model.takes(form, JSON, "Hello")


def test_marks_in_angles_are_those_that_have_no_bytes() -> None:
    """The grammar names by their ids the tokens that llguidance gives no bytes."""
    model = Model(special=["[TOOL_CALLS]"], added=["<tool_call>", "[ARGS]"])
    known = llguidance.LLTokenizer(model.tokenizer.to_str(), eos_token=[model.eos])
    found = {mark.text: known.is_special_token(mark.id) for mark in model.marks}
    assert found == {"[TOOL_CALLS]": True, "<tool_call>": True, "[ARGS]": False}
    form = OutputForm(calls=CALL_FORMS["mistral-args"])
    assert model.takes(form, REQUIRED, '[TOOL_CALLS]f[ARGS]{"a": 1}')
