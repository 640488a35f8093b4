"""A newcomer's first hour: README and client pages, as written, in a fresh clone with nothing installed.

`make up` installs, downloads SmolLM2 and serves it. Every block of README and pages then runs as it is, in
its order, beside that installation.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

from tests.support import row_versions
from tests.support.stack import ROOT, processes
from tests.unit.importing.test_hostile_gguf import Content

PAGES: Final = (
    *("streaming", "structured-output", "tools", "responses-and-messages", "idempotency", "batches"),
    *("fixed-cost", "client"),
)
PATIENCE_S: Final = 600
# Models that the page of fixed-cost models asks its reader to bring.
OWN: Final[tuple[tuple[str, Callable[[Path], Path]], ...]] = (
    ("reranker", row_versions.reranker_version),
    ("emotion", row_versions.classifier_version),
    ("mlp", row_versions.mlp_version),
)
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


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return language and text of the blocks that can be run, in order."""
    return re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def clone(folder: Path) -> Path:
    """Copy the files that git tracks, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@contextlib.contextmanager
def in_front(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run a command that stays in front; yield what it printed once it has said how to stop it."""
    log = folder.parent / "in_front.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, shell=True, cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while not re.search(r"^\s+stop ", log.read_text(), re.MULTILINE):
            assert process.poll() is None, f"{command} ended:\n{log.read_text()}"
            time.sleep(0.2)
        yield log.read_text()
    finally:
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def shell(text: str, folder: Path, environment: dict[str, str], answers: str = "") -> str:
    """Run the text in bash until its first failure; return what it printed. Raises AssertionError."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", dir=folder.parent) as script:
        script.write(text)
        script.flush()
        return ran(["bash", "-eo", "pipefail", script.name], answers, folder, environment)


def ran(command: list[str], text: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=folder, env=environment, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{text[:2000]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_page(page: Path, folder: Path, environment: dict[str, str], sdk_python: str) -> None:
    """Run the page's blocks; consecutive ones of one interpreter are one session. Raises AssertionError."""
    found = blocks_of(page)
    assert found, "the page has no block that can be pasted"

    def interpreter(block: tuple[str, str]) -> str:
        language, text = block
        if language == "sh":
            return "bash"
        public = re.search(r"^(?:from|import) (?:openai|anthropic|tritonclient)", text, re.MULTILINE)
        return sdk_python if public else str(folder / ".venv" / "bin" / "python")

    for program, group in groupby(found, key=interpreter):
        texts = [text for _, text in group]
        if program == "bash":
            printed = shell("\n".join(texts), folder, environment)
        else:
            printed = ran([program, "-c", RUNNER], json.dumps(texts), folder, environment)
        assert printed.strip(), f"these print nothing: {texts}"


@pytest.mark.timeout(3600)
def test_readme_and_client_pages_as_written(tmp_path: Path, openai_python: str, installations: None) -> None:
    faulthandler.cancel_dump_traceback_later()  # an installation takes minutes beside other tests
    folder = clone(tmp_path / "fairway")
    passed_on = ("PATH", "HOME", "LANG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
    environment = {name: os.environ[name] for name in passed_on if name in os.environ}
    start, stop = [line.split("#")[0] for line in blocks_of(folder / "README.md")[0][1].splitlines()]
    rest = [text for _, text in blocks_of(folder / "README.md")[1:]]
    Content().write(_folder(folder / "path" / "to") / "model.gguf")
    with in_front(start, folder, environment) as printed:
        try:
            assert "smollm2" in printed
            # Both blocks are one shell; the chat of the last one reads its question from the input.
            shown = shell("\n".join(rest), folder, environment, "What is the capital of France?\n")
            streamed, _, chatted = shown.rpartition("[DONE]")
            assert "chat.completion.chunk" in streamed, shown
            # What a model of this size answers is drawn; tests/smollm2 has the greedy answer.
            assert len(chatted.split()) > 2, shown
            path = {"PATH": f"{folder / '.venv' / 'bin'}:{environment['PATH']}"}
            for name, make in OWN:
                publish = f"fairway models publish {make(tmp_path / name)} --name {name}"
                shell(f"{publish}\nfairway deployments create {name} --wait", folder, environment | path)
            failed = {}
            for page in PAGES:
                try:
                    run_page(folder / "docs" / f"{page}.md", folder, environment | path, openai_python)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failed[page] = str(error)
            assert not failed, "\n\n".join(f"{page}: {text}" for page, text in failed.items())
        finally:
            shell(stop, folder, environment)
    assert processes(folder / ".fairway") == []


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
