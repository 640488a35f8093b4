"""A log that takes no more lines is no outage: roles serve, the supervisor restarts, and space heals it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from fairway.cli.fleet.record import FleetRecord, ProcessId
from fairway.cli.state import StateDir
from fairway.log_stream import PIPE_BYTES
from fairway.v1 import controlplane_pb2, controlplane_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.support.registry_process import RegistryProcess
from tests.support.stack import Stack, fairway, metadata
from tests.support.tiny_disk import fill, tiny_disk

DISK_BYTES = 1024 * 1024
REFUSED = 300  # calls that are refused, each with a line in the log
TAKEN = 64  # lines at most that the last block of a log's file takes when the disk is full
LOST = "fairway_runtime_log_lines_lost_total"


def lost_lines(metrics: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{metrics}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    return next(int(float(line.split()[1])) for line in page.splitlines() if line.startswith(f"{LOST} "))


@contextlib.contextmanager
def nowhere(kind: str) -> Iterator[int | None]:
    """A descriptor that takes no line, or none at all."""
    if kind == "closed":
        yield None
        return
    receive, send = os.pipe()
    if kind == "full disk":
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), send)
    elif kind == "reader gone":
        os.close(receive)
    else:
        fcntl.fcntl(send, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # or the role does, and has room again
        os.set_blocking(send, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(send, bytes(65536)):
                pass
        os.set_blocking(send, True)
    yield send
    os.close(send)
    if kind != "reader gone":
        os.close(receive)


@pytest.mark.parametrize("kind", ["full disk", "closed", "reader gone", "stuck reader"])
async def test_role_serves_and_drains_while_its_log_takes_no_line(
    kind: str, etcd_endpoint: str, tmp_path: Path
) -> None:
    registry = RegistryProcess(tmp_path, etcd_endpoint, {})
    await registry.make_admin()
    registry.silent = kind == "closed"
    with nowhere(kind) as registry.output:
        try:
            await registry.start_beside()
            async with grpc.aio.insecure_channel(registry.address) as channel:
                stub = registry_pb2_grpc.RegistryServiceStub(channel)
                slowest_s = 0.0
                for number in range(REFUSED):
                    began_s = time.monotonic()
                    request = registry_pb2.GetVersionRequest(model=f"none-{number}", version="latest")
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.GetVersion(request, metadata=registry.admin, timeout=10)
                    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
            assert slowest_s < 2.0
            assert await asyncio.to_thread(lost_lines, registry.metrics) >= REFUSED
            assert await asyncio.to_thread(registry.stop) == 0
        finally:
            registry.kill()


def fill_up(state: StateDir) -> Path:
    """Leave no byte free, in the last page of no log either; return the file that takes the room."""
    filler = fill(state.logs)
    for path in state.logs.glob("*.log"):
        with path.open("ab", buffering=0) as log, contextlib.suppress(OSError):
            while log.write(b"\n"):
                pass
    return filler


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.2)


async def be_refused(stack: Stack, count: int) -> None:
    async with stack.channel(stack.endpoints["controlplane"]) as channel:
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
        for _ in range(count):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetKey(
                    controlplane_pb2.GetKeyRequest(name="none"),
                    metadata=metadata(stack.endpoints["admin_key"]),
                    timeout=10,
                )
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_installation_outlives_its_full_log_disk(tmp_path: Path, installations: None) -> None:
    state = StateDir.at(tmp_path / "installation")
    with tiny_disk(state.logs, DISK_BYTES), up(state) as stack:

        def children() -> dict[str, ProcessId]:
            record = FleetRecord.load(state.fleet)
            assert record is not None
            return dict(record.children)

        def restarted(before: ProcessId, name: str) -> bool:
            status = json.loads(fairway_status(state))
            parts = status["processes"]
            return parts[name]["pid"] != before.pid and all(p["status"] == "serving" for p in parts.values())

        first = children()
        filler = fill_up(state)
        asyncio.run(be_refused(stack, REFUSED + TAKEN))
        control_plane = stack.endpoints["metrics"]["controlplane"]
        lost = lost_lines(control_plane)
        assert lost >= REFUSED
        for victim in ("scheduler", "worker-0"):
            before = children()[victim]
            os.kill(before.pid, signal.SIGKILL)
            until(lambda before=before, victim=victim: restarted(before, victim))  # type: ignore[misc]
        unhurt = children().keys() - {"scheduler", "worker-0"}
        assert {name: children()[name] for name in unhurt} == {name: first[name] for name in unhurt}

        filler.unlink()
        asyncio.run(be_refused(stack, 1))
        lines = [line for line in state.log("controlplane").read_text().splitlines() if line]
        notice, refused = json.loads(lines[-2]), json.loads(lines[-1])
        assert (notice["event"], refused["event"]) == ("log.lines_lost", "rpc.rejected")
        assert notice["lines"] == lost_lines(control_plane) >= lost
        before = children()["scheduler"]
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: restarted(before, "scheduler"))
        told = state.log("supervisor").read_text()
        assert "lines were lost here" in told
        assert (
            "scheduler       restarting  it was ended by SIGKILL" in told.partition("lines were lost here")[2]
        )


@contextlib.contextmanager
def up(state: StateDir) -> Iterator[Stack]:
    with Stack.started(state.root, workers=1, replicas=1, options=("--no-model",)) as stack:
        yield stack


def fairway_status(state: StateDir) -> str:
    """Return what `fairway status` writes; while a part does not serve, none serves."""
    try:
        return fairway("status", "--json", "--state-dir", str(state.root)).stdout
    except AssertionError:
        record = FleetRecord.load(state.fleet)
        names = record.children if record is not None else {}
        return json.dumps({"processes": {name: {"pid": 0, "status": "silent"} for name in names}})
