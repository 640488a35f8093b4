"""Every block of the client pages runs as it is, in the order of its page, beside a running installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

from tests.support import row_versions
from tests.support.stack import ROOT, Stack, fairway

PAGES: Final = (
    *("streaming", "structured-output", "tools", "responses-and-messages", "idempotency", "batches"),
    *("fixed-cost", "client"),
)
PATIENCE_S: Final = 240
# Runs blocks as `python -m asyncio` does: in one namespace, with await outside of functions.
RUNNER: Final = """
import ast, asyncio, inspect, json, sys
async def main():
    names = {"__name__": "__main__"}
    for block in json.load(sys.stdin):
        code = compile(block, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(code, names)
        if inspect.isawaitable(found):
            await found
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a checkout in which an installation with room for another replica runs."""
    found = tmp_path_factory.mktemp("pages")
    (found / "models").symlink_to(ROOT / "models")
    with Stack.started(found / ".fairway", workers=2, replicas=1, settings={"FAIRWAY_SHEDDING": "false"}):
        yield found


@pytest.fixture
def models(folder: Path, request: pytest.FixtureRequest) -> None:
    """The models that the page of fixed-cost models names."""
    if request.node.callspec.params["page"] != "fixed-cost":
        return
    state = ("--state-dir", str(folder / ".fairway"))
    for name, make in (
        ("minilm", row_versions.embedding_version),
        ("reranker", row_versions.reranker_version),
        ("emotion", row_versions.classifier_version),
        ("mlp", row_versions.mlp_version),
    ):
        fairway("models", "publish", str(make(folder / "own" / name)), "--name", name, *state)
        fairway("deployments", "create", name, "--wait", *state)


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return language and text of the blocks that can be run, in order."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_as_they_are(
    folder: Path, models: None, openai_python: str, page: str
) -> None:
    found = blocks_of(page)
    assert found, "the page has no block that can be pasted"
    own = str(Path(sys.executable).parent)
    environment = {"PATH": f"{own}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
    # Consecutive blocks of one interpreter are one session.
    for interpreter, group in groupby(found, key=lambda each: _interpreter(each[0], each[1], openai_python)):
        texts = [text for _, text in group]
        if interpreter == "bash":
            done = _run(["bash", "-euo", "pipefail"], "\n".join(texts), folder, environment)
        else:
            path = {"PYTHONPATH": str(ROOT)} if interpreter == sys.executable else {}
            done = _run([interpreter, "-c", RUNNER], json.dumps(texts), folder, environment | path)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), "the blocks print nothing"


def _interpreter(language: str, text: str, openai_python: str) -> str:
    if language == "sh":
        return "bash"
    public = re.search(r"^(?:from|import) (?:openai|anthropic|tritonclient)", text, re.MULTILINE)
    return openai_python if public else sys.executable


def _run(
    command: list[str], text: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=PATIENCE_S,
    )
