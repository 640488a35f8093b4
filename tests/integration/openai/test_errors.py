"""Errors of the OpenAI face: a status before the first token, a frame after it, and what neither tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.core import errors
from services.gateway.events import Event
from tests.integration.openai.face import CHAT, KEY, STREAM, Call, Face, accepted, failing


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.RequestRateExceeded("slow down", retry_after_s=1.5), 429, "rate_limit_exceeded"),
        (errors.NoWorkerAvailable("none", retry_after_s=0.2), 503, "no_worker_available"),
        (errors.PromptTooLong("long", field="chat.messages"), 400, "context_length_exceeded"),
        (errors.ModelNotFound("none", field="model"), 404, "model_not_found"),
        (errors.DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (RuntimeError("secret detail"), 500, "internal"),
    ],
)
async def test_before_the_first_token_an_error_is_a_status(
    face: Face, error: Exception, status: int, code: str, streamed: bool
) -> None:
    face.service.script = failing(error, after=0)
    answer = await face.chat({**CHAT, "stream": streamed})
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StreamBroken("the worker was lost", retry_after_s=1.0), "stream_broken"),
        (errors.DeadlineExceeded("late"), "deadline_exceeded"),
        (KeyError("secret detail"), "internal"),
    ],
)
async def test_in_the_middle_an_error_is_the_last_frame(face: Face, error: Exception, code: str) -> None:
    face.service.script = failing(error, after=2)
    answer = await face.chat(STREAM)
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == code
    assert "[DONE]" not in answer.events
    assert answer.events[-2]["choices"][0]["delta"] == {"content": "Hel"}
    assert b"secret" not in answer.body


async def test_a_stream_that_finds_no_place_is_a_503_that_clients_retry(face: Face) -> None:
    """Also after its acceptance: OpenAI's clients retry a status, and no event."""
    face.service.script = failing(errors.QueueTimeout("no worker had room", retry_after_s=2.0), after=1)
    answer = await face.chat(STREAM)
    assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("fields", "found", "param"),
    [
        ({"max_completion_tokens": 5}, "max_output_tokens", "max_completion_tokens"),
        ({"max_tokens": 5}, "max_output_tokens", "max_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs", "top_logprobs"),
        ({"service_tier": "priority"}, "priority", "service_tier"),
        ({"safety_identifier": "s"}, "user", "safety_identifier"),
        ({"chat_template_kwargs": {"a": 1}}, "chat.template_variables", "chat_template_kwargs"),
    ],
)
async def test_the_param_is_the_field_that_the_client_sent(
    face: Face, fields: dict[str, Any], found: str, param: str
) -> None:
    for streamed in (False, True):
        error = errors.InvalidInput(f"{found} is out of bounds", field=found)
        face.service.script = failing(error, after=0)
        answer = await face.chat({**CHAT, **fields, "stream": streamed})
        assert (answer.error["param"], answer.error["message"]) == (param, f"{param} is out of bounds")


async def test_an_error_of_one_prompt_ends_its_batch(face: Face) -> None:
    async def script(call: Call) -> AsyncGenerator[Event, None]:
        if call.generation.prompt == "bad":
            raise errors.PromptTooLong("too long", field="prompt")
        yield accepted(call)
        await asyncio.sleep(30)

    face.service.script = script
    for streamed in (False, True):
        body = {"model": "m", "prompt": ["good", "bad", "good"], "stream": streamed}
        answer = await face.ask("POST", "/v1/completions", body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        await asyncio.wait_for(face.service.closed.wait(), 30)
        assert face.service.running == 0


async def test_a_bug_is_an_incident_without_its_text(face: Face, logs: list[Any]) -> None:
    face.service.script = failing(RuntimeError("secret /etc/path"), after=0)
    answer = await face.chat(CHAT)
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    (crashed,) = [entry for entry in logs if entry["event"] == "http.crashed"]
    assert crashed["incident"] in answer.error["message"]


async def test_logs_hold_neither_prompts_nor_outputs_nor_keys(face: Face, logs: list[Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a very private prompt"}]}
    await face.chat(body)
    await face.chat({**body, "n": "x"})
    await face.chat(body, key=KEY[:-1] + "x")
    face.service.script = failing(errors.StreamBroken("lost"), after=2)
    await face.chat({**body, "stream": True})
    assert len(logs) == 3
    for secret in ("private", "Hel", KEY[-20:-2]):
        assert secret not in repr(logs)
