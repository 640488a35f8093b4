"""The playground sends what its form describes with the person's own key, and streams what comes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from console.playground import MAX_RUNNING, generation_of, run
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as inference
from services.core.errors import InvalidInput, QueueFull
from tests.support.console import MARKUP, Browser

CHAT = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}])
TOOL = {"name": "weather", "description": "of a town", "parameters": {"type": "object"}}


def events() -> list[inference.GenerateResponse]:
    call = common.ToolCallDelta(index=0, id="call-1", name="weather", arguments='{"town": ')
    rest = common.ToolCallDelta(index=0, arguments='"Bern"}')
    parts = [
        common.OutputPart(reasoning="hm"),
        common.OutputPart(content=MARKUP),
        common.OutputPart(call=call),
    ]
    result = inference.ChoiceResult(
        finish_reason=common.FINISH_REASON_TOOL_CALLS, parts=[common.OutputPart(call=rest)]
    )
    finished = inference.Finished(choices=[result], clock=common.StageClock(prefill_us=2500))
    finished.usage.prompt_tokens, finished.usage.output_tokens = 9, 4
    return [
        inference.GenerateResponse(accepted=inference.Accepted(request_id="r-1", seed=2**63)),
        inference.GenerateResponse(heartbeat=inference.Heartbeat()),
        inference.GenerateResponse(chunk=inference.TokenChunk(parts=parts)),
        inference.GenerateResponse(finished=finished),
    ]


def lines(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_streams_text_reasoning_calls_and_its_end(browser: Browser) -> None:
    browser.api.events = list(events())
    browser.sign_in("tenant")
    answer = browser.post(
        "/playground/run", model="tiny", mode="chat", messages=CHAT, tools=json.dumps([TOOL])
    )
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["cache-control"] == "no-store"
    found = lines(answer)
    assert found[0]["accepted"] == {"request": "r-1", "version": "", "seed": str(2**63), "prompt_tokens": 0}
    assert found[1:5] == [
        {"reasoning": "hm"},
        {"text": MARKUP},
        {"call": {"index": 0, "id": "call-1", "name": "weather", "arguments": '{"town": '}},
        {"call": {"index": 0, "id": "", "name": "", "arguments": '"Bern"}'}},
    ]
    end = found[5]["finished"]
    assert (end["reason"], end["prompt_tokens"], end["stages_ms"]["prefill"]) == ("tool_calls", 9, 2.5)
    (sent,) = browser.api.generations
    assert [message.role for message in sent.chat.messages] == ["system", "user"]
    assert sent.chat.tools[0].name == "weather"
    assert sent.parts
    assert browser.api.ended == 1


def test_an_error_is_the_last_line(browser: Browser) -> None:
    browser.api.events = [events()[0], QueueFull("the queue is full")]
    browser.sign_in("tenant")
    found = lines(browser.post("/playground/run", model="tiny", mode="text", message="def f():"))
    assert found[-1] == {"error": {"reason": "QUEUE_FULL", "message": "the queue is full"}}


def test_settings_are_passed_on() -> None:
    schema = {"type": "object"}
    found = generation_of(
        {
            "model": "tiny",
            "mode": "chat",
            "messages": CHAT,
            "max_tokens": "64",
            "temperature": "0.5",
            "seed": "7",
            "schema": json.dumps(schema),
        }
    )
    assert (found.max_output_tokens, found.sampling.temperature, found.sampling.seed) == (64, 0.5, 7)
    assert json.loads(found.sampling.constraint.json_schema) == schema
    bare = generation_of({"model": "tiny", "mode": "text", "message": "def f():"})
    assert bare.prompt == "def f():"
    assert not bare.HasField("max_output_tokens")
    assert not bare.HasField("sampling")
    assert not bare.parts


def test_earlier_calls_and_their_results_are_passed_on() -> None:
    call = {"id": "call-1", "name": "weather", "arguments": "{}"}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]
    found = generation_of({"model": "tiny", "messages": json.dumps(turns)}).chat.messages
    assert found[0].tool_calls[0].name == "weather"
    assert found[1].tool_call_id == "call-1"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": "{"}, "tools is no JSON"),
        ({"tools": "{}"}, "tools is not a JSON array"),
        ({"tools": '["weather"]'}, "tools: each is an object"),
        ({"tools": "[" * 100_000}, "tools is no JSON"),
        ({"schema": "[]"}, "schema is not a JSON object"),
        ({"messages": '[{"role": "root"}]'}, "messages: each is an object with a role"),
        ({"messages": '[{"role": "user", "tool_calls": [1]}]'}, "messages: tool_calls is an array"),
        ({"messages": '[{"role": "user", "tool_calls": 5}]'}, "messages: tool_calls is an array"),
        ({"messages": r'[{"role": "user", "content": "\ud800"}]'}, "messages is no JSON.*surrogates"),
        ({"tools": r'[{"name": "\ud800"}]'}, "tools is no JSON.*surrogates"),
        ({"max_tokens": "many"}, "max_tokens is 'many': write a number from 1"),
        ({"temperature": "nan"}, "temperature is 'nan'"),
        ({"seed": "-1"}, "seed is '-1'"),
    ],
)
def test_a_wrong_field_is_named(browser: Browser, fields: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInput, match=text.replace("(", r"\(").replace("[", r"\[")):
        generation_of({"model": "tiny", "messages": CHAT, **fields})
    browser.sign_in("tenant")
    answer = browser.post("/playground/run", model="tiny", **{"messages": CHAT, **fields})
    assert answer.status_code == 400
    assert browser.api.generations == []


def test_a_role_without_a_tenant_runs_nothing(browser: Browser) -> None:
    browser.sign_in("admin")
    page = browser.get("/playground")
    assert "a role without a tenant runs no models" in page.text
    assert "<form id=" not in page.text


async def test_a_browser_that_leaves_ends_its_generation(browser: Browser) -> None:
    browser.sign_in("tenant")
    (sign_in,) = browser.parts.sign_ins._open.values()
    browser.api.events = list(events())
    browser.api.hold = lambda: asyncio.sleep(0)
    stream = run(browser.api, sign_in, generation_of({"model": "tiny", "mode": "text"}))
    await anext(stream)
    assert sign_in.running == 1
    await stream.aclose()
    assert (sign_in.running, browser.api.ended) == (0, 1)


def test_generations_of_one_sign_in_are_bounded(browser: Browser) -> None:
    browser.sign_in("tenant")
    (sign_in,) = browser.parts.sign_ins._open.values()
    sign_in.running = MAX_RUNNING
    assert browser.post("/playground/run", model="tiny", mode="text", message="a").status_code == 429
    assert browser.api.generations == []
