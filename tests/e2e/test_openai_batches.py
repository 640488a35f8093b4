"""Files and batches by the OpenAI SDK, unchanged, and by the command line, against a whole installation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.stack import Stack

CLIENT = Path(__file__).with_name("openai_batches.py")


@pytest.fixture(scope="module")
def found(openai_python: str, stack: Stack) -> Any:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [openai_python, str(CLIENT), stack.http, stack.api_key, stack.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_batch_of_chats_answers_as_chats_do(found: Any) -> None:
    chat = found["chat"]
    assert chat["status"] == "completed"
    assert chat["counts"] == {"total": 8, "completed": 7, "failed": 1}
    assert chat["ids"] == ["0", "1", "2", "4", "5", "6", "7"]
    assert chat["failed"] == [["3", 404]]
    assert chat["same"], "a line's answer is that of the same request"
    assert chat["metadata"] == {"team": "search"}
    assert chat["listed"]
    assert chat["purposes"] == ["batch", "batch_output"]


def test_what_is_wrong_is_refused_by_name(found: Any) -> None:
    refused = found["refused"]
    assert (refused["status"], refused["line"]) == ("failed", 2)
    assert refused["read"] == "{}\n"
    assert (refused["gone"], refused["purpose"], refused["endpoint"]) == (404, 400, 400)


def test_a_cancelled_batch_has_a_result_for_each_line(found: Any) -> None:
    cancelled = found["cancelled"]
    assert cancelled["status"] == "cancelled"
    counts = cancelled["counts"]
    assert counts["total"] in (0, counts["completed"] + counts["failed"])


def test_the_command_line_runs_a_batch(stack: Stack, tmp_path: Path) -> None:
    cli = CommandLine(stack.state)
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": stack.model, "prompt": "x", "max_tokens": 2},
        }
        for number in range(5)
    ]
    file = tmp_path / "lines of mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    batch = json.loads(
        cli("batches", "create", str(file), "--endpoint", "/v1/completions", "--wait", "-o", "json").out
    )
    assert batch["status"] == "completed"
    answers = [json.loads(line) for line in cli("batches", "results", batch["id"]).out.splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2", "3", "4"]
    assert batch["id"] in cli("batches", "list").out
    assert "5/5" in cli("batches", "show", batch["id"]).out
