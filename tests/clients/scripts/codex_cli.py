"""The features of Codex: the program edits a file, by a call of its shell that a scripted model makes."""

from __future__ import annotations

import json
from typing import Any

from harness import TARGET, Features, check, edits, program, same

FEATURES = Features()
PROVIDER = {
    "model": TARGET.scripted,
    "model_provider": "fairway",
    "check_for_update_on_startup": False,
    "analytics.enabled": False,
    "model_providers.fairway.name": "Fairway",
    "model_providers.fairway.base_url": TARGET.v1,
    "model_providers.fairway.env_key": "FAIRWAY_KEY",
    "model_providers.fairway.wire_api": "responses",
    "model_providers.fairway.request_max_retries": 0,
    "model_providers.fairway.stream_max_retries": 0,
}


def asked(*options: str, key: str = TARGET.key, fails: bool = False) -> list[Any]:
    """Return the events that it prints."""
    settings = [part for name, value in PROVIDER.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    command = ["codex", "exec", *settings, "--skip-git-repo-check", "--json"]
    command += ["--dangerously-bypass-approvals-and-sandbox", *options, "Replace one by two in notes.txt."]
    out = program(command, {"FAIRWAY_KEY": key}, fails=fails)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def items(events: list[Any], kind: str) -> list[Any]:
    found = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in found if item["type"] == kind]


@FEATURES.shows("agent_edits")
def agent_edits() -> None:
    with edits() as answer:
        found = asked()
        same([item["exit_code"] for item in items(found, "command_execution")], [0])
        same([item["text"] for item in items(found, "agent_message")], [answer])


@FEATURES.shows("agent_resumes")
def agent_resumes() -> None:
    """All turns so far are sent again, the calls of tools among them."""
    found = asked("resume", "--last")
    check(items(found, "agent_message"), found)


@FEATURES.shows("error_401")
def error_401() -> None:
    found = asked(key="fw_wrong", fails=True)
    check("401" in json.dumps(found), found)


FEATURES.run()
