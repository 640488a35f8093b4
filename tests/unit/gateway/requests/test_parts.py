"""Outputs in parts: on a stream, whole, and for a client that continues behind what it has."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.formats.answers import AssistantAnswer, CallDelta, OutputPart, ToolCall, answer_of
from services.core.errors import StreamBroken
from services.core.generation import FinishReason, StageClock, Usage
from services.core.outputs.forms import CALL_FORMS, REASONING_FORMS, OutputForm
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


START, END = (7, "<think>"), (9, "</think>")
THINK = OutputForm(REASONING_FORMS["think"], reasoning_end=END[0])
A, B, HI = (1, "a"), (2, " b"), (3, "hi")
SPELLED = ((4, "</thi"), (5, "nk>"))


async def sampled(
    tokens: Sequence[tuple[int, str]], form: OutputForm, rng: Random, prompt: Sequence[int] = ()
) -> AsyncGenerator[Event, None]:
    """Yield an output whose tokens are put together at random, and whose text lags behind them."""
    yield Accepted("r1", "m", "sha256:1", 1, 1, len(prompt), form=form)
    ids, text, offset = [*prompt, *(token for token, _ in tokens)], "".join(text for _, text in tokens), 0
    seen = 0
    while offset < len(ids):
        size = rng.randint(1, 3)
        ready = len("".join(text for _, text in tokens[: max(0, offset + size - len(prompt))]))
        shown = max(seen, ready - rng.randrange(4)) if offset + size < len(ids) else len(text)
        yield Tokens(0, offset, ids[offset : offset + size], text[seen:shown])
        offset, seen = offset + size, shown
    result = ChoiceResult(0, FinishReason.STOP, "", len(tokens))
    yield Finished((result,), Usage(len(prompt), len(tokens)), StageClock(0))


async def reasoning_of(stream: AsyncGenerator[Event, None]) -> int | None:
    async for event in stream:
        if isinstance(event, Finished):
            return event.choices[0].reasoning_tokens
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("tokens", "form", "count"),
    [
        ([START, A, B, END, HI], THINK, 4),
        ([START, END, HI], THINK, 2),
        ([A, END, B], replace(THINK, thinking=True), 2),
        ([START, A, END, HI, END, HI], THINK, 3),
        ([START, A, B], THINK, 3),
        ([HI, A, B], THINK, 0),
        ([HI, A, B], OutputForm(), 0),
        ([HI, END, B], THINK, 0),
        # The mark is not one token, or other tokens spell it: the texts of single tokens are not known.
        ([START, A, *SPELLED, HI], THINK, None),
        ([START, A, *SPELLED, HI, END], THINK, None),
        ([START, A, END, HI], replace(THINK, reasoning_end=None), None),
        ([START, A, B], replace(THINK, reasoning_end=None), 3),
    ],
)
async def test_the_tokens_of_reasoning_are_counted_where_that_is_exact(
    tokens: list[tuple[int, str]], form: OutputForm, count: int | None
) -> None:
    for seed in range(40):
        stream = sampled(tokens, form, Random(seed))
        assert await reasoning_of(in_parts(stream, None)) == count, seed
        scored = sampled(tokens, form, Random(seed), prompt=[END[0], 1, END[0]])
        assert await reasoning_of(in_parts(scored, None)) == count, seed
        kept, ids = Random(seed).randrange(len(tokens) + 1), [token for token, _ in tokens]
        text = "".join(text for _, text in tokens[:kept])
        delivered = Delivered(request_tag("r1"), (DeliveredChoice().after(ids[:kept], text),))
        stream = sampled(tokens, form, Random(seed))
        assert await reasoning_of(in_parts(stream, delivered)) == count, (seed, kept)
