"""What an installation stores of a tenant: sealed, under keys that rotate under load, erased for good."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from fairway.cli.state import StateDir
from tests.support.command_line import CommandLine
from tests.support.stack import Stack

CANARY = "canary-quartz-4711-vow"
REGION = "eu"


@pytest.fixture(scope="module")
def own(installations: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("rest") / "state"
    settings = {
        "FAIRWAY_RESPONSE_CACHE_TTL_S": "600",
        "FAIRWAY_REGION": REGION,
        "FAIRWAY_LABELS": f"region={REGION}",
        "FAIRWAY_LOG_LEVEL": "debug",
    }
    with Stack.started(state, workers=1, replicas=1, settings=settings) as running:
        yield running


def ask(stack: Stack, path: str, body: Any = None, *, key: str = "", **headers: str) -> Any:
    """Return the JSON of an answer, or its bytes. Raises HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {key or stack.api_key}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{stack.http}{path}", data, sent)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content.startswith(b"{") else content


def refusal(stack: Stack, path: str, body: Any = None, *, key: str = "") -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(stack, path, body, key=key)
    return refused.value.code, refused.value.read().decode()


def completion(stack: Stack, number: int = 0) -> dict[str, Any]:
    return {"model": stack.model, "prompt": f"{CANARY} {number}", "max_tokens": 12, "temperature": 0}


def use_everything(stack: Stack, cli: CommandLine, folder: Path) -> tuple[str, str]:
    """Run each feature that stores something; return the ids of a response and of a batch."""
    ask(stack, "/v1/completions", completion(stack), **{"Idempotency-Key": uuid4().hex})
    ask(stack, "/v1/completions", completion(stack, 1))
    chat = {"model": stack.model, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 8}
    ask(stack, "/v1/chat/completions", {**chat, "stream": True}, **{"Idempotency-Key": uuid4().hex})
    stored = {"model": stack.model, "input": CANARY, "max_output_tokens": 16, "store": True}
    response = ask(stack, "/v1/responses", stored)
    ask(stack, "/v1/responses", {**stored, "background": True})
    lines = folder / "lines.jsonl"
    line = {"method": "POST", "url": "/v1/completions"}
    lines.write_text(
        "\n".join(json.dumps({**line, "custom_id": f"{n}", "body": completion(stack, n)}) for n in range(20))
    )
    made = cli("batches", "create", str(lines), "--endpoint", "/v1/completions", "--wait", "-o", "json").json
    assert made["status"] == "completed"
    lines.unlink()
    return str(response["id"]), str(made["id"])


def places_of(stack: Stack, needles: list[bytes]) -> list[str]:
    """Return the files of the installation that have one of these texts, etcd's and Redis's among them."""
    found = []
    for path in sorted(stack.state.rglob("*")):
        if path.is_file() and not path.is_socket():
            data = path.read_bytes()
            found += [f"{path.relative_to(stack.state)}: {needle!r}" for needle in needles if needle in data]
    return found


def test_no_store_log_or_file_has_a_prompt_or_an_output(own: Stack, tmp_path: Path) -> None:
    cli = CommandLine(own.state)
    response_id, batch_id = use_everything(own, cli, tmp_path)
    answer = ask(own, "/v1/completions", completion(own))["choices"][0]["text"]
    results = cli("batches", "results", batch_id).out
    assert json.loads(results.splitlines()[0])["response"]["body"]["choices"][0]["text"] == answer
    assert CANARY in json.dumps(ask(own, f"/v1/responses/{response_id}/input_items"))
    assert len(answer) >= 8
    assert places_of(own, [CANARY.encode(), answer.encode()]) == []
    marker = own.state / "marker"
    marker.write_bytes(b"x" + CANARY.encode())
    assert places_of(own, [CANARY.encode()]) == [f"marker: {CANARY.encode()!r}"], "the search finds it"
    marker.unlink()


def test_keys_rotate_under_load(own: Stack, tmp_path: Path) -> None:
    cli = CommandLine(own.state)
    response_id, batch_id = use_everything(own, cli, tmp_path)
    before = cli("tenants", "show", "default", "-o", "json").json["data_key"]
    failed, done, sent = list[str](), threading.Event(), 0

    def load() -> None:
        nonlocal sent
        while not done.is_set():
            try:
                ask(own, "/v1/completions", completion(own, sent), **{"Idempotency-Key": uuid4().hex})
                ask(own, f"/v1/responses/{response_id}")
            except Exception as error:
                failed.append(repr(error))
            sent += 1

    thread = threading.Thread(target=load)
    thread.start()
    try:
        cli("tenants", "rotate-key", "default")
        _until(cli, lambda state: state["generations"] == before["generations"] + 1)
        file = own.state / "secrets" / "record_keys"
        text = file.read_text()
        file.write_text(
            text.strip() + "\n" + "n" * 40 + "\n"
        )  # every gateway can unwrap with it, then it wraps
        file.write_text("n" * 40 + "\n" + text)
        _until(cli, lambda state: state["wrapper"] != before["wrapper"])
    finally:
        done.set()
        thread.join()
    assert failed == []
    assert sent > 3
    file.write_text("n" * 40 + "\n")  # the former key-encryption key is needed no more
    assert cli("batches", "results", batch_id).out
    assert ask(own, f"/v1/responses/{response_id}")["id"] == response_id
    file.write_text("n" * 40 + "\n" + text)


def test_a_residency_is_obeyed_or_refused_by_name(own: Stack) -> None:
    cli = CommandLine(own.state)
    for tenant, region in (("berlin", "eu"), ("boston", "us")):
        cli("tenants", "create", tenant, "--residency", region)
    keys = {
        name: cli("keys", "create", f"{name}-k", "--tenant", name).out.strip()
        for name in ("berlin", "boston")
    }
    for key in keys.values():
        _until_known(own, key)
    stored = {"model": own.model, "input": CANARY, "store": True, "max_output_tokens": 8}
    status, text = refusal(own, "/v1/responses", stored, key=keys["boston"])
    assert (status, "RESIDENCY_UNAVAILABLE" in text or "stays in us" in text) == (503, True)
    assert "boston" not in _written(own), "nothing of it is in a store or a log"
    status, text = refusal(own, "/v1/completions", completion(own), key=keys["berlin"])
    assert (status, "with the selector region=eu" in text) == (503, True)
    cli("deployments", "update", own.model, "--selector", "region=eu")
    deadline_s = time.monotonic() + 30
    while True:
        try:
            ask(own, "/v1/responses", stored, key=keys["berlin"])
            break
        except urllib.error.HTTPError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def test_nothing_of_an_erased_tenant_is_left(own: Stack, tmp_path: Path) -> None:
    cli = CommandLine(own.state)
    cli("tenants", "create", "gone", "--retention", "1h", "--training-consent", "Ann=evaluation")
    shown = cli("tenants", "show", "gone", "-o", "json").json
    consent = shown["training_consent"]
    assert (consent["granted_by"], consent["purpose"]) == ("Ann", "evaluation")
    assert consent["recorded_by"]
    assert consent["record_time"]
    key = cli("keys", "create", "gone-k", "--tenant", "gone").out.strip()
    _until_known(own, key)
    stored = {"model": own.model, "input": CANARY, "max_output_tokens": 8}
    response = ask(own, "/v1/responses", stored, key=key)
    ask(own, "/v1/completions", completion(own), key=key, **{"Idempotency-Key": uuid4().hex})
    assert ask(own, f"/v1/responses/{response['id']}", key=key)["id"] == response["id"]
    assert "{gone" in _redis_keys(own)
    cli("tenants", "erase", "gone", "--yes")
    _until(cli, lambda state: bool(state.get("collect_time")) and not state["generations"], "gone")
    assert refusal(own, f"/v1/responses/{response['id']}", key=key)[0] == 401
    assert not [name for name in _redis_keys(own).split() if "{gone" in name and ":idem:" in name]
    assert "was erased" in cli("tenants", "enable", "gone", code=4).err
    deadline_s = time.monotonic() + 20
    while '"gone"' not in cli("audit", "list", "--action", "EraseTenant", "-o", "json").out:
        assert time.monotonic() < deadline_s


def _written(stack: Stack) -> str:
    """Return the keys of Redis, and the lines of logs of the gateway about requests."""
    logs = "".join(path.read_text() for path in (stack.state / "logs").glob("gateway*"))
    return _redis_keys(stack) + logs


def _redis_keys(stack: Stack) -> str:
    client = redis.Redis.from_url(StateDir.at(stack.state).redis_url)
    names: Any = client.keys()
    client.close()
    return " ".join(sorted(name.decode() for name in names))


def _until_known(stack: Stack, key: str) -> None:
    """Return once the gateway has received the key."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            ask(stack, "/v1/models", key=key)
            return
        except urllib.error.HTTPError as error:
            if error.code != 401:
                return
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def _until(cli: CommandLine, holds: Any, tenant: str = "default") -> None:
    """Return once the state of the tenant's keys is as expected."""
    deadline_s = time.monotonic() + 40
    while not holds(state := cli("tenants", "show", tenant, "-o", "json").json["data_key"]):
        assert time.monotonic() < deadline_s, state
        time.sleep(0.3)
