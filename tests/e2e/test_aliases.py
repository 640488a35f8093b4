"""An alias of two sizes on a whole installation: who serves, why, at what price, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fairway.cli.errors import ExitCode
from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, metadata

HANG_S = 60.0
LONG = "once upon a time " * 12


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def size(self) -> str:
        return self.headers.get("x-fairway-size", "")


@dataclass
class Caller:
    stack: Stack
    cli: CommandLine
    secret: str

    def ask(self, *, quality: int | None = None, key: str = "", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": fields.pop("content", "hi")}]
        body = {"model": "auto", "messages": messages, "max_tokens": 4, **fields}
        headers = {"authorization": f"Bearer {self.secret}", "content-type": "application/json"}
        headers |= {"x-fairway-quality": str(quality)} if quality is not None else {}
        headers |= {"idempotency-key": key} if key else {}
        request = urllib.request.Request(
            f"{self.stack.http}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Answer(reply.status, dict(reply.headers.items()), json.load(reply))
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers.items()), json.load(error))

    def until(self, holds: Callable[[Answer], bool], **fields: Any) -> Answer:
        """Ask until the answer is as awaited: gateways follow the operator's changes within moments."""
        deadline = time.monotonic() + HANG_S
        while not holds(answer := self.ask(**fields)):
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)
        return answer

    def explained(self, answer: Answer) -> str:
        found = self.cli("explain", answer.body["id"].removeprefix("chatcmpl-"), "-o", "json").json
        return str(found["decisions"][0].get("size_reason", ""))


@pytest.fixture(scope="module")
def caller(stack: Stack) -> Iterator[Caller]:
    cli = CommandLine(stack.state)
    deployment = cli("deployments", "show", stack.model, "-o", "json").json
    version = ("--model", deployment["model"], "--version", deployment["version"])
    cli("deployments", "create", "large", *version)
    sizes = ("--size", f"{stack.model}:context=64", "--size", "large:quality=60,tools,schemas,context=512")
    cli("aliases", "create", "auto", *sizes)
    found = Caller(stack, cli, stack.api_key)
    found.until(lambda answer: answer.status == 200)
    found.until(lambda answer: answer.status == 200 and answer.body["model"] == "large", quality=60)
    yield found
    cli("aliases", "delete", "auto", "--yes")
    cli("deployments", "delete", "large", "--yes")


def test_the_smallest_that_meets_a_request_serves_it_and_says_why(caller: Caller) -> None:
    small = caller.stack.model
    found = caller.ask()
    assert (found.status, found.body["model"], found.size) == (200, small, "smallest of auto")
    better = caller.ask(quality=60)
    assert better.body["model"] == "large"
    assert better.size == f"smallest of auto; {small} needs quality 60, has 0"
    shaped = caller.ask(response_format={"type": "json_object"})
    assert shaped.size == f"smallest of auto; {small} needs schemas"
    long = caller.ask(content=LONG)
    needed = long.body["usage"]["prompt_tokens"] + 4
    assert long.size == f"smallest of auto; {small} needs {needed} tokens of context, has 64"
    assert caller.explained(long) == long.size
    assert caller.explained(found) == found.size
    named = caller.ask(model="large")
    assert (named.status, named.size) == (200, "")


def test_a_request_that_no_size_meets_is_refused_with_figures(caller: Caller) -> None:
    tokens = caller.ask(content=LONG).body["usage"]["prompt_tokens"]
    refused = caller.ask(content=LONG, max_tokens=500)
    assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
    figures = f"it needs {tokens + 500:,} tokens of context, the largest has 512"
    assert f"no size of auto meets the request: {figures}" in refused.body["error"]["message"]
    refused = caller.ask(quality=61)
    small = caller.stack.model
    assert refused.body["error"]["message"] == (
        f"no size of auto meets the request: {small} needs x-fairway-quality 61, has 0; "
        "large needs x-fairway-quality 61, has 60"
    )
    assert (refused.status, refused.body["error"]["param"]) == (400, "x-fairway-quality")
    assert caller.ask(quality=101).status == 400


def test_the_size_that_serves_is_the_one_that_is_paid(caller: Caller) -> None:
    caller.cli("deployments", "update", "large", "--input-price", "1", "--output-price", "2")
    caller.cli("tenants", "create", "sized")
    secret = caller.cli("keys", "create", "sized-key", "--tenant", "sized").out.strip()
    payer = Caller(caller.stack, caller.cli, secret)
    payer.until(lambda answer: answer.status == 200)
    try:
        caller.cli("budgets", "create", "sized", "--tenant", "sized", "--per-month", "100")
        spent = paid = 0
        deadline = time.monotonic() + HANG_S
        while not spent:  # the price reaches gateways within moments
            assert time.monotonic() < deadline
            answer = payer.ask(quality=60)
            paid += answer.body["usage"]["prompt_tokens"] + 2 * answer.body["usage"]["completion_tokens"]
            spent = int(caller.cli("budgets", "show", "sized", "-o", "json").json.get("spent_micros", 0))
        assert 0 < spent <= paid
        payer.ask()
        assert int(caller.cli("budgets", "show", "sized", "-o", "json").json["spent_micros"]) == spent
    finally:
        caller.cli("budgets", "delete", "sized", "--yes")
        caller.cli("keys", "revoke", "sized-key", "--yes")
        caller.cli("tenants", "delete", "sized", "--yes")
        caller.cli("deployments", "update", "large", "--input-price", "0", "--output-price", "0")


def test_a_key_keeps_its_size(caller: Caller) -> None:
    first = caller.ask(quality=60, key="kept")
    assert first.size == f"smallest of auto; {caller.stack.model} needs quality 60, has 0"
    caller.cli("aliases", "update", "auto", "--size", "large")
    caller.until(lambda answer: answer.body.get("model") == "large")
    again = caller.ask(quality=60, key="kept")
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.body["model"], again.size, again.body["id"]) == ("large", first.size, first.body["id"])
    small = caller.stack.model
    caller.cli("aliases", "update", "auto", "--size", f"{small}:context=64", "--size", "large:quality=60")
    caller.until(lambda answer: answer.body.get("model") == small)
    generation = pb.Generation(model="auto", prompt="hi", max_output_tokens=4, quality=60)
    done = asyncio.run(complete(caller.stack, generation))
    assert (done.accepted.model, done.accepted.size.alias) == ("large", "auto")
    assert [one.deployment for one in done.accepted.size.passed] == [small]


async def complete(stack: Stack, generation: pb.Generation) -> pb.CompleteResponse:
    async with stack.inference() as stub:
        request = pb.CompleteRequest(generation=generation)
        return await stub.Complete(request, metadata=metadata(stack.api_key))


def test_names_are_of_a_deployment_or_an_alias(caller: Caller) -> None:
    refused = int(ExitCode.REFUSED)
    taken = caller.cli("aliases", "create", "large", "--size", caller.stack.model, code=refused)
    assert "a deployment has the name large" in taken.err
    deployment = caller.cli("deployments", "show", "large", "-o", "json").json
    version = ("--model", deployment["model"], "--version", deployment["version"])
    taken = caller.cli("deployments", "create", "auto", *version, code=refused)
    assert "an alias has the name auto" in taken.err
    missing = caller.cli("aliases", "update", "auto", "--size", "gone", code=refused)
    assert "there is no deployment 'gone'" in missing.err
