"""The Responses and Messages APIs by the SDKs of OpenAI and Anthropic, unchanged, on a whole installation."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.stack import Stack, kill

CLIENT = Path(__file__).with_name("answers_client.py")


class Client:
    """Runs the script, which has nothing of Fairway on its path."""

    def __init__(self, python: str, stack: Stack) -> None:
        self._python = python
        self._stack = stack

    def __call__(self, *arguments: str) -> Any:
        stack = self._stack
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        command = [self._python, str(CLIENT), stack.http, stack.api_key, stack.model, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def client(openai_python: str, stack: Stack) -> Iterator[Client]:
    """The bundled model declares no form of calls: its deployment names one."""
    cli = CommandLine(stack.state)
    changed = cli("deployments", "update", stack.model, "--output-form", "hermes")
    assert changed.code == 0, changed.err
    yield Client(openai_python, stack)
    cli("deployments", "update", stack.model, "--output-form", "")


@pytest.fixture(scope="module")
def found(client: Client) -> Any:
    return client("all")


def test_a_response_whole_streamed_and_retrieved_agree(found: Any) -> None:
    seen = found["responses"]
    assert seen["whole"] == seen["streamed"] == seen["last"] != ""
    assert seen["helped"][0] == seen["helped"][1] != ""
    assert seen["again"]
    assert seen["types"][:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert seen["types"][-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert seen["types"][-1] == f"response.{seen['status']}"
    assert seen["usage"]["total_tokens"] == seen["usage"]["input_tokens"] + seen["usage"]["output_tokens"]
    assert seen["counted"] == seen["usage"]["input_tokens"]
    assert seen["prompt_grew"]
    assert seen["items"] == ["def add(a, b):"]


def test_formats_and_calls_are_kept(found: Any) -> None:
    seen = found["responses"]
    status, text = seen["formatted"]
    assert status == "completed"
    assert 0 <= json.loads(text)["a"] <= 9
    status, items = seen["called"]
    assert status == "completed"
    assert [kind for kind, _ in items if kind == "function_call"]
    assert all(set(json.loads(text)) == {"city"} for kind, text in items if kind == "function_call")


def test_errors_of_responses_name_what_to_change(found: Any) -> None:
    seen = found["responses"]
    assert seen["deleted"] == [404, "not_found_error", "response_id", "NotFoundError"]
    assert seen["refused"] == [400, "invalid_request_error", "tools[0].type", "BadRequestError"]
    assert seen["unknown"][0] == 404


def test_a_response_runs_in_the_background(found: Any) -> None:
    seen = found["background"]
    assert seen["made"] == "queued"
    assert seen["ended"] in ("completed", "incomplete")
    assert seen["last"] == f"response.{seen['ended']}"
    assert seen["text"]
    assert seen["rest"]
    assert seen["cancelled"] == ["cancelled", "cancelled"]


def test_a_message_whole_and_streamed_agree(found: Any) -> None:
    seen = found["messages"]
    assert seen["whole"] == seen["streamed"] == seen["final"] != ""
    assert seen["types"][:2] == ["message_start", "content_block_start"]
    assert seen["types"][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert seen["reason"] in ("end_turn", "max_tokens")
    assert seen["usage"][0] == seen["counted"][0] < seen["counted"][1]
    assert seen["request_id"].startswith("req_")
    assert seen["stopped"][0] == "stop_sequence"


def test_calls_of_messages(found: Any) -> None:
    reason, blocks = found["messages"]["called"]
    assert reason == "tool_use"
    used = [block for block in blocks if block["type"] == "tool_use"]
    assert used
    assert all(block["name"] == "get_weather" and set(block["input"]) == {"city"} for block in used)


def test_errors_of_messages(found: Any) -> None:
    seen = found["messages"]
    assert seen["unknown"][:2] == [404, "not_found_error"]
    assert seen["refused"] == [400, "invalid_request_error", "container", "BadRequestError"]
    assert seen["wrong_key"][:2] == [401, "authentication_error"]


def test_a_killed_gateways_run_is_continued(client: Client, stack: Stack) -> None:
    """The gateway is killed in the middle; the answer is that of a run without a kill."""
    first = client("wait", client("begin"))
    assert first[2] == 400
    begun = client("begin")
    time.sleep(0.3)
    for pid in stack.pids("services", "gateway"):
        kill(pid)
    again = client("wait", begun)
    assert again == first
