"""The features of Claude Code: it edits a file, by calls of its own tools that a scripted model makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from harness import TARGET, Features, check, edits, program, same

FEATURES = Features()
SETTINGS = {
    "ANTHROPIC_BASE_URL": TARGET.url,
    "ANTHROPIC_MODEL": TARGET.scripted,
    "ANTHROPIC_SMALL_FAST_MODEL": TARGET.scripted,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "IS_SANDBOX": "1",
}


def asked(*options: str, key: str = TARGET.key, fails: bool = False) -> str:
    found = shutil.which("claude")
    check(found, "claude is not installed")
    # Its own link is made by a script of the package, which the installation leaves out.
    wrapper = Path(str(found)).resolve().parents[1] / "cli-wrapper.cjs"
    command = ["node", str(wrapper), "-p", "Replace one by two in notes.txt.", *options]
    command += ["--dangerously-skip-permissions"]
    return program(command, {**SETTINGS, "ANTHROPIC_AUTH_TOKEN": key}, fails=fails)


def ended(out: str) -> Any:
    found = json.loads(out.splitlines()[-1])
    check(not found["is_error"], found)
    return found


@FEATURES.shows("agent_edits")
def agent_edits() -> None:
    with edits() as answer:
        found = ended(asked("--output-format", "json"))
        same(found["result"], answer)
        check(found["num_turns"] >= 3, found["num_turns"])


@FEATURES.shows("agent_resumes")
def agent_resumes() -> None:
    """All turns so far are sent again, the calls of tools among them."""
    found = ended(asked("--continue", "--output-format", "stream-json", "--verbose"))
    check(found["result"], found)


@FEATURES.shows("error_401")
def error_401() -> None:
    found = json.loads(asked("--output-format", "json", key="fw_wrong", fails=True).splitlines()[-1])
    check(found["is_error"] and "401" in json.dumps(found), found)


FEATURES.run()
