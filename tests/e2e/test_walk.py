"""The newcomer's walk in docs/architecture/README.md is the way of a real request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fairway.v1 import inference_pb2 as pb
from tests.support.stack import ROOT, Stack, metadata
from tests.support.waiting import until

PAGE = ROOT / "docs" / "architecture" / "README.md"
TRACER = ROOT / "tests" / "support" / "request_trace"
MAX_FILES = 45
PROMPT = "class Queue:\n    def push(self, item):\n" * 12


def walk() -> list[str]:
    """Return the files of the walk, in order."""
    section = PAGE.read_text().split("## A walk along one request\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    settings = {"REQUEST_TRACE_FOLDER": str(folder), "PYTHONPATH": str(TRACER)}
    state = tmp_path_factory.mktemp("walk") / "state"
    with Stack.started(state, workers=1, replicas=1, settings=settings) as running:
        yield running


def processes(folder: Path) -> list[int]:
    """Return the roles and the engine of the installation that writes there."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        environment = process.info["environ"] or {}
        is_service = any("services" in word for word in process.info["cmdline"] or [])
        if is_service and environment.get("REQUEST_TRACE_FOLDER") == str(folder):
            found.append(process.info["pid"])
    return found


async def generate(stack: Stack) -> None:
    key = metadata(stack.api_key)
    async with stack.inference() as stub:
        request = pb.GenerateRequest(
            generation=pb.Generation(model=stack.model, prompt=PROMPT, max_output_tokens=8)
        )
        events = [event async for event in stub.Generate(request, metadata=key, timeout=60)]
    assert events[-1].HasField("finished")


async def first_calls(folder: Path, work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Return when each process first called each function meanwhile, by ``file:name:process``."""
    pids = processes(folder)
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    await work()
    for pid in pids:
        os.kill(pid, signal.SIGURG)
    await until(lambda: len(list(folder.glob("*.json"))) == len(pids))
    found: dict[str, float] = {}
    for path in folder.glob("*.json"):
        times = json.loads(path.read_text())
        path.unlink()
        found |= {f"{name}:{path.stem}": at_s for name, at_s in times.items()}
    return found


async def test_a_request_passes_the_files_of_the_walk_in_their_order(traced: Stack, folder: Path) -> None:
    """Files that a timer or a probe may call first do not count. One request of a few has to match."""
    files = walk()
    assert 30 <= len(files) <= MAX_FILES
    await generate(traced)  # what is done once per process is done
    # Of the end of that request, a part may be in the first interval.
    idle = [await first_calls(folder, lambda: asyncio.sleep(2.0)) for _ in range(2)]
    timers = idle[0].keys() & idle[1].keys()
    order: list[str] = []
    for _ in range(20):
        first: dict[str, tuple[float, str]] = {}
        called = await first_calls(folder, lambda: generate(traced))
        assert set(files) <= {name.partition(":")[0] for name in called}
        for name, at_s in called.items():
            file = name.partition(":")[0]
            first[file] = min((at_s, name), first.get(file, (at_s, name)))
        compared = [file for file in files if first[file][1] not in timers]
        order = sorted(compared, key=first.__getitem__)
        if order == compared and len(compared) > len(files) - 6:
            return
    pytest.fail(f"no request had the order of the walk; the last one: {order}")
