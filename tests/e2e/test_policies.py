"""A safety pack on a whole installation: published, assigned, obeyed by requests, explained, moderated by."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.cli.errors import ExitCode
from fairway.cli.fleet.options import BUNDLED_CLASSIFIER
from fairway.v1 import inference_pb2
from services.rpc.status import from_rpc_error
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, at_rest, metadata

HANG_S = 60.0
PACK = {
    "categories": {"bad": {"action": "block"}},
    "lists": [{"category": "bad", "phrases": ["kaboom"]}],
}


def until(holds: Callable[[], Any]) -> Any:
    """Return the first result that is true: gateways follow the operator's changes within moments."""
    deadline = time.monotonic() + HANG_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def strict(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommandLine, str, str]]:
    """Yield the command line, the digest of the pack that tenant ``guarded`` obeys, and a key of it."""
    cli = CommandLine(stack.state)
    file = tmp_path_factory.mktemp("packs") / "strict.json"
    file.write_text(json.dumps(PACK))
    digest = cli("policies", "create", str(file), "--name", "strict").out.strip()
    cli("tenants", "create", "guarded")
    secret = cli("keys", "create", "guarded-key", "--tenant", "guarded").out.strip()
    cli("policies", "assign", "--tenant", "guarded", "--pack", "strict")
    yield cli, digest, secret
    cli("policies", "assign", "--tenant", "guarded", "--none")
    cli("keys", "revoke", "guarded-key", "--yes")
    cli("deployments", "delete", "strict", "--yes")
    cli("tenants", "delete", "guarded", "--yes")


def refusal(stack: Stack, secret: str, prompt: str) -> str:
    """Return why the safety pack refuses a prompt; empty where it passes, or the pack is on its way."""

    async def asked() -> str:
        generation = inference_pb2.Generation(model=stack.model, prompt=prompt, max_output_tokens=2)
        request = inference_pb2.CompleteRequest(generation=generation)
        async with stack.inference() as stub:
            try:
                await stub.Complete(request, metadata=metadata(secret), timeout=30)
            except grpc.aio.AioRpcError as error:
                found = from_rpc_error(error)
                return found.message if found.reason == "CONTENT_FILTERED" else ""
        return ""

    return asyncio.run(asked())


async def accepted(stack: Stack, secret: str) -> inference_pb2.Accepted | None:
    """Return the acceptance of a request, None until the gateway has the key and the pack."""
    generation = inference_pb2.Generation(model=stack.model, prompt="once", max_output_tokens=2)
    request = inference_pb2.CompleteRequest(generation=generation)
    async with stack.inference() as stub:
        try:
            return (await stub.Complete(request, metadata=metadata(secret), timeout=30)).accepted
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
                raise
            return None


def test_requests_of_the_tenant_obey_it_and_say_so(
    stack: Stack, strict: tuple[CommandLine, str, str]
) -> None:
    cli, digest, secret = strict

    def obeyed() -> Any:
        found = asyncio.run(accepted(stack, secret))
        return found if found is not None and found.safety.pack_digest else None

    found = until(obeyed)
    assert (found.safety.deployment, found.safety.pack_digest) == ("strict", digest)
    decision = cli("explain", found.request_id, "-o", "json").json["decisions"][0]
    assert decision["safety"].endswith(f"{digest} of strict")
    others = asyncio.run(accepted(stack, stack.api_key))
    assert others is not None
    assert not others.safety.pack_digest, "other tenants obey none"


def test_it_is_listed_and_is_no_model(stack: Stack, strict: tuple[CommandLine, str, str]) -> None:
    cli, digest, secret = strict
    shown = cli("deployments", "show", "strict", "-o", "json").json
    assert (shown["executor"], shown["version_digest"]) == ("gateway", digest)
    assert shown["status"]["message"] == "gateways apply it"
    cli("deployments", "update", "strict", "--replicas", "1", code=ExitCode.REFUSED)
    cli("deployments", "delete", "strict", "--yes", code=ExitCode.REFUSED)
    request = urllib.request.Request(f"{stack.http}/v1/models", headers={"authorization": f"Bearer {secret}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert "strict" not in [one["id"] for one in json.load(reply)["data"]]


def test_texts_are_judged_by_it(stack: Stack, strict: tuple[CommandLine, str, str], tmp_path: Path) -> None:
    cli, digest, secret = strict

    def moderated() -> Any:
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        body = json.dumps({"input": ["fine", "kaboom"]}).encode()
        request = urllib.request.Request(f"{stack.http}/v1/moderations", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code not in (400, 401, 503):
                raise
            return None

    found = until(moderated)
    assert found["model"] == "strict"
    assert [one["flagged"] for one in found["results"]] == [False, True]
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"text": "kaboom", "expected": ["bad"]}\n{"text": "fine", "expected": ["bad"]}\n')
    table = cli("policies", "test", str(cases), "--pack", "strict", "-o", "json").json
    assert table["pack_digest"] == digest
    assert table["categories"][0] == {
        "category": "bad",
        "hits": 1,
        "false_alarms": 0,
        "misses": 1,
        "rest": 0,
        "precision": 1.0,
        "recall": 0.5,
    }
    history = cli("policies", "history", "strict", "-o", "json").json
    assert history["tenants"] == ["guarded"]
    assert {"create", "SAFETY_PACK_ASSIGNED"} <= {one["what"] for one in history["changes"]}


def test_lines_of_a_batch_obey_it(stack: Stack, strict: tuple[CommandLine, str, str], tmp_path: Path) -> None:
    cli, _, secret = strict
    until(lambda: refusal(stack, secret, "kaboom"))
    forced = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"const": "kaboom"}}}
    bodies: list[dict[str, Any]] = [{"prompt": "fine"}, {"prompt": "kaboom"}, {"response_format": forced}]
    file = tmp_path / "lines.jsonl"
    with file.open("w") as lines:
        for number, body in enumerate(bodies):
            messages = [{"role": "user", "content": body.pop("prompt", "say it")}]
            asked = {"model": stack.model, "messages": messages, "max_tokens": 12} | body
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked}
            lines.write(json.dumps(line) + "\n")
    batch = cli("batches", "create", str(file), "--wait", "-o", "json", "--api-key", secret).json
    answers = {
        one["custom_id"]: one["response"]
        for option in ((), ("--errors",))
        for one in map(
            json.loads, cli("batches", "results", batch["id"], *option, "--api-key", secret).out.splitlines()
        )
    }
    assert answers["0"]["status_code"] == 200
    assert (answers["1"]["status_code"], answers["1"]["body"]["error"]["code"]) == (400, "content_filter")
    (choice,) = answers["2"]["body"]["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert "kaboom" not in choice["message"]["content"]


def test_the_bundled_classifier_judges_once_it_has_a_replica(
    stack: Stack, strict: tuple[CommandLine, str, str], tmp_path: Path
) -> None:
    cli, _, secret = strict
    file = tmp_path / "taught.json"
    rule = {"model": BUNDLED_CLASSIFIER, "labels": {"insult": "bad"}, "threshold": 0.9}
    file.write_text(json.dumps({"categories": {"bad": {"action": "block"}}, "classifiers": [rule]}))
    assert cli("deployments", "show", BUNDLED_CLASSIFIER, "-o", "json").json["replicas"] == 0
    cli("deployments", "scale", BUNDLED_CLASSIFIER, "1", "--wait")
    cli("policies", "create", str(file), "--name", "taught")
    cli("policies", "assign", "--tenant", "guarded", "--pack", "taught")
    try:
        refused = until(lambda: refusal(stack, secret, "you are such a pathetic loser"))
        assert refused == "prompt has what the safety pack blocks: bad"
        assert not refusal(stack, secret, "the list is sorted by name")
    finally:
        cli("policies", "assign", "--tenant", "guarded", "--pack", "strict")
        cli("deployments", "delete", "taught", "--yes")
        cli("deployments", "scale", BUNDLED_CLASSIFIER, "0")
        asyncio.run(stack.wait_workers(at_rest, HANG_S))
