"""Structured output against a whole installation: HTTP, gRPC, the command line, and a worker that is lost."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, at_rest, kill, metadata

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = r"(lo|ng|er){120}"


def post(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{stack.http}/v1/{path}",
        json.dumps({"model": stack.model, "seed": 1} | body).encode(),
        {"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_an_answer_matches_its_schema(stack: Stack) -> None:
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}},
    }
    status, answer = post(stack, "chat/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_schema_that_is_refused_is_named(stack: Stack) -> None:
    remote = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": "https://example.com/x"}},
    }
    body = {"prompt": "x", "max_tokens": 4, "response_format": remote}
    status, answer = post(stack, "completions", body)
    assert status == 400
    assert answer["error"]["param"].startswith("response_format")
    assert "example.com" in answer["error"]["message"]
    status, answer = post(stack, "completions", {"prompt": "x", "guided_regex": "["})
    assert status == 400
    assert answer["error"]["param"] == "guided_regex"


def test_the_command_line_takes_a_schema(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    found = CommandLine(stack.state)(
        "complete", "who = ", "--schema", str(path), "--max-tokens", "200", "--seed", "1", "--no-stream"
    )
    assert found.code == 0, found.err
    jsonschema.validate(json.loads(found.out), SCHEMA)


async def constrained(stack: Stack, *, lose_worker: bool) -> tuple[str, int]:
    """Return the text of a long output, and how often it was resumed."""
    generation = pb.Generation(model=stack.model, prompt="a", max_output_tokens=900)
    generation.sampling.seed = 7
    generation.sampling.temperature = 1.0
    generation.sampling.constraint.CopyFrom(common_pb2.Constraint(regex=LONG))
    text, resumes, lost = "", 0, False
    async with stack.inference() as stub, asyncio.timeout(120):
        call = stub.Generate(pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key))
        async for event in call:
            if event.HasField("chunk"):
                text += event.chunk.text
                if lose_worker and not lost and len(text) >= 6:
                    lost = True
                    for name, worker in (await stack.workers()).items():
                        if any(version.running for version in worker.versions):
                            kill(stack.worker_pid(name))
            elif event.HasField("finished"):
                resumes = event.finished.resumes
    return text, resumes


async def test_an_output_is_the_same_when_its_worker_is_lost(stack: Stack) -> None:
    expected, _ = await constrained(stack, lose_worker=False)
    try:
        found, resumes = await constrained(stack, lose_worker=True)
    finally:
        await stack.wait_workers(at_rest, 120)
    assert resumes > 0
    assert found == expected
    assert len(found) == 240
