"""Timelines of requests on a running installation."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fairway.timelines import STAGES
from tests.support.command_line import CommandLine
from tests.support.stack import Stack
from tests.support.timelines import check_trace

PATIENCE_S = 60.0


@pytest.fixture
def cli(stack: Stack) -> CommandLine:
    return CommandLine(stack.state)


def _answered(stack: Stack, tokens: int, key: str = "") -> str:
    """Return the id of a request that has ended."""
    body = {"model": stack.model, "prompt": "The tide", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{stack.http}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {key or stack.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        json.load(answer)
        return str(answer.headers["x-request-id"])


def test_requests_that_shared_steps_are_in_each_others_timelines(
    cli: CommandLine, stack: Stack, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: _answered(stack, 60), range(8)))

    def ended(name: str) -> bool:
        return "finished" in cli("timeline", name, "-o", "json").json

    deadline_s = time.monotonic() + PATIENCE_S
    while not all(map(ended, names)):  # gateways report every two seconds
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    shared = 0
    for name in names:
        found = cli("timeline", name, "-o", "json").json
        (host,) = found["workers"]
        own = [one for one in host["sequences"] if one["request_id"] == name]
        assert len(own) == 1
        shared += len(host["sequences"]) > 1
        assert len(host["steps"]) >= 60
        assert found["decisions"][0]["outcome"] == "GRANTED"
        file = tmp_path / f"{name}.json"
        assert "ui.perfetto.dev" in cli("timeline", name, "--perfetto", str(file)).err
        trace = json.loads(file.read_text())
        check_trace(trace)
        bars = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {*STAGES} & bars
    assert shared >= 2, "no request shared a step"
    rows = cli("timeline", names[0]).rows
    assert {"placement", "length"} <= {row[2] for row in rows}
    assert [row for row in rows if row[2].startswith("decode in")]


def test_an_unknown_request_has_no_timeline(cli: CommandLine) -> None:
    said = cli("timeline", "req_" + "0" * 24, code=4)
    assert "there is no record of the request" in said.err
    assert "fairway requests list --slow" in said.err


def test_a_trace_that_cannot_be_written_is_an_error(cli: CommandLine, stack: Stack) -> None:
    name = _answered(stack, 4)
    said = cli("timeline", name, "--perfetto", "/nowhere/trace.json", code=1)
    assert "TRACE_NOT_WRITTEN" in said.err


def test_a_tenant_sees_its_own_requests_alone(cli: CommandLine, stack: Stack) -> None:
    name = _answered(stack, 8)
    cli("tenants", "create", "stranger")
    secret = cli("keys", "create", "strange-key", "--tenant", "stranger").out.strip()
    try:
        own = cli("timeline", name, "--admin-key", stack.api_key, "-o", "json").json
        assert own["workers"][0]["worker_id"] == "worker 1"
        assert {one["request_id"] for one in own["workers"][0]["sequences"]} == {name}
        assert "there is no record" in cli("timeline", name, "--admin-key", secret, code=4).err
    finally:
        cli("keys", "revoke", "strange-key", "--yes")
        cli("tenants", "delete", "stranger", "--yes")
