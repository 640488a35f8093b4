"""The numbered events of a response: the same numbers however the output arrives, and continued anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText
from services.core.errors import NoWorkerAvailable
from services.core.generation import FinishReason, StageClock, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Tokens
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames, replayed
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.faces.responses.types import ModelResponse
from services.gateway.faces.transport.event_ids import EventNumbers

# Reasoning, text, two calls, text: every kind of item and every change between them.
OUTPUT: Sequence[OutputPart] = (
    ReasoningText("First the name, then äöü.\n"),
    ContentText("I look it up: "),
    CallDelta(0, "call_0", "weather"),
    CallDelta(0, arguments='{"city":"Zürich","days":[1,2]}'),
    CallDelta(1, "call_1", "now"),
    CallDelta(1, arguments="{}"),
    CallDelta(2, "call_2", "patch"),
    CallDelta(2, arguments='{"input": "*** Begin\\n+é\\ud83d\\ude00"}'),
    CallDelta(3, "call_3", "agents.spawn"),
    CallDelta(3, arguments='{"n":1}'),
    CallDelta(4, "call_4", "agents.patch"),
    CallDelta(4, arguments='{"input": "x"}'),
    ContentText("and 東京 \U0001f600."),
)
TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "filters": {}},
    {"type": "function", "name": "weather"},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "agents",
        "tools": [{"type": "function", "name": "spawn"}, {"type": "custom", "name": "patch"}],
    },
]
BODY = json.dumps({"model": "m", "input": "hi", "tools": TOOLS}).encode()
HEAD = responses_request(responses_body(BODY), b"[]").head


def pieces(rng: Random) -> list[list[OutputPart]]:
    """The output, cut at random places and put together at random."""
    cut: list[OutputPart] = []
    for part in OUTPUT:
        text = part.arguments if isinstance(part, CallDelta) else part.text
        while len(text) > 1 and rng.random() < 0.8:
            at = rng.randrange(1, len(text))
            cut.append(_of(part, text[:at]))
            text = text[at:]
            part = CallDelta(part.index) if isinstance(part, CallDelta) else part
        cut.append(_of(part, text))
    events: list[list[OutputPart]] = [[]]
    for part in cut:
        if rng.random() < 0.5:
            events.append([])
        events[-1].append(part)
    return events


def _of(part: OutputPart, text: str) -> OutputPart:
    if isinstance(part, CallDelta):
        return CallDelta(part.index, part.id, part.name, text)
    return type(part)(text)


async def streamed(
    events: list[list[OutputPart]], after: int = -1, end: FinishReason = FinishReason.STOP
) -> tuple[bytes, ModelResponse]:
    kept: list[ModelResponse] = []

    async def keep(response: ModelResponse) -> bool:
        kept.append(response)
        return True

    frames = ResponseFrames(
        HEAD,
        request_id="req_1",
        keep=keep,
        events=ResponseEvents(EventNumbers(after=after, with_ids=True)),
        now_s=lambda: 7.0,
    )
    frames.on_accepted(0, Accepted("req_1", "m", "sha256:1", 1, 1, 3))
    data = [frames.opening()]
    data += [frames.output(0, Tokens(0, 0, (), "", (), parts)) for parts in events[:-1]]
    last = (ChoiceResult(0, end, "", 9, tuple(events[-1])),)
    data.append(await frames.ending(0, Finished(last, Usage(3, 9), StageClock(0))))
    assert kept == [frames.response]
    return b"".join(data), frames.response


def parsed(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        number, name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert number == f"id: {event['sequence_number']}"
        found.append(event)
    return found


def joined(events: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """The events by name, deltas put together, each with its last number."""
    found: list[tuple[str, str, int]] = []
    for event in events:
        name, text = event["type"], event.get("delta", "")
        if text and found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + text, event["sequence_number"])
        else:
            found.append((name, text, event["sequence_number"]))
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_the_numbers_depend_on_the_output_alone(seed: int) -> None:
    whole, response = await streamed([list(OUTPUT)])
    split, again = await streamed(pieces(Random(seed)))
    assert joined(parsed(split)) == joined(parsed(whole))
    assert msgspec.json.encode(again) == msgspec.json.encode(response)
    assert joined(parsed(replayed(response, ResponseEvents(EventNumbers(with_ids=True))))) == joined(
        parsed(whole)
    )
    numbers = [event["sequence_number"] for event in parsed(split)]
    assert numbers == sorted(set(numbers))


async def test_a_stream_continues_behind_every_number() -> None:
    whole, response = await streamed(pieces(Random(1)))
    first = parsed(whole)
    last = first[-1]["sequence_number"]
    for event in first[:-1]:
        after = event["sequence_number"]
        seen = [each for each in first if each["sequence_number"] <= after]
        for data in (
            (await streamed(pieces(Random(after)), after))[0],
            replayed(response, ResponseEvents(EventNumbers(after=after, with_ids=True))),
        ):
            rest = parsed(data)
            assert all(each["sequence_number"] > after for each in rest)
            assert joined(seen + rest) == joined(first), after
    beyond = parsed(replayed(response, ResponseEvents(EventNumbers(after=last + 5, with_ids=True))))
    assert [each["type"] for each in beyond] == ["response.completed"], "a stream always has an end"


async def test_the_items_are_those_of_the_output() -> None:
    _, response = await streamed(pieces(Random(3)))
    found = json.loads(msgspec.json.encode(response))
    assert [item["type"] for item in found["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
        "function_call",
        "custom_tool_call",
        "message",
    ]
    assert found["output"][0]["content"][0]["text"] == "First the name, then äöü.\n"
    assert json.loads(found["output"][2]["arguments"]) == {"city": "Zürich", "days": [1, 2]}
    assert found["output"][3]["call_id"] == "call_1"
    assert (found["output"][4]["name"], found["output"][4]["input"]) == ("patch", "*** Begin\n+é\U0001f600")
    assert (found["output"][5]["namespace"], found["output"][5]["name"]) == ("agents", "spawn")
    custom = found["output"][6]
    assert (custom["namespace"], custom["name"], custom["input"]) == ("agents", "patch", "x")
    assert not any("namespace" in found["output"][number] for number in (2, 3, 4))
    assert found["tools"] == TOOLS
    assert len({item["id"] for item in found["output"]}) == 8
    again = parsed(replayed(response, ResponseEvents(EventNumbers(with_ids=True))))
    done = [event["item"] for event in again if event["type"] == "response.output_item.done"]
    assert done == found["output"]
    # The next request has the calls under the names by which the model made them.
    body = responses_body(b'{"model": "m", "input": "go on"}')
    following = responses_request(body, b"[" + msgspec.json.encode(response.output) + b"]").generation.chat
    names = [call.name for turn in following.messages for call in turn.tool_calls]
    assert names == ["weather", "now", "patch", "agents.spawn", "agents.patch"]
    assert found["usage"]["total_tokens"] == 12


# The last part of an output that reaches its longest length, the item's type and status, and what is in it.
CUT: tuple[tuple[list[OutputPart], str, str, str], ...] = (
    ([ContentText("so f")], "message", "incomplete", "so f"),
    ([CallDelta(0, "c", "weather", '{"city":"Z')], "function_call", "incomplete", '{"city":"Z'),
    ([CallDelta(0, "c", "weather", "")], "function_call", "incomplete", ""),
    ([CallDelta(0, "c", "weather", '{"city":"Z"}')], "function_call", "completed", '{"city":"Z"}'),
    ([CallDelta(0, "c", "patch", '{"input": "a\\nb')], "custom_tool_call", "incomplete", "a\nb"),
    ([CallDelta(0, "c", "patch", '{"inp')], "custom_tool_call", "incomplete", '{"inp'),
)


@pytest.mark.parametrize(("parts", "kind", "status", "text"), CUT)
async def test_an_item_that_is_cut_short_is_incomplete_and_continues(
    parts: list[OutputPart], kind: str, status: str, text: str
) -> None:
    events = [[ContentText("whole"), ReasoningText("x"), *parts], []]
    data, response = await streamed(events, end=FinishReason.LENGTH)
    items = json.loads(msgspec.json.encode(response.output))
    assert response.status == "incomplete"
    assert [item["status"] for item in items] == ["completed", "completed", status]
    last = items[-1]
    found = last["content"][0]["text"] if kind == "message" else last.get("arguments", last.get("input"))
    assert (last["type"], found) == (kind, text)
    done = [event["item"] for event in parsed(data) if event["type"] == "response.output_item.done"]
    assert done == items
    again = replayed(response, ResponseEvents(EventNumbers(with_ids=True)))
    assert joined(parsed(again)) == joined(parsed(data))
    # The next request has these items before its own.
    output = {"type": "function_call_output", "call_id": "c", "output": "no JSON"}
    body = json.dumps({"model": "m", "input": [output]}).encode()
    turns = responses_request(responses_body(body), b"[" + json.dumps(items).encode() + b"]").generation.chat
    assert [turn.role for turn in turns.messages] == ["assistant", "tool"] or kind == "message"


async def lost(_: ModelResponse) -> bool:
    return False


def unstored() -> ResponseFrames:
    events = ResponseEvents(EventNumbers())
    return ResponseFrames(HEAD, request_id="req_1", keep=lost, events=events, now_s=lambda: 7.0)


async def test_a_response_that_could_not_be_stored_states_it() -> None:
    frames = unstored()
    frames.on_accepted(0, Accepted("req_1", "m", "sha256:1", 1, 1, 3))
    result = (ChoiceResult(0, FinishReason.LENGTH, "", 9),)
    end = await frames.ending(0, Finished(result, Usage(3, 9), StageClock(0)))
    response = json.loads(end.decode().split("data: ")[-1])["response"]
    assert response["store"] is False
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


@pytest.mark.parametrize("count", [None, 0, 4])
async def test_the_tokens_of_reasoning_are_stated_where_they_are_counted(count: int | None) -> None:
    frames = unstored()
    frames.on_accepted(0, Accepted("req_1", "m", "sha256:1", 1, 1, 3))
    result = (ChoiceResult(0, FinishReason.STOP, "", 9, reasoning_tokens=count),)
    await frames.ending(0, Finished(result, Usage(3, 9), StageClock(0)))
    usage = json.loads(msgspec.json.encode(frames.response))["usage"]
    assert usage["output_tokens_details"] == ({} if count is None else {"reasoning_tokens": count})
    assert msgspec.json.decode(msgspec.json.encode(frames.response), type=ModelResponse) == frames.response


def test_a_failure_ends_a_stream_by_name() -> None:
    frames = unstored()
    frames.on_accepted(0, Accepted("req_1", "m", "sha256:1", 1, 1, 3))
    frames.opening()
    event = json.loads(frames.failed(NoWorkerAvailable("no worker", retry_after_s=1.0)).split(b"data: ")[1])
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": "no_worker_available", "message": "no worker"}
