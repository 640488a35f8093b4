"""A whole installation, brought up by its own command, with two workers and two replicas of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("fairway") / "state"
    with Stack.started(state, workers=2, replicas=2) as running:
        yield running


@pytest.fixture(scope="session")
def openai_python() -> str:
    """The interpreter of the environment that holds the OpenAI SDK; `make e2e-env` makes it."""
    python = ROOT / ".venv-openai" / "bin" / "python"
    if not python.exists():
        pytest.fail("the OpenAI SDK's environment is missing: run `make e2e-env`")
    return str(python)


def run_client(python: str, script: str, stack: Stack, *arguments: str) -> dict[str, object]:
    """Run a client script with the stack's endpoints; return the JSON of its last line."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [python, str(ROOT / "tests" / "e2e" / script), stack.http, stack.api_key, stack.model, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


__all__ = ["run_client", "stack", "sys"]
