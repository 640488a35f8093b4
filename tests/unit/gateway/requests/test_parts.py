"""Outputs in parts: on a stream, whole, and for a client that continues behind what it has."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.formats.answers import AssistantAnswer, CallDelta, OutputPart, ToolCall, answer_of
from services.core.errors import StreamBroken
from services.core.generation import FinishReason, StageClock, Usage
from services.core.outputs.families import CALL_FORMS, REASONING_FORMS
from services.core.outputs.forms import OutputForm
from services.gateway.events import (
    Accepted,
    ChoiceResult,
    Delivered,
    DeliveredChoice,
    Event,
    Finished,
    Tokens,
    request_tag,
)
from services.gateway.requests.parts import call_id, in_parts
from services.gateway.requests.streaming import complete

HERMES = CALL_FORMS["hermes"]
FORM = OutputForm(REASONING_FORMS["think"], HERMES, held=True)
TEXT = (
    "<think>\nhm\n</think>\n\nSure.\n"
    + HERMES.begin
    + 'f", "arguments": {"a": 1}'
    + HERMES.close
    + HERMES.again
    + 'g", "arguments": {}'
    + HERMES.close
)


async def events(
    text: str, cuts: list[int], form: OutputForm | None = FORM, reason: FinishReason = FinishReason.STOP
) -> AsyncGenerator[Event, None]:
    """Yield an output of one token per character, in pieces."""
    yield Accepted("r1", "m", "sha256:1", 1, 1, 1, form=form)
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        yield Tokens(0, start, list(range(start, end)), text[start:end])
    yield Finished((ChoiceResult(0, reason, "", len(text)),), Usage(1, len(text)), StageClock(0))


def had(tokens: int) -> Delivered:
    choice = DeliveredChoice().after(list(range(tokens)), TEXT[:tokens])
    return Delivered(request_tag("r1"), (choice,))


async def parts_of(stream: AsyncGenerator[Event, None]) -> tuple[list[OutputPart], str, FinishReason]:
    parts: list[OutputPart] = []
    text, reason = "", FinishReason.ERROR
    async for event in stream:
        if isinstance(event, Tokens):
            parts += event.parts
            text += event.text
        elif isinstance(event, Finished):
            parts += event.choices[0].parts
            reason = event.choices[0].finish_reason
    return parts, text, reason


async def test_a_whole_output_in_parts() -> None:
    found = await complete(in_parts(events(TEXT, [9, 30]), None), parts=True)
    assert found.texts == [TEXT]
    answer = found.answers[0]
    assert (answer.content, answer.reasoning) == ("Sure.", "hm")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("f", {"a": 1}), ("g", {})]
    assert [call.id for call in answer.calls] == [call_id("r1", 0, 0, 0), call_id("r1", 0, 0, 1)]
    assert found.finished.choices[0].finish_reason is FinishReason.TOOL_CALLS


async def test_only_a_client_that_asks_for_parts_gets_answers() -> None:
    """Whatever the form that the first client of an idempotency key had recorded."""
    for form in (FORM, None):
        found = await complete(events(TEXT, [9], form), parts=False)
        assert (found.texts, found.answers) == ([TEXT], ())
    found = await complete(in_parts(events(TEXT, [9], None), None), parts=True)
    assert found.answers == [AssistantAnswer(TEXT)]


class Piece(str):
    """A text that is only joined: added up piece by piece, the work grows with the square of the length."""

    __slots__ = ()

    def __radd__(self, before: str) -> str:
        raise AssertionError("added up")

    __add__ = __radd__


def test_the_arguments_of_a_call_are_joined_once() -> None:
    parts = [
        CallDelta(0, "id0", "f"),
        CallDelta(1, "id1", "g"),
        *(CallDelta(0, "", "", Piece("x")) for _ in "ab"),
    ]
    calls = (ToolCall("id0", "f", "xx"), ToolCall("id1", "g", ""))
    assert answer_of(parts) == AssistantAnswer(calls=calls)


async def test_only_an_output_that_stopped_ended_by_its_calls() -> None:
    _, _, reason = await parts_of(in_parts(events(TEXT, [], reason=FinishReason.LENGTH), None))
    assert reason is FinishReason.LENGTH
    parts, text, reason = await parts_of(in_parts(events("Hi <", [1], OutputForm()), None))
    assert (answer_of(parts), text, reason) == (AssistantAnswer("Hi <"), "Hi <", FinishReason.STOP)


@given(st.integers(0, len(TEXT)), st.lists(st.integers(0, len(TEXT)), max_size=8))
async def test_a_client_that_continues_misses_nothing_and_has_nothing_twice(
    tokens: int, cuts: list[int]
) -> None:
    before, _, _ = await parts_of(in_parts(events(TEXT, [tokens]), None))
    stream = in_parts(events(TEXT, [tokens]), None)
    first: list[OutputPart] = []
    async for event in stream:
        if isinstance(event, Tokens):
            first += event.parts
            break
    await stream.aclose()
    rest, text, reason = await parts_of(in_parts(events(TEXT, cuts), had(tokens)))
    assert answer_of([*first, *rest]) == answer_of(before)
    assert text == TEXT[tokens:]
    assert reason is FinishReason.TOOL_CALLS


async def test_a_client_that_has_other_output_is_refused() -> None:
    other = Delivered(request_tag("r1"), (DeliveredChoice(3, 3, 1),))
    with pytest.raises(StreamBroken):
        await parts_of(in_parts(events(TEXT, [1, 5]), other))
    with pytest.raises(StreamBroken):
        await parts_of(in_parts(events(TEXT[:10], []), had(20)))


def test_ids_of_calls_depend_on_the_request_alone() -> None:
    assert call_id("r1", 0, 0, 0) == call_id("r1", 0, 0, 0)
    names = {call_id(request, choice, 0, index) for request in "ab" for choice in (0, 1) for index in (0, 1)}
    assert len(names) == 8
    short = call_id("r1", 0, 9, 0)
    assert len(short) == 9
    assert short.isalnum()
