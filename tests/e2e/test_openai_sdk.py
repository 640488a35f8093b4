"""The OpenAI SDK, unchanged, against a whole installation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.stack import Stack

CLIENT = Path(__file__).with_name("openai_client.py")


@pytest.fixture(scope="module")
def heard(openai_python: str, stack: Stack) -> Any:
    """What the client script heard, run without anything of Fairway on its path."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    cli = CommandLine(stack.state)
    cli("tenants", "create", "limited", "--requests-per-minute", "3", "--tokens-per-minute", "6000")
    limited = cli("keys", "create", "limited-key", "--tenant", "limited").out.strip()
    command = [openai_python, str(CLIENT), stack.http, stack.api_key, stack.model, limited]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_32_streams_of_mixed_lengths_are_complete(heard: Any) -> None:
    assert len(heard["streams"]) == 32
    for stream in heard["streams"]:
        assert stream["got"] == stream["asked"]
        assert stream["reasons"] == ["length"]
        assert stream["text"] > 0


def test_chat_streamed_and_whole_agree(heard: Any) -> None:
    chat = heard["chat"]
    assert chat["whole"] == chat["streamed"]
    assert chat["whole"]
    assert chat["roles"] == ["assistant"]
    assert chat["finish"][0] == chat["finish"][1]
    assert chat["finish"][0] in ("stop", "length")
    usage = chat["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chat["logprobs"] == usage["completion_tokens"] or chat["finish"][0] == "stop"
    assert chat["top"] == 3
    assert chat["best_is_sampled"]
    assert chat["choices"] == [0, 1]
    assert chat["request_id"]


def test_seeds_stops_logprobs_and_models(heard: Any, stack: Stack) -> None:
    details = heard["details"]
    assert details["seeded_equal"]
    assert details["stopped"] == details["text"].split(details["stop"])[0]
    assert details["stop_reason"] == "stop"
    assert details["logprob_tokens"] > 0
    assert details["models"] == [stack.model, "safety-demo"]
    assert details["retrieved"] == stack.model


def test_a_stream_with_a_key_is_repeated_and_continued(heard: Any) -> None:
    keyed = heard["keyed"]
    assert keyed["texts"][0] == keyed["texts"][1] == keyed["first"] + keyed["rest"]
    assert keyed["first"]
    assert keyed["ids"] > 0
    assert keyed["roles"] == 0


def test_the_rates_are_in_the_headers_of_served_and_rejected_answers(heard: Any) -> None:
    served, rejected = heard["rates"]["served"], heard["rates"]["rejected"]
    assert [headers["x-ratelimit-remaining-requests"] for headers in served] == ["2", "1", "0"]
    assert all(int(headers["x-ratelimit-remaining-tokens"]) > 5000 for headers in served)
    assert heard["rates"]["code"] == "rate_limit_exceeded"
    assert rejected["x-ratelimit-limit-requests"] == "3"
    assert rejected["x-ratelimit-remaining-requests"] == "0"
    assert rejected["x-ratelimit-reset-requests"].endswith("s")
    wait_s = int(rejected["retry-after-ms"]) / 1000
    assert 0 < wait_s <= int(rejected["retry-after"]) < wait_s + 1
    assert wait_s < 20, "three a minute: the next fits within 20 s"


def test_what_frameworks_send_beside_the_question_is_accepted(heard: Any) -> None:
    extras = heard["extras"]
    assert extras["texts"][0] == extras["texts"][1]
    assert extras["texts"][0]
    assert extras["tier"] == "default"
    assert extras["choices"] == list(range(20))
    assert extras["distinct"] > 5, "each choice has a seed of its own"
    assert len(set(extras["prompt_tokens"])) == 1, "the prompt counts once"
    assert extras["usages"] == sorted(extras["usages"])
    assert extras["usages"][-1] == extras["usages"][-2] > 0
    assert extras["short"] == 16


def test_errors_have_the_shape_that_the_sdk_knows(heard: Any) -> None:
    errors = heard["errors"]
    assert errors["key"][:2] == ["AuthenticationError", 401]
    assert errors["model"][:2] == ["NotFoundError", 404]
    assert errors["temperature"][:2] == ["BadRequestError", 400]
    assert errors["temperature"][3] == "temperature"
    assert errors["long"][:2] == ["BadRequestError", 400]
    assert errors["tools"][:2] == ["BadRequestError", 400]
    assert errors["tools"][3] == "tools"
