"""The splitter: the same parts however the text is cut, and nothing of the text lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.formats.answers import AssistantAnswer, CallDelta, OutputPart, ToolCall, answer_of
from services.core.outputs.forms import CALL_FORMS, REASONING_FORMS, CallForm, OutputForm
from services.gateway.outputs.splitter import OutputSplitter

HERMES, LLAMA = CALL_FORMS["hermes"], CALL_FORMS["llama3"]
THINK = REASONING_FORMS["think"]
BLANKS = st.integers(0, 200).map(lambda size: "\n" * size)
WORDS = BLANKS | st.text('ab<[{}]>"\\/ \n,;é漢tool_call', max_size=30)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.one_of(st.integers(), WORDS, st.lists(WORDS, max_size=2)), max_size=3
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), ARGUMENTS), max_size=3)


def split(form: OutputForm, pieces: list[str]) -> list[OutputPart]:
    splitter = OutputSplitter(form, lambda index: f"id{index}")
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    parts += splitter.finish()
    assert splitter.calls == len({part.index for part in parts if isinstance(part, CallDelta)})
    return parts


def written(form: CallForm, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as a model writes them in a form."""
    texts = [f"{name}{form.middle}{json.dumps(arguments)}{form.close}" for name, arguments in calls]
    return form.begin + form.again.join(texts) + form.last if calls else ""


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[OutputForm, str]:
    """An output that may be cut short anywhere."""
    form = OutputForm(
        draw(st.sampled_from([None, *REASONING_FORMS.values()])),
        draw(st.sampled_from([None, *CALL_FORMS.values()])),
        thinking=draw(st.booleans()),
        held=draw(st.booleans()),
    )
    text = draw(WORDS)
    if form.reasoning is not None:
        text = ("" if form.thinking else form.reasoning.open) + draw(WORDS) + form.reasoning.close + text
    if form.calls is not None:
        text += written(form.calls, draw(CALLS)) + draw(st.sampled_from(["", "", draw(WORDS)]))
    return form, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@given(st.data(), outputs())
def test_cuts_do_not_change_the_parts(data: st.DataObject, output: tuple[OutputForm, str]) -> None:
    form, text = output
    whole = split(form, [text])
    pieces = data.draw(st.composite(cut)(text))
    assert merged(split(form, pieces)) == merged(whole)
    assert merged(split(form, list(text))) == merged(whole)


def merged(parts: list[OutputPart]) -> list[tuple[Any, ...]]:
    """Return kind, texts and place of each part, with neighbours of one kind put together."""
    found: list[tuple[Any, ...]] = []
    for part in parts:
        kind: object = type(part)
        match part:
            case CallDelta(index, call_id, name, arguments):
                kind, text = index, (f"{call_id} {name} " if name else "") + arguments
            case _:
                text = part.text
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


PLAIN_WORDS = st.text("abc {}\n,é", max_size=20)


@pytest.mark.parametrize("name", CALL_FORMS)
@pytest.mark.parametrize("held", [True, False])
@given(content=PLAIN_WORDS, thought=PLAIN_WORDS, calls=CALLS)
def test_what_was_written_is_read(
    name: str, held: bool, content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    form = OutputForm(THINK, CALL_FORMS[name], held=held)
    if calls and not CALL_FORMS[name].mark:
        content = ""
    text = f"<think>\n{thought}\n</think>\n\n{content}{written(CALL_FORMS[name], calls)}"
    found = answer_of(split(form, list(text)))
    assert found.reasoning == thought.strip()
    assert found.content.strip() == content.strip()
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert [call.id for call in found.calls] == [f"id{number}" for number in range(len(calls))]


@given(WORDS)
def test_a_text_without_declared_parts_is_content(text: str) -> None:
    assert answer_of(split(OutputForm(), list(text))) == AssistantAnswer(text)


@given(st.integers(0, 140))
def test_a_held_call_that_is_cut_short_streams_what_there_is(size: int) -> None:
    text = written(HERMES, [("f", {"a": "x}", "b": [1]}), ("g", {})])
    found = answer_of(split(OutputForm(calls=HERMES, held=True), list(text[:size])))
    began = size > text.index(HERMES.middle) + len(HERMES.middle) - 1
    second = text.index(HERMES.middle, text.index(HERMES.again)) + len(HERMES.middle) - 1
    assert len(found.calls) == began + (size > second)
    if began:
        assert '{"a": "x}", "b": [1]}'.startswith(found.calls[0].arguments)
    assert found.content == (text[:size] if size < len(HERMES.mark) else ""), "the mark is of no content"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {\'a\': 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1',
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
        '<tool_call>\n{"name": "f\\ud800", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": [1e999]}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> Done.',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_loose_call_that_is_malformed_is_content(text: str) -> None:
    assert answer_of(split(OutputForm(calls=HERMES), list(text))) == AssistantAnswer(text)


def test_a_loose_call_is_read_in_any_spelling() -> None:
    text = (
        'Sure. <tool_call>{"arguments":{"a":1},"name":"f"}</tool_call><tool_call> {"name":"g"} </tool_call>'
    )
    found = answer_of(split(OutputForm(calls=HERMES), [text]))
    assert found == AssistantAnswer(
        "Sure.", "", (ToolCall("id0", "f", '{"a":1}'), ToolCall("id1", "g", "{}"))
    )


@pytest.mark.parametrize("name", CALL_FORMS)
def test_a_loose_call_keeps_its_arguments_as_written(name: str) -> None:
    form = CALL_FORMS[name]
    arguments = '{"a":0.12345678901234567890123,  "b": "\\u00e9", "c": 36893488147419103232}'
    text = f"{form.begin}f{form.middle}{arguments}{form.close}{form.last}"
    assert answer_of(split(OutputForm(calls=form), [text])).calls == (ToolCall("id0", "f", arguments),)


def test_the_calls_of_deepseek() -> None:
    """As the chat templates of V3 and V3.1 write them."""
    of_v3 = (
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    of_v31 = (
        'Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "```"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    calls = (ToolCall("id0", "f", '{"a": "```"}'), ToolCall("id1", "g", "{}"))
    for name, text in (("deepseek-v3", of_v3), ("deepseek-v31", of_v31)):
        for held in (True, False):
            form = OutputForm(calls=CALL_FORMS[name], held=held)
            assert answer_of(split(form, list(text))) == AssistantAnswer("Sure.", "", calls), (name, held)
        torn = text.replace("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜> so<｜tool▁call▁begin｜>", 1)
        assert not answer_of(split(OutputForm(calls=CALL_FORMS[name]), [torn])).calls


def test_a_loose_call_of_another_tool_is_content() -> None:
    text = written(HERMES, [("f", {}), ("g", {})])
    assert len(answer_of(split(OutputForm(calls=HERMES, names=("f", "g")), [text])).calls) == 2
    assert answer_of(split(OutputForm(calls=HERMES, names=("f",)), [text])) == AssistantAnswer(text)


def test_reasoning_that_the_prompt_opened_needs_no_mark() -> None:
    form = OutputForm(THINK, thinking=True)
    assert answer_of(split(form, list("I am.\n</think>\n\nYes"))) == AssistantAnswer("Yes", "I am.")
    assert answer_of(split(OutputForm(THINK), list("No <think>"))) == AssistantAnswer("No <think>")


def test_text_that_begins_as_a_bare_call_and_is_none_is_content() -> None:
    form = OutputForm(calls=LLAMA, held=True)
    for text in ('{"na', '{"x": 1}', "Hi {"):
        assert answer_of(split(form, list(text))).content == text


def test_blanks_without_end_are_not_held_back() -> None:
    splitter = OutputSplitter(OutputForm(THINK, HERMES, held=True), str)
    sent = sum(len(getattr(part, "text", "")) for _ in range(1000) for part in splitter.feed("\n"))
    assert sent >= 900
