"""Answers of the OpenAI face: whole, streamed, of a batch of prompts, and what else it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.gateway.events import Event, Heartbeat, Tokens
from services.gateway.faces.openai.exchange import HttpLimits, duration
from services.gateway.faces.openai.requests import MAX_PROMPTS
from services.gateway.faces.transport.event_stream import PROMPTS_AT_ONCE
from services.runtime.process.product import product_version
from tests.integration.openai.face import (
    CHAT,
    MAX_BODY,
    STREAM,
    Call,
    Face,
    accepted,
    degraded,
    finished,
    limited,
    plain,
    rejected,
    serving,
)


async def test_a_chat(face: Face) -> None:
    answer = await face.chat({**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert found["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in found["choices"]] == ["Hello", "Hello"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]}
    ]
    assert found["usage"]["total_tokens"] == 7
    assert found["id"] == "chatcmpl-" + answer.headers["x-request-id"]


async def test_a_streamed_chat(face: Face) -> None:
    answer = await face.chat({**STREAM, "n": 2, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(frame["usage"] is None for frame in frames)
    steps = [(c["index"], c["delta"], c["finish_reason"]) for frame in frames for c in frame["choices"]]
    opening = {"role": "assistant", "content": ""}
    assert steps == [
        (0, opening, None),
        (1, opening, None),
        (0, {"content": "Hel"}, None),
        (1, {"content": "Hel"}, None),
        (0, {"content": "lo"}, None),
        (1, {"content": "lo"}, None),
        (0, {}, "stop"),
        (1, {}, "stop"),
    ]
    assert len({frame["id"] for frame in frames}) == 1


async def test_without_usage_asked_for_there_is_none(face: Face) -> None:
    *frames, done = (await face.chat(STREAM)).events
    assert done == "[DONE]"
    assert all("usage" not in frame for frame in frames)


async def test_streamed_logprobs(face: Face) -> None:
    chat = await face.chat({**STREAM, "logprobs": True})
    assert [len(f["choices"][0]["logprobs"]["content"]) for f in chat.events[1:3]] == [1, 1]
    body = {"model": "m", "prompt": "x", "stream": True, "logprobs": 1}
    *frames, _ = (await face.ask("POST", "/v1/completions", body)).events
    assert [frame["choices"][0]["logprobs"]["text_offset"] for frame in frames[:2]] == [[0], [1]]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
async def test_a_completion(face: Face, prompt: Any) -> None:
    answer = await face.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "logprobs": 1})
    assert answer.json["object"] == "text_completion"
    assert answer.json["choices"][0]["text"] == "Hello"
    assert answer.json["choices"][0]["logprobs"]["tokens"] == ["b", "b"]
    (call,) = face.service.calls
    kind = call.generation.WhichOneof("input")
    assert kind == ("token_ids" if isinstance(prompt, list) and prompt != ["a"] else "prompt")


async def test_a_batch_of_prompts_is_as_many_requests(face: Face) -> None:
    body = {"model": "m", "prompt": ["a", "b", "c"], "n": 2}
    answer = await face.ask("POST", "/v1/completions", body)
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(6))
    base = answer.headers["x-request-id"]
    assert [call.received.request_id for call in face.service.calls] == [f"{base}-{n}" for n in range(3)]
    assert answer.json["usage"]["prompt_tokens"] == 9
    streamed = (await face.ask("POST", "/v1/completions", {**body, "stream": True})).events
    assert streamed[-1] == "[DONE]"
    texts = dict.fromkeys(range(6), "")
    for frame in streamed[:-1]:
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"Hello"}


async def test_what_is_less_than_was_asked_for_is_said(face: Face) -> None:
    face.service.script = degraded
    said = "output_capped; original=100; applied=10"
    body = [{"kind": "output_capped", "original": "100", "applied": "10"}]
    whole = await face.chat(CHAT)
    assert whole.headers["x-fairway-degraded"] == said
    assert json.loads(whole.body)["degraded"] == body
    streamed = await face.chat(STREAM)
    assert streamed.headers["x-fairway-degraded"] == said
    first = json.loads(streamed.body.split(b"data: ")[1])
    assert first["degraded"] == body
    face.service.script = plain
    usual = await face.chat(CHAT)
    assert "x-fairway-degraded" not in usual.headers
    assert "degraded" not in json.loads(usual.body)


async def test_the_rates_of_the_tenant_are_in_the_headers(face: Face) -> None:
    face.service.script = limited
    stated = {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "598",
        "x-ratelimit-reset-requests": "200ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4000",
        "x-ratelimit-reset-tokens": "1m1.5s",
    }
    for body in (CHAT, STREAM):
        headers = (await face.chat(body)).headers
        assert {name: value for name, value in headers.items() if name.startswith("x-ratelimit")} == stated
    face.service.script = plain
    assert not any(name.startswith("x-ratelimit") for name in (await face.chat(CHAT)).headers)


async def test_a_rejection_has_the_rates_and_when_to_retry(face: Face) -> None:
    face.service.script = rejected
    stated = {
        "retry-after": "8",
        "retry-after-ms": "7250",
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "598",
        "x-ratelimit-reset-requests": "200ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "59s",
    }
    for body in (CHAT, STREAM):
        answer = await face.chat(body)
        assert answer.status == 429
        assert {name: answer.headers[name] for name in stated} == stated


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0001, "1ms"), (0.9991, "1s"), (7.66, "7.66s"), (60, "1m0s"), (360.5, "6m0.5s")],
)
def test_durations_are_rounded_up_to_milliseconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def quiet(call: Call) -> AsyncGenerator[Event, None]:
    yield Heartbeat()  # before it is accepted there is no answer to keep alive
    yield accepted(call)
    yield Heartbeat()
    yield Tokens(0, 0, [1], "Hel")
    yield Heartbeat()
    yield finished(call)


async def test_silence_after_the_first_output_is_kept_alive_by_comments(face: Face) -> None:
    face.service.script = quiet
    events = (await face.chat(STREAM)).events
    assert events.count(": keep-alive") == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"


async def test_after_a_while_the_status_goes_out_without_output() -> None:
    async with serving(HttpLimits(MAX_BODY, status_wait_s=0.0)) as face:
        face.service.script = quiet
        first, role, *rest = (await face.chat(STREAM)).events
        assert first == ": keep-alive"
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert [rest.count(": keep-alive"), rest[-1]] == [1, "[DONE]"]


async def test_usage_so_far_is_in_each_frame(face: Face) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *frames, last, _ = (await face.chat({**STREAM, "n": 2, "stream_options": options})).events
    counts = [(frame["choices"][0]["index"], frame["usage"]["completion_tokens"]) for frame in frames]
    assert counts == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 2), (1, 2)]
    assert {frame["usage"]["prompt_tokens"] for frame in frames} == {3}
    assert last["usage"]["completion_tokens"] == 4


async def test_the_service_tier_is_stated(face: Face) -> None:
    body = {"service_tier": "flex"}
    assert (await face.chat({**CHAT, **body})).json["service_tier"] == "flex"
    assert (await face.chat({**STREAM, **body})).events[0]["service_tier"] == "flex"
    assert (await face.chat({**CHAT, "service_tier": "auto"})).json["service_tier"] == "default"
    assert "service_tier" not in (await face.chat(CHAT)).json


async def test_models(face: Face) -> None:
    listed = (await face.ask("GET", "/v1/models")).json
    assert [entry["id"] for entry in listed["data"]] == ["m", "org/m"]
    one = await face.ask("GET", "/v1/models/org/m")
    assert one.json["object"] == "model"
    missing = await face.ask("GET", "/v1/models/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_tokens_and_their_text(face: Face) -> None:
    answer = await face.ask("POST", "/tokenize", {"model": "m", "prompt": "hi", "add_special_tokens": True})
    assert answer.json == {"count": 2, "max_model_len": 128, "tokens": [104, 105], "token_strs": None}
    turns = [{"role": "user", "content": "ab"}]
    neutral = {"add_generation_prompt": True, "add_special_tokens": False, "chat_template_kwargs": {}}
    chat = await face.ask("POST", "/tokenize", {"model": "m", "messages": turns, **neutral})
    assert chat.json["tokens"] == [97, 98]
    text = await face.ask("POST", "/detokenize", {"model": "m", "tokens": [104, 105]})
    assert text.json == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_not_tokenised_is_named(
    face: Face, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await face.ask("POST", path, {"model": "m", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_the_openapi_document(face: Face) -> None:
    document = (await face.ask("GET", "/openapi.json")).json
    assert document["openapi"] == "3.1.0"
    assert {path.replace("{model}", "{model:path}") for path in document["paths"]} == {
        endpoint.path for endpoint in face.app.state.endpoints
    }


async def test_the_version_of_the_server(face: Face) -> None:
    assert (await face.ask("GET", "/version")).json == {"version": product_version()}


async def test_health_and_readiness(face: Face) -> None:
    assert (await face.ask("GET", "/healthz", key=None)).status == 200
    assert (await face.ask("GET", "/readyz", key=None)).status == 200
    face.not_ready.append("no view of the fleet yet")
    for path in ("/readyz", "/health"):
        answer = await face.ask("GET", path, key=None)
        assert (answer.status, answer.json["status"]) == (503, "no view of the fleet yet")
    assert (await face.ask("GET", "/healthz", key=None)).status == 200


async def test_many_prompts_of_one_request_run_32_at_a_time(face: Face) -> None:
    running, most = 0, 0
    scripted = face.service.script

    async def counted(call: Call) -> AsyncGenerator[Event, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0.01)
            async for event in scripted(call):
                yield event
        finally:
            running -= 1

    face.service.script = counted
    body = {"model": "m", "prompt": [f"text {number}" for number in range(MAX_PROMPTS)]}
    whole = await face.ask("POST", "/v1/completions", body)
    assert [choice["index"] for choice in whole.json["choices"]] == list(range(MAX_PROMPTS))
    streamed = (await face.ask("POST", "/v1/completions", {**body, "stream": True})).events
    choices = [choice for frame in streamed[:-1] for choice in frame["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == list(range(MAX_PROMPTS))
    assert (most, running) == (PROMPTS_AT_ONCE, 0)
    refused = await face.ask("POST", "/v1/completions", {**body, "prompt": [*body["prompt"], "one more"]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")
    assert "one request takes 128" in refused.json["error"]["message"]
