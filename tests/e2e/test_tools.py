"""Calls of tools against a whole installation: the OpenAI SDK, and a worker that is lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fairway.client import Client, FinishReason, Message, Options, Tool
from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, at_rest, kill, metadata

CLIENT = Path(__file__).with_name("tools_client.py")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"maxProperties": 0}}


@pytest.fixture(scope="module")
def tooled(stack: Stack) -> Iterator[Stack]:
    """The bundled model declares no form of calls: its deployment names one."""
    cli = CommandLine(stack.state)
    changed = cli("deployments", "update", stack.model, "--output-form", "hermes")
    assert changed.code == 0, changed.err
    yield stack
    cli("deployments", "update", stack.model, "--output-form", "")


@pytest.fixture(scope="module")
def answers(openai_python: str, tooled: Stack) -> Any:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [openai_python, str(CLIENT), tooled.http, tooled.api_key, tooled.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_required_call_matches_its_schema(answers: Any) -> None:
    for found in (answers["required"], answers["streamed"], answers["named"]):
        assert found["finish"] == "tool_calls"
        assert found["content"] is None
        assert found["calls"]
        for call_id, name, arguments in found["calls"]:
            assert call_id.startswith("call_")
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert [name for _, name, _ in answers["named"]["calls"]] == ["get_weather"]


def test_a_stream_has_the_same_calls_in_pieces(answers: Any) -> None:
    streamed, whole = answers["streamed"]["calls"], answers["named"]["calls"]
    assert [call[1:] for call in streamed] == [call[1:] for call in whole]
    assert answers["streamed"]["pieces"] > len(answers["streamed"]["calls"])
    assert answers["helper"] == {"finish": "tool_calls", "name": "now"}


def test_the_model_may_answer_without_a_call(answers: Any) -> None:
    for found in (answers["auto"], answers["none"]):
        assert (found["finish"] == "tool_calls") is bool(found["calls"]), found
        assert found["finish"] in ("stop", "length", "tool_calls"), found
        assert found["calls"] or found["content"].strip(), found
        for _, name, arguments in found["calls"]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert answers["none"]["calls"] == []


def test_ids_of_calls_are_those_of_the_first_answer(answers: Any) -> None:
    first, again = answers["kept"]
    assert first == again
    assert first["calls"][0][0] != answers["required"]["calls"][0][0]


def test_what_cannot_be_served_is_named(answers: Any) -> None:
    assert answers["refused"] == [
        "tools[2].function.name",
        "tool_choice",
        "tools[0].function.parameters",
        "tools[0].function.parameters",
    ]


async def test_streams_of_the_python_client_have_what_its_whole_answers_have(tooled: Stack) -> None:
    chat = [Message("user", "How is the weather?")]
    options = Options(
        max_output_tokens=600,
        seed=3,
        logprobs=2,
        tools=[Tool("weather", "", WEATHER)],
        tool_choice="weather",
        parallel_tool_calls=False,
    )
    async with (
        Client(tooled.endpoints["gateways"], api_key=tooled.api_key) as client,
        client.session() as session,
        asyncio.timeout(120),
    ):
        whole = await client.complete(tooled.model, chat, options, idempotency_key="weather")
        for sender in (client, session):
            stream = sender.generate(tooled.model, chat, options, idempotency_key="weather")
            assert (await stream.collect()).choices == whole.choices
        free = await client.complete(
            tooled.model, chat, Options(max_output_tokens=8, seed=3, parts=True), idempotency_key="free"
        )
    (choice,) = whole.choices
    assert choice.finish_reason is FinishReason.TOOL_CALLS
    jsonschema.validate(json.loads(choice.calls[0].arguments), WEATHER)
    assert len(choice.logprobs) == len(choice.ids)
    assert free.choices[0].content == free.text


async def called(stack: Stack, *, lose_worker: bool) -> tuple[str, list[str], int]:
    """Return the arguments of a long call, its ids, and how often it was resumed."""
    generation = pb.Generation(model=stack.model, max_output_tokens=900, parts=True)
    generation.chat.messages.add(role="user", content="Go")
    schema = {
        "type": "object",
        "properties": {"steps": {"type": "string", "pattern": "^(lo|ng|er){120}$"}},
        "required": ["steps"],
        "additionalProperties": False,
    }
    generation.chat.tools.add(name="walk", parameters=json.dumps(schema))
    generation.tool_choice.mode = pb.TOOL_MODE_REQUIRED
    generation.tool_choice.single = True
    generation.sampling.seed = 7
    arguments, ids, resumes, lost = "", [], 0, False
    async with stack.inference() as stub, asyncio.timeout(120):
        call = stub.Generate(pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key))
        async for event in call:
            for part in event.chunk.parts:
                arguments += part.call.arguments
                ids += [part.call.id] if part.call.id else []
            if lose_worker and not lost and len(arguments) >= 20:
                lost = True
                for name, worker in (await stack.workers()).items():
                    if any(version.running for version in worker.versions):
                        kill(stack.worker_pid(name))
            if event.HasField("finished"):
                resumes = event.finished.resumes
                assert event.finished.choices[0].finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
    return arguments, ids, resumes


async def test_a_call_goes_on_when_its_worker_is_lost(tooled: Stack) -> None:
    expected, _, _ = await called(tooled, lose_worker=False)
    try:
        found, ids, resumes = await called(tooled, lose_worker=True)
    finally:
        await tooled.wait_workers(at_rest, 120)
    assert resumes > 0
    assert found == expected
    assert len(ids) == 1
    assert len(json.loads(found)["steps"]) == 240


def test_chat_prints_calls_and_takes_what_they_return(tooled: Stack, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(
        json.dumps([{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}])
    )
    options = ("--tools", str(tools), "--tool-choice", "required", "--seed", "7", "--max-tokens", "200")
    with CommandLine(tooled.state).process("chat", *options) as process:
        printed, said = process.communicate("Weather in Bern?\nsunny\n", timeout=120)
    assert process.returncode == 0, said
    assert "Enter what weather returns." in said
    calls = [line for line in printed.splitlines() if line]
    assert calls
    for call in calls:
        assert call.startswith("weather("), printed
        jsonschema.validate(json.loads(call[len("weather(") : -1]), WEATHER)
