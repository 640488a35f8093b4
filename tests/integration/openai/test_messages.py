"""The Messages API over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from msgspec import structs

from services.core.errors import ModelNotFound, NoWorkerAvailable, OverQuota
from services.core.generation import FinishReason
from services.core.outputs.forms import OutputForm, ReasoningForm, named_form
from services.gateway.events import Event, Tokens
from tests.integration.openai.face import KEY, Answer, Call, Face, accepted, failing, finished

BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
THOUGHT = "<think>Look it up.</think>"
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def events_of(answer: Answer) -> list[Any]:
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def calling(call: Call) -> AsyncGenerator[Event, None]:
    """Reasoning, text and a call, character by character."""
    calls = named_form("hermes").calls
    yield replace(accepted(call), form=OutputForm(ReasoningForm("<think>", "</think>"), calls))
    for offset, text in enumerate(f"{THOUGHT}I add.{CALLS}"):
        yield Tokens(0, offset, [offset], text)
    yield finished(call)


async def test_a_message_whole_and_streamed_agree(face: Face) -> None:
    whole = await face.ask("POST", "/v1/messages", BODY)
    assert whole.headers["request-id"].startswith("req_")
    assert whole.json["content"] == [{"type": "text", "text": "Hello"}]
    assert (whole.json["stop_reason"], whole.json["role"]) == ("end_turn", "assistant")
    assert whole.json["usage"]["input_tokens"] + whole.json["usage"]["cache_read_input_tokens"] == 3
    streamed = events_of(await face.ask("POST", "/v1/messages", STREAM))
    assert [event["type"] for event in streamed] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in streamed[2:4]) == "Hello"
    assert streamed[5]["usage"] == whole.json["usage"]
    assert streamed[5]["delta"]["stop_reason"] == "end_turn"


async def test_thinking_and_calls_are_blocks(face: Face) -> None:
    face.service.script = calling
    whole = await face.ask("POST", "/v1/messages", BODY)
    blocks = whole.json["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[0]["thinking"] == "Look it up."
    assert (blocks[2]["name"], blocks[2]["input"]) == ("add", {"a": 1})
    assert whole.json["stop_reason"] == "tool_use"
    streamed = events_of(await face.ask("POST", "/v1/messages", STREAM))
    pieces: dict[int, list[str]] = {}
    for event in streamed:
        if event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            pieces.setdefault(event["index"], []).append(text)
    joined = ["".join(found) for found in pieces.values()]
    assert joined[:2] == ["Look it up.", "I add."]
    assert json.loads(joined[2]) == {"a": 1}
    starts = [event["content_block"] for event in streamed if event["type"] == "content_block_start"]
    assert starts[2] == {"type": "tool_use", "id": starts[2]["id"], "name": "add", "input": {}}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


async def test_why_an_answer_ended(face: Face) -> None:
    async def stopped(call: Call) -> AsyncGenerator[Event, None]:
        yield accepted(call)
        end = finished(call)
        yield structs.replace(end, choices=(replace(end.choices[0], stop="END"),))

    async def cut(call: Call) -> AsyncGenerator[Event, None]:
        yield accepted(call)
        end = finished(call)
        yield structs.replace(end, choices=(replace(end.choices[0], finish_reason=FinishReason.LENGTH),))

    face.service.script = stopped
    found = (await face.ask("POST", "/v1/messages", BODY)).json
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    face.service.script = cut
    assert (await face.ask("POST", "/v1/messages", BODY)).json["stop_reason"] == "max_tokens"


async def test_errors_have_anthropics_shape_before_and_within_a_stream(face: Face) -> None:
    unknown = await face.ask("POST", "/v1/messages", BODY, key="wrong")
    assert (unknown.status, unknown.json["error"]["type"]) == (401, "authentication_error")
    for error, status, kind in (
        (ModelNotFound("no model"), 404, "not_found_error"),
        (OverQuota("slow", retry_after_s=2.0), 429, "rate_limit_error"),
        (NoWorkerAvailable("none", retry_after_s=1.0), 503, "overloaded_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ):
        face.service.script = failing(error, after=1)
        for body in (BODY, STREAM):
            found = await face.ask("POST", "/v1/messages", body)
            assert (found.status, found.json["type"], found.json["error"]["type"]) == (status, "error", kind)
        face.service.script = failing(error, after=2)
        last = events_of(await face.ask("POST", "/v1/messages", STREAM))[-1]
        assert (last["type"], last["error"]["type"]) == ("error", kind)
        assert "secret" not in json.dumps(last)


async def test_anthropics_headers_are_accepted(face: Face) -> None:
    headers = (
        ("x-api-key", KEY),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "output-128k-2025-02-19"),
    )
    found = await face.ask("POST", "/v1/messages", BODY, key=None, headers=headers)
    assert found.status == 200
    counted = await face.ask(
        "POST", "/v1/messages/count_tokens", {**BODY, "max_tokens": None}, headers=headers[1:]
    )
    assert counted.status == 400, "not a field of this route"
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    counted = await face.ask("POST", "/v1/messages/count_tokens", body)
    assert counted.json == {"input_tokens": 2}
