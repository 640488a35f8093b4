"""Which files of the product a real request runs: an installation whose processes record their calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil

from fairway.v1 import inference_pb2 as pb
from tests.support.stack import ROOT, Stack, metadata
from tests.support.waiting import until

TRACER = ROOT / "tests" / "support" / "request_trace"
PROMPT = "class Queue:\n    def push(self, item):\n" * 12
IDLE_INTERVALS = 3
IDLE_S = 2.0


@contextlib.contextmanager
def traced_stack(state: Path, folder: Path) -> Iterator[Stack]:
    """Start an installation that writes its calls below the folder."""
    settings = {"REQUEST_TRACE_FOLDER": str(folder), "PYTHONPATH": str(TRACER)}
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
    """Run one Generate without an idempotency key over gRPC."""
    key = metadata(stack.api_key)
    async with stack.inference() as stub:
        request = pb.GenerateRequest(
            generation=pb.Generation(model=stack.model, prompt=PROMPT, max_output_tokens=8)
        )
        events = [event async for event in stub.Generate(request, metadata=key, timeout=60)]
    assert events[-1].HasField("finished")


async def stream_http(stack: Stack) -> None:
    """Stream one completion over HTTP."""
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"{stack.http}/v1/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
    )
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
    assert answer.endswith(b"[DONE]\n\n")


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


async def files_of(folder: Path, work: Callable[[], Awaitable[None]]) -> set[str]:
    """Return the files of ``services`` that run meanwhile and in none of some idle intervals."""
    await work()  # what is done once per process is done
    await asyncio.sleep(IDLE_S)
    idle = [await first_calls(folder, lambda: asyncio.sleep(IDLE_S)) for _ in range(IDLE_INTERVALS)]
    called = await first_calls(folder, work)
    files, others = ({name.partition(":")[0] for name in names} for names in (called, set().union(*idle)))
    return {file for file in files - others if file.startswith("services/")}


def count_files() -> dict[str, float | None]:
    """Return the figures of ``make house`` that take an installation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "calls")
        folder.mkdir()
        with traced_stack(Path(name, "state"), folder) as stack:
            generated = asyncio.run(files_of(folder, lambda: generate(stack)))
            streamed = asyncio.run(files_of(folder, lambda: stream_http(stack)))
    return {"files_per_generate": len(generated), "files_per_http_stream": len(streamed)}
