"""Ids of events under a key: behind each of them an answer continues, and only with the same output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText
from services.core.errors import InvalidInput, NoWorkerAvailable, StreamBroken
from services.core.generation import FinishReason, StageClock, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Tokens, request_tag
from services.gateway.faces.messages.routes import MessageFrames
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.faces.responses.types import ModelResponse
from services.gateway.faces.transport.event_ids import KeyedEventNumbers, answer_seal
from services.gateway.faces.transport.event_stream import AnswerFrames

SEAL = answer_seal(b"s" * 32, "tenant", "key", "form")
HEAD = responses_request(responses_body(b'{"model":"m","input":"hi"}'), b"[]").head
OUTPUT: Sequence[OutputPart] = (
    ReasoningText("First the name, äöü."),
    ContentText("I look: "),
    CallDelta(0, "call_0", "weather"),
    CallDelta(0, arguments='{"city":"Zürich"}'),
    CallDelta(1, "call_1", "now"),
    CallDelta(1, arguments="{}"),
    ContentText("and 東京 \U0001f600."),
)
Event = tuple[str, dict[str, Any]]


async def kept(_: ModelResponse) -> bool:
    return True


def frames_of(dialect: str, event_id: str) -> AnswerFrames:
    numbers = KeyedEventNumbers(SEAL, event_id)
    if dialect == "messages":
        return MessageFrames("req_1", numbers)
    events = ResponseEvents(numbers)
    return ResponseFrames(HEAD, request_id="req_1", keep=kept, events=events, now_s=lambda: 7.0)


def begun(dialect: str, event_id: str) -> AnswerFrames:
    frames = frames_of(dialect, event_id)
    frames.on_accepted(0, Accepted("req_1", "m", "sha256:1", 1, 1, 3))
    return frames


async def events_of(dialect: str, parts: Sequence[OutputPart], event_id: str = "") -> list[Event]:
    """Return the events of an answer behind one, each with its id."""
    frames = begun(dialect, event_id)
    data = [frames.opening(), *(frames.output(0, Tokens(0, 0, (), "", (), (part,))) for part in parts)]
    last = (ChoiceResult(0, FinishReason.STOP, "", 9),)
    data.append(await frames.ending(0, Finished(last, Usage(3, 9), StageClock(0))))
    return parsed(b"".join(data))


def parsed(data: bytes) -> list[Event]:
    found = []
    for frame in data.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        found.append((fields.get("id", ""), json.loads(fields["data"])))
    return found


def cut(rng: Random, output: Sequence[OutputPart] = OUTPUT) -> list[OutputPart]:
    found: list[OutputPart] = []
    for part in output:
        text = part.arguments if isinstance(part, CallDelta) else part.text
        at = rng.randrange(len(text)) if len(text) > 1 else 0
        if isinstance(part, CallDelta):
            pieces: list[OutputPart] = [
                CallDelta(part.index, part.id, part.name, text[:at]),
                CallDelta(part.index, arguments=text[at:]),
            ]
        else:
            pieces = [type(part)(text[:at]), type(part)(text[at:])]
        found += pieces
    return found


def joined(events: Sequence[Event]) -> list[Any]:
    found: list[Any] = []
    for _, event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        delta = event.pop("delta", "") if "block_delta" in event["type"] or ".delta" in event["type"] else ""
        text = "".join(delta[name] for name in delta if name != "type") if isinstance(delta, dict) else delta
        if text and found and found[-1][0] == event:
            found[-1] = (event, found[-1][1] + text)
        else:
            found.append((event, text))
    return found


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_an_answer_continues_behind_every_event(dialect: str) -> None:
    rng = Random(1)
    whole = await events_of(dialect, cut(rng))
    assert len({event_id for event_id, _ in whole}) == len(whole) > 20
    for number, (event_id, _) in enumerate(whole):
        rest = await events_of(dialect, cut(rng), event_id)
        assert joined([*whole[: number + 1], *rest]) == joined(whole), number
        assert [each for each, _ in rest][-1:] == [each for each, _ in whole[number + 1 :]][-1:]
    delivered = KeyedEventNumbers(SEAL, whole[3][0]).delivered()
    assert delivered is not None
    assert delivered.request == request_tag("req_1")
    assert KeyedEventNumbers(SEAL, "").delivered() is None


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_nothing_follows_other_output(dialect: str) -> None:
    """The difference is before the event that the client has; one behind it is none."""
    whole = await events_of(dialect, OUTPUT)
    text = CallDelta(0, arguments='{"city":"Zurich"}')
    other: dict[str, Sequence[OutputPart]] = {
        "text": [*OUTPUT[:3], text, *OUTPUT[4:]],
        "name": [*OUTPUT[:2], CallDelta(0, "call_0", "weathers"), *OUTPUT[3:]],
        "kind": [ContentText("First the name, äöü."), *OUTPUT[1:]],
        "length": OUTPUT[:4],
    }
    begins = next(number for number, (_, event) in enumerate(whole) if "call_1" in str(event))
    for name, parts in other.items():
        with pytest.raises(StreamBroken):
            await events_of(dialect, parts, whole[begins][0])
        if name != "length":
            frames = begun(dialect, whole[begins][0])
            sent = frames.opening()
            with pytest.raises(StreamBroken):
                for part in parts:
                    sent += frames.output(0, Tokens(0, 0, (), "", (), (part,)))
            assert sent == b"", name
    first = next(number for number, (_, event) in enumerate(whole) if "delta" in event["type"])
    assert joined([*whole[: first + 1], *await events_of(dialect, other["name"], whole[first][0])])


async def test_an_error_has_no_id() -> None:
    """So a client that retries continues behind the last event of the output."""
    frames = begun("responses", "")
    assert isinstance(frames, ResponseFrames)
    opening = parsed(frames.opening())
    (failed,) = parsed(frames.failed(NoWorkerAvailable("no worker", retry_after_s=1.0)))
    assert opening[-1][0]
    assert failed[0] == ""


def test_an_id_of_another_answer_is_refused() -> None:
    numbers = KeyedEventNumbers(SEAL, "")
    numbers.on_accepted(0, "req_1")
    assert numbers.counts("begin")
    event_id = numbers.id_line().decode().removeprefix("id: ").strip()
    KeyedEventNumbers(SEAL, event_id)
    for tenant, key, form in (("other", "key", "form"), ("tenant", "b", "form"), ("tenant", "key", "g")):
        with pytest.raises(InvalidInput):
            KeyedEventNumbers(answer_seal(b"s" * 32, tenant, key, form), event_id)
    with pytest.raises(InvalidInput):
        KeyedEventNumbers(answer_seal(b"t" * 32, "tenant", "key", "form"), event_id)
