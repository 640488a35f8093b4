"""The command line against a whole installation: outputs in every format, exit codes, and the next step."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairway.cli.fleet.options import bundled_checkpoint
from fairway.cli.state import StateDir
from services.adapters.etcd.store import EtcdStore
from services.core.records import dump, quarantine_key
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Put
from services.runtime.clock import SystemClock
from tests.support.command_line import CommandLine
from tests.support.stack import Stack

PATIENCE_S = 60
LISTS = ("nodes", "deployments", "tenants", "keys", "models")
AWAY = ("--controlplane", "127.0.0.1:9", "--admin-key", "k")


@pytest.fixture
def cli(stack: Stack) -> CommandLine:
    return CommandLine(stack.state)


@pytest.fixture
def other(cli: CommandLine, stack: Stack) -> Iterator[str]:
    """The name of a second deployment, which runs nowhere."""
    cli("deployments", "create", "other", "--model", stack.model, "--replicas", "0")
    yield "other"
    cli("deployments", "delete", "other", "--yes")


@pytest.fixture
def tenant(cli: CommandLine) -> Iterator[str]:
    """A tenant of the test's own, gone afterwards with its keys."""
    cli("tenants", "create", "acme", "--requests-per-minute", "600", "--label", "tier=gold")
    yield "acme"
    for key in cli("keys", "list", "-o", "json").json["keys"]:
        if key["tenant"] == "acme":
            cli("keys", "revoke", key["metadata"]["name"], "--yes")
    cli("tenants", "delete", "acme", "--yes")


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", LISTS)
def test_list_says_the_same_in_every_format(cli: CommandLine, resource: str) -> None:
    narrow = cli(resource, "list").rows
    wide = cli(resource, "list", "-o", "wide").rows
    items = cli(resource, "list", "-o", "json").json[resource]
    assert cli(resource, "list", "-o", "yaml").yaml[resource] == items
    names = [item.get("metadata", item)["name"] for item in items]
    assert [row[0] for row in narrow] == [row[0] for row in wide] == names
    assert len(wide[0]) > len(narrow[0])
    assert [row[: len(narrow[0])] for row in wide] == narrow


@pytest.mark.parametrize("resource", [name for name in LISTS if name != "models"])
def test_show_is_an_entry_of_the_list(cli: CommandLine, resource: str) -> None:
    first = cli(resource, "list", "-o", "json").json[resource][0]
    name = first["metadata"]["name"]
    shown = cli(resource, "show", name, "-o", "json").json
    assert shown["metadata"] == first["metadata"]
    assert cli(resource, "show", name, "-o", "yaml").yaml == shown
    assert cli(resource, "show", name).out.startswith(f"name: {name}\n")


@pytest.mark.parametrize("resource", [*LISTS, "queue"])
def test_watch_tells_what_is_there(cli: CommandLine, resource: str) -> None:
    command = [resource] if resource == "queue" else [resource, "list"]
    with cli.process(*command, "--watch", "-o", "json") as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert found["deleted"] is False
    assert set(found) == {"deleted", resource.removesuffix("s")}
    assert (process.returncode, "Traceback" in errors) == (130, False)


def test_watch_tells_changes_and_deletions(cli: CommandLine) -> None:
    with cli.process("tenants", "list", "--watch") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("default\t")
        cli("tenants", "create", "fleeting")
        assert process.stdout.readline().startswith("fleeting\t")
        cli("tenants", "update", "fleeting", "--max-concurrency", "3")
        assert process.stdout.readline().split("\t")[3] == "3"
        cli("tenants", "delete", "fleeting", "--yes")
        assert process.stdout.readline() == "fleeting\tdeleted\n"


def test_watch_tells_replicas_of_deployments(cli: CommandLine, stack: Stack) -> None:
    with cli.process("deployments", "list", "--watch") as process:
        assert process.stdout is not None
        assert process.stdout.readline().split("\t")[3] == "2/2"
        cli("deployments", "scale", stack.model, "1", "--wait")
        until(process, lambda row: row[3] == "1/1")
        cli("deployments", "scale", stack.model, "2", "--wait")
        until(process, lambda row: row[3] == "2/2")


def until(process: subprocess.Popen[str], holds: Any) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if holds(line.split("\t")):
            return
    raise AssertionError("the watch ended")


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "reason", "step"),
    [
        (("nodes", "list", "--admin-key", "fw_x_y"), 5, "UNAUTHENTICATED", "--admin-key"),
        (("models", "list", "--admin-key", "fw_x_y"), 5, "UNAUTHENTICATED", "--admin-key"),
        (("complete", "x", "--api-key", "fw_x_y"), 5, "UNAUTHENTICATED", "--api-key"),
        (("nodes", "list", *AWAY), 6, "UNAVAILABLE", "fairway up"),
        (("events", "--watch", *AWAY), 6, "UNAVAILABLE", "fairway up"),
        (("tenants", "list", "--watch", *AWAY), 6, "UNAVAILABLE", "fairway up"),
        (("tenants", "show", "nobody"), 4, "NOT_FOUND", "list"),
        (("keys", "rotate", "nobody", "--yes"), 4, "NOT_FOUND", "list"),
        (("nodes", "drain", "nobody"), 4, "NOT_FOUND", "list"),
        (("models", "show", "nobody"), 4, "NOT_FOUND", "models list"),
        (("models", "delete", "fairway-tiny", "abcdef", "--yes"), 4, "NOT_FOUND", "models versions"),
        (("deployments", "create", "x", "--model", "nobody"), 4, "NOT_FOUND", "list"),
        (("complete", "x", "--model", "nobody"), 4, "MODEL_NOT_FOUND", "deployments list"),
        (("nodes", "delete", "worker-0", "--yes"), 4, "FAILED_PRECONDITION", "message"),
        (("tenants", "create", "default"), 4, "ALREADY_EXISTS", "update"),
        (("tenants", "create", "Not_A_Name"), 4, "INVALID_INPUT", "change the request"),
        (("tenants", "update", "default", "--etag", "1"), 4, "ETAG_MISMATCH", "show"),
        (("keys", "update", "local", "--etag", "1", "--no-expiry"), 4, "ETAG_MISMATCH", "show"),
        (("keys", "revoke", "local", "--etag", "1", "--yes"), 4, "ETAG_MISMATCH", "show"),
        (("deployments", "scale", "fairway-tiny", "1", "--etag", "1"), 4, "ETAG_MISMATCH", "show"),
        (("deployments", "delete", "fairway-tiny", "--etag", "1", "--yes"), 4, "ETAG_MISMATCH", "show"),
        (("nodes", "cordon", "worker-0", "--etag", "1"), 4, "ETAG_MISMATCH", "show"),
        (("nodes", "show"), 2, "USAGE", "fairway nodes show --help"),
        (("nodes", "lst"), 2, "USAGE", "fairway nodes --help"),
        (("nodes", "list", "-o", "xml"), 2, "USAGE", "fairway nodes list --help"),
        (("keys", "create", "x", "--expires", "soon"), 2, "USAGE", "fairway keys create --help"),
        (("deployments", "create", "x", "--selector", "gpu"), 2, "USAGE", "--help"),
        (("complete", "x", "--file", "nowhere"), 2, "USAGE", "--help"),
        (("complete", "--file", "nowhere"), 2, "FILE_UNREADABLE", "name a file"),
    ],
)
def test_error_has_its_code_its_reason_and_the_next_step(
    cli: CommandLine, arguments: tuple[str, ...], code: int, reason: str, step: str
) -> None:
    said = cli(*arguments, code=code)
    assert said.out == ""
    error, _, following = said.err.partition("next: ")
    assert error.startswith(f"error {reason}: ")
    assert step in following


def test_reader_that_goes_away_is_no_error(cli: CommandLine) -> None:
    with cli.process("events", "--watch") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        cli("tenants", "create", "noise")  # an event that nobody reads any more
        cli("tenants", "delete", "noise", "--yes")
        assert process.wait(timeout=PATIENCE_S) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


# --- changes -------------------------------------------------------------------------------------


def test_tenant_is_changed_field_by_field(cli: CommandLine, tenant: str) -> None:
    made = cli("tenants", "show", tenant, "-o", "json").json
    assert (made["requests_per_minute"], made["metadata"]["labels"]) == (600, {"tier": "gold"})
    update = ("--max-concurrency", "8", "--max-priority", "interactive", "--etag", made["metadata"]["etag"])
    changed = cli("tenants", "update", tenant, *update, "-o", "json").json
    assert (changed["max_concurrency"], changed["requests_per_minute"]) == (8, 600)
    assert changed["max_priority"] == "PRIORITY_INTERACTIVE"
    assert changed["metadata"]["labels"] == {"tier": "gold"}
    assert cli("tenants", "disable", tenant, "--yes").rows[0][4] == "disabled"
    assert cli("tenants", "enable", tenant, "-o", "yaml").yaml["disabled"] is False


def test_key_lives_from_creation_to_revocation(
    cli: CommandLine, other: str, tenant: str, stack: Stack
) -> None:
    scoped = ("--tenant", tenant, "--model", other, "--expires", "90d")
    first = cli("keys", "create", "ci", *scoped).out.strip()
    assert first.startswith("fw_ci_")
    complete = ("complete", "x = ", "--model", stack.model, "--max-tokens", "2")
    eventually(lambda: _refused_for_its_model(cli, *complete, "--api-key", first))
    cli("keys", "update", "ci", "--model", stack.model, "--no-expiry")
    eventually(lambda: cli(*complete, "--api-key", first))
    shown = cli("keys", "show", "ci", "-o", "json").json
    assert (shown["models"], shown.get("expire_time")) == ([stack.model], None)
    rotated = cli("keys", "rotate", "ci", "--grace", "1h", "-o", "json").json
    assert rotated["secret"] != first
    eventually(lambda: cli(*complete, "--api-key", rotated["secret"]))
    cli(*complete, "--api-key", first)
    assert cli("keys", "revoke", "ci", "--yes").out == "ci\n"
    eventually(lambda: cli(*complete, "--api-key", first, code=5))


def _refused_for_its_model(cli: CommandLine, *complete: str) -> None:
    assert "MODEL_NOT_FOUND" in cli(*complete, code=4).err


def eventually(holds: Any) -> None:
    """Return once ``holds`` no longer fails: gateways hear of keys a moment later."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            holds()
            return
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


def test_model_lives_from_publication_to_deletion(cli: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(bundled_checkpoint(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"name_of_the_copy": "second"}))
    published = cli("models", "publish", str(folder), "--name", "copy", "--tag", "v1")
    digest = published.out.strip()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert "uploading" in published.err
    again = cli("models", "publish", str(folder), "--name", "copy", "--tag", "", "-o", "json").json
    assert (again["digest"], again["created"], again["uploaded_chunks"]) == (digest, False, 0)
    listed = cli("models", "versions", "copy", "-o", "json").json["versions"]
    assert [(each["digest"], each["tags"]) for each in listed] == [(digest, ["v1"])]
    assert cli("models", "tag", "copy", digest[7:15], "stable", "-o", "json").json["digest"] == digest
    manifest = cli("models", "show", "copy", "stable", "-o", "yaml").yaml["manifest"]
    assert "model.safetensors" in {file["path"] for file in manifest["files"]}
    assert "FAILED_PRECONDITION" in cli("models", "delete", "copy", "v1", "--yes", code=4).err
    for tag in ("v1", "stable"):
        cli("models", "untag", "copy", tag, "--yes")
    assert cli("models", "delete", "copy", digest, "--yes", "-o", "json").json == {
        "name": digest,
        "deleted": True,
    }
    assert "copy" not in [row[0] for row in cli("models", "list").rows]
    garbage = cli("models", "collect-garbage", "--dry-run", "--older-than", "1ms", "-o", "json").json
    assert int(garbage["deleted_blobs"]) >= 1, "its config.json and its manifest"
    assert cli("models", "collect-garbage", "--yes").rows[0][:2] == ["deleted", "0"], "a day has not passed"
    assert "INVALID_INPUT" in cli("models", "collect-garbage", "--older-than", "1s", "--yes", code=4).err


def test_deployment_follows_a_tag_only_when_it_is_told_to(cli: CommandLine, tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        folder = tmp_path / str(number)
        shutil.copytree(bundled_checkpoint(), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"name_of_the_copy": f"moved {number}"}))
        digests.append(cli("models", "publish", str(folder), "--name", "moving").out.strip())
        if number == 0:
            cli("deployments", "create", "moving", "--replicas", "0")
    eventually(lambda: _version_of(cli, "moving", f"latest@{digests[0][7:19]} (tag moved)"))
    scaled = cli("deployments", "scale", "moving", "0", "-o", "json").json
    assert scaled["version_digest"] == digests[0]
    followed = cli("deployments", "update", "moving", "--version", "latest", "-o", "json").json
    assert followed["version_digest"] == digests[1]
    assert "FAILED_PRECONDITION" in cli("models", "delete", "moving", digests[1], "--yes", code=4).err
    cli("deployments", "delete", "moving", "--yes")


def _version_of(cli: CommandLine, name: str, version: str) -> None:
    (row,) = [row for row in cli("deployments", "list").rows if row[0] == name]
    assert row[2] == version


def test_deployment_that_cannot_be_placed_says_why_in_time(cli: CommandLine, stack: Stack) -> None:
    arguments = ("--model", stack.model, "--selector", "gpu=none", "--executor", "null")
    said = cli("deployments", "create", "extra", *arguments, "--wait", "--timeout", "1s", code=1)
    assert "NOT_READY_IN_TIME" in said.err
    assert "no worker for 1 replicas" in said.err
    row = cli("deployments", "list").rows[0]
    assert (row[0], row[3]) == ("extra", "0/1")
    updated = cli("deployments", "update", "extra", "--replicas", "0", "--wait", "-o", "json").json
    assert (updated["replicas"], updated["version_digest"].startswith("sha256:")) == (0, True)
    assert cli("deployments", "delete", "extra", "--yes", "-o", "json").json == {
        "name": "extra",
        "deleted": True,
    }


def test_node_is_drained_and_comes_back(cli: CommandLine, stack: Stack) -> None:
    assert cli("nodes", "cordon", "worker-1").rows[0][3] == "cordoned"
    late = cli("nodes", "drain", "worker-1", "--wait", "--timeout", "1s", code=1)
    assert "NOT_DRAINED_IN_TIME" in late.err  # its replica has nowhere to go
    cli("deployments", "scale", stack.model, "1", "--wait")
    drained = cli("nodes", "drain", "worker-1", "--wait", "-o", "json").json
    assert drained["drain"]["done"] is True
    assert drained["versions"] == []
    assert cli("nodes", "uncordon", "worker-1").rows[0][3] == "open"
    scaled = cli("deployments", "scale", stack.model, "2", "--wait")
    assert scaled.rows[0][3] == "2/2"
    assert "ready" in scaled.err


# --- what happens --------------------------------------------------------------------------------


def test_queue_names_pools_and_workers(cli: CommandLine, stack: Stack) -> None:
    assert [row[0] for row in cli("queue").rows] == [stack.model]
    (pool,) = cli("queue", "-o", "yaml").yaml["queues"]
    assert pool["deployments"] == [stack.model]
    assert pool["pool"]["serving_workers"] == 2


def test_workers_are_told_as_placements_see_them(cli: CommandLine, stack: Stack) -> None:
    narrow, wide = cli("workers").rows, cli("workers", "-o", "wide").rows
    items = cli("workers", "-o", "json").json["workers"]
    assert cli("workers", "-o", "yaml").yaml["workers"][0]["worker_id"] == items[0]["worker_id"]
    assert [row[0] for row in narrow] == [item["worker_id"] for item in items] == ["worker-0", "worker-1"]
    assert len(wide[0]) > len(narrow[0])
    assert {(item["state"], item["device_type"]) for item in items} == {("placed_on", "cpu")}
    for item in items:
        (pool,) = item["pools"]
        assert pool["ready"]
        assert int(pool["kv_tokens_room"]) <= int(pool["kv_tokens_total"])
    with cli.process("workers", "--watch", "-o", "json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["deleted"] is False
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def test_a_request_is_explained(cli: CommandLine, stack: Stack) -> None:
    request_id, answer_id = _completed(stack)
    assert answer_id == "cmpl-" + request_id
    (row,) = cli("explain", request_id).rows
    assert row[0] == "GRANTED"
    (decision,) = cli("explain", request_id, "-o", "json").json["decisions"]
    assert cli("explain", request_id, "-o", "yaml").yaml["decisions"] == [decision]
    assert (decision["tenant"], decision["model"]) == ("default", stack.model)
    assert decision["worker_id"] == row[3]
    ranked = {found["worker_id"] for found in decision["ranked"]}
    assert decision["worker_id"] in ranked
    assert {part["scorer"] for part in decision["ranked"][0]["parts"]} >= {"fast_ttft", "prefix_hit"}
    assert len(cli("explain", request_id, "-o", "wide").rows[0]) > len(row)
    assert cli("explain", answer_id, "-o", "json").json["decisions"] == [decision]
    assert {row[4] for row in cli("explain", _completed(stack, n=2)[1]).rows} == {"0", "1"}


def test_an_unknown_request_is_not_explained(cli: CommandLine) -> None:
    failed = cli("explain", "req_unknown", code=4)
    assert "NOT_FOUND" in failed.err
    assert "no record" in failed.err


def _completed(stack: Stack, n: int = 1) -> tuple[str, str]:
    """Return the ids of a request and of its answer."""
    body = {"model": stack.model, "prompt": "The tide", "max_tokens": 4, "n": n}
    request = urllib.request.Request(
        f"{stack.http}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.headers["x-request-id"]), str(json.load(answer)["id"])


def test_events_are_listed_and_followed(cli: CommandLine) -> None:
    cli("tenants", "create", "eventful")
    with cli.process("events", "--watch", "--resource", "eventful", "-o", "yaml") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("message"):
            lines.append(process.stdout.readline())
    (seen,) = yaml.safe_load_all("".join(lines))
    assert (seen["resource"], seen["kind"]) == ("eventful", "RESOURCE_KIND_TENANT")
    cli("tenants", "delete", "eventful", "--yes")
    eventually(lambda: _reasons(cli, ["TENANT_CREATED", "TENANT_DELETED"]))
    assert cli("events", "--since", "2099-01-01", "-o", "json").json == {"events": []}
    assert len(cli("events", "--limit", "1", "--kind", "node").rows) == 1


def _reasons(cli: CommandLine, expected: list[str]) -> None:
    found = cli("events", "--since", "10m", "--resource", "eventful", "-o", "json").json["events"]
    assert [event["reason"] for event in found][-2:] == expected


def test_an_input_in_quarantine_is_listed_and_lifted(cli: CommandLine, stack: Stack) -> None:
    served = cli("deployments", "show", stack.model, "-o", "json").json
    digest, fingerprint = served["version_digest"], "0f" * 16

    async def put() -> None:
        clock = SystemClock()
        store = EtcdStore((StateDir.at(stack.state).etcd_address,), clock)
        entry = Quarantined(digest, fingerprint, stack.model, 2, clock.unix_s() + 600)
        await store.commit([Put(quarantine_key(digest, fingerprint), dump(entry))])
        await store.close()

    asyncio.run(put())
    (row,) = cli("quarantine", "list", "--version", digest).rows
    assert row[:4] == [fingerprint, stack.model, digest, "2"]
    assert cli("quarantine", "lift", fingerprint[:8], "--yes").rows == [[fingerprint]]
    assert cli("quarantine", "list", "-o", "yaml").yaml == {"inputs": []}
    assert "is in quarantine" in cli("quarantine", "lift", fingerprint, "--yes", code=4).err
    eventually(lambda: _inputs_of_events(cli, stack.model, ["INPUT_QUARANTINED", "INPUT_RELEASED"]))


def _inputs_of_events(cli: CommandLine, model: str, expected: list[str]) -> None:
    found = cli("events", "--resource", model, "--since", "10m", "-o", "json").json["events"]
    assert [event["reason"] for event in found if event["reason"].startswith("INPUT_")] == expected


def test_what_gateways_measured_is_listed(cli: CommandLine, stack: Stack) -> None:
    def measured() -> list[dict[str, Any]]:
        return list(cli("slis", "--model", stack.model, "--tenant", "default", "-o", "json").json["slis"])

    def requests() -> int:
        return sum(int(one["requests"]) for one in measured())

    before, until_s = requests(), time.monotonic() + PATIENCE_S
    _completed(stack)
    while requests() <= before:
        assert time.monotonic() < until_s, measured()
        time.sleep(0.1)
    found = measured()
    series = max(found, key=lambda one: int(one["requests"]))
    assert 0 < series["ttft_p50_s"] <= series["ttft_p99_s"] < PATIENCE_S
    assert int(series["output_tokens"]) > 0
    assert series["device_s"] > 0
    assert "0 to 3600 s" in cli("slis", "--window", "61m", code=4).err
    assert cli("slis", "--tenant", "nobody").rows == []


def test_status_names_every_part(cli: CommandLine) -> None:
    parts = cli("status", "-o", "json").json["processes"]
    assert {"etcd", "redis", "gateway", "scheduler", "worker-0", "worker-1"} <= set(parts)
    assert set(cli("status", "--json").json["processes"]) == set(parts)
    found = cli("status", "-o", "yaml").yaml["processes"]
    for name, part in parts.items():  # the time passes
        assert found[name].pop("uptime_s") >= part.pop("uptime_s")
    assert found == parts
    assert {row[3] for row in cli("status").rows} == {"serving"}
    assert cli("status", "-o", "wide").rows[0][-1].endswith(".log")


# --- generation ----------------------------------------------------------------------------------

SEEDED = ("--seed", "7", "--max-tokens", "12")


def test_completion_is_the_same_whole_streamed_and_as_json(cli: CommandLine, tmp_path: Path) -> None:
    streamed = cli("complete", "def f(x):", *SEEDED)
    assert "12 output tokens" in streamed.err
    assert cli("complete", "def f(x):", "--no-stream", *SEEDED).out == streamed.out
    whole = cli("complete", "def f(x):", "--json", *SEEDED).json
    assert whole["text"] + "\n" == streamed.out
    assert whole["usage"]["output_tokens"] == 12
    assert whole["finish_reason"] == "length"
    assert whole["clock"]["decode_s"] > 0
    lines = cli("complete", "def f(x):", "--json", "--stream", *SEEDED).out.splitlines()
    assert (
        "".join(json.loads(line)["text"] for line in lines[:-1])
        == json.loads(lines[-1])["text"]
        == whole["text"]
    )
    (tmp_path / "prompt").write_text("def f(x):")
    assert cli("complete", "-f", str(tmp_path / "prompt"), *SEEDED).out == streamed.out
    with cli.process("complete", *SEEDED) as process:
        assert process.communicate("def f(x):", timeout=PATIENCE_S)[0] == streamed.out


def test_chat_through_pipes(cli: CommandLine, stack: Stack) -> None:
    lines = (
        "Write a loop.",
        "/help",
        "/model",
        "/model nobody",
        "/system Be brief.",
        "/nothing",
        "/reset",
        "Again.",
    )
    with cli.process("chat", *SEEDED) as process:
        answers, said = process.communicate("\n".join(lines) + "\n/quit\nnot said\n", timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert answers.strip()
    assert said.count("12 output tokens") == 2
    for text in (
        "/reset",
        f"* {stack.model}",
        "no model nobody",
        "no command /nothing",
        "conversation is empty",
    ):
        assert text in said


def test_chat_leaves_out_what_does_not_fit(cli: CommandLine, stack: Stack) -> None:
    question = "def function(value):" * 60
    with cli.process("chat", "--max-tokens", "8", "--seed", "1") as process:
        _, said = process.communicate(f"{question}\n" * 4, timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "messages are left out" in said


def test_interrupt_stops_the_answer_and_not_the_chat(cli: CommandLine, tmp_path: Path) -> None:
    schema = tmp_path / "long.json"
    schema.write_text(json.dumps({"type": "string", "pattern": "^(lo|ng|er){2000}$"}))
    with cli.process("chat", "--max-tokens", "900", "--schema", str(schema)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Write a very long module.\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate("/help\n/quit\n", timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "(stopped)" in said
    assert "/reset" in said


def test_interrupt_ends_a_completion(cli: CommandLine) -> None:
    # Its most likely tokens do not end: a drawn end would come before the interrupt now and then.
    with cli.process("complete", "x", "--max-tokens", "900", "--temperature", "0") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in said) == (130, False)


def test_the_audit_log_has_what_was_done_and_is_verified(
    cli: CommandLine, stack: Stack, tenant: str, tmp_path: Path
) -> None:
    wrong = urllib.request.Request(f"{stack.http}/v1/models", headers={"authorization": "Bearer wrong"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(wrong, timeout=10)

    def found(*arguments: str) -> list[Any]:
        entries: list[Any] = cli("audit", "list", *arguments, "-o", "json").json["entries"]
        return entries

    deadline = time.monotonic() + PATIENCE_S
    failed: list[Any] = []
    while not failed and time.monotonic() < deadline:
        failed = [one for one in found("--action", "GET /v1/models") if one["outcome"] == "UNAUTHENTICATED"]
        time.sleep(0.2)
    assert (failed[0]["source"], failed[0]["address"]) == ("gateway", "127.0.0.1")
    (created, *_) = found("--resource", tenant, "--action", "CreateTenant")
    assert (created["actor"], created["role"], created["outcome"]) == ("admin", "admin", "OK")
    assert found("--action", "CreateVersion", "--limit", "1")
    assert cli("audit", "verify", "-o", "json").json["entries"] > int(failed[0]["index"])
    folder = str(tmp_path / "log")
    cli("audit", "export", folder)
    key = (tmp_path / "log" / "verifier").read_text().strip()
    assert cli("audit", "verify", folder, "--key", key, "-o", "json").json["keys"] == [key]
    tiles = StateDir.at(stack.state).data("audit")
    assert cli("audit", "verify", str(tiles), "--key", key, "-o", "json").json["entries"]
