"""An installation under test: its endpoints, its processes, and what its workers hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from fairway.cli.calls import credentials_of
from fairway.client.endpoints import open_channel
from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support import installations, local_servers

ROOT = Path(__file__).parents[2]


def fairway(
    *arguments: str, timeout_s: float = 300, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line. Raises AssertionError with its output when it fails."""
    if arguments[0] == "up":
        installations.check_start()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
    environment |= settings or {}
    done = subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, f"fairway {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    return done


def up_on_free_ports(options: Sequence[str], settings: Mapping[str, str] | None) -> None:
    """Bring an installation up; again when another process took a port that was free a moment before."""
    own = {"--model", "--model-dir", "--no-model"} & {*options}
    model = () if own else ("--model", "tiny")  # nothing is downloaded
    for attempt in range(3):
        ports = ("--http-port", str(local_servers.free_port()), "--grpc-port", str(local_servers.free_port()))
        try:
            fairway("up", "--detach", *model, *ports, *options, settings=settings)
        except AssertionError as error:
            if attempt == 2 or "is taken" not in str(error):
                raise
        else:
            return


def role_channel(
    endpoints: Mapping[str, Any], address: str, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Return a channel to a server of the roles in an installation's endpoints.json."""
    return open_channel(address, role_credentials(endpoints), options)


def role_credentials(endpoints: Mapping[str, Any]) -> grpc.ChannelCredentials | None:
    """Return the operator's certificate of an installation; None if it runs without TLS."""
    return credentials_of(Path(endpoints["tls_dir"]) if endpoints["tls_dir"] else None)


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@dataclass(frozen=True, slots=True)
class Stack:
    state: Path
    endpoints: dict[str, Any]

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        state: Path,
        *,
        workers: int,
        replicas: int,
        gateways: int = 1,
        settings: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Iterator[Stack]:
        """Bring it up, with FAIRWAY_ variables for all roles; check on the way out that nothing is left.

        ``options`` are more of those of ``fairway up``. The ports are not those that it prefers: another
        installation may start at the same time.
        """
        sizes = ("--workers", str(workers), "--replicas", str(replicas), "--gateways", str(gateways))
        up_on_free_ports(["--state-dir", str(state), *sizes, *options], settings)
        try:
            yield cls(state, json.loads((state / "endpoints.json").read_text()))
        finally:
            fairway("down", "--state-dir", str(state))
            assert processes(state) == [], "processes were left behind"

    @property
    def http(self) -> str:
        return str(self.endpoints["http"])

    @property
    def api_key(self) -> str:
        return str(self.endpoints["api_key"])

    @property
    def model(self) -> str:
        return str(self.endpoints["model"])

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The operator's certificate, for an AdminClient."""
        return role_credentials(self.endpoints)

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """Return a channel to a role's server, with the operator's certificate. The caller closes it."""
        return role_channel(self.endpoints, address, options)

    @contextlib.asynccontextmanager
    async def inference(self) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
        async with grpc.aio.insecure_channel(self.endpoints["grpc"]) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    async def workers(self) -> dict[str, worker_pb2.GetWorkerResponse]:
        """Return each live worker's own report."""
        admin = metadata(self.endpoints["admin_key"])
        found = {}
        async with self.channel(self.endpoints["controlplane"]) as channel:
            nodes = await controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListNodes(
                controlplane_pb2.ListNodesRequest(), metadata=admin, timeout=5
            )
        for node in nodes.nodes:
            if not node.address:
                continue
            async with self.channel(node.address) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                found[node.metadata.name] = await stub.GetWorker(
                    worker_pb2.GetWorkerRequest(), metadata=admin, timeout=5
                )
        return found

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once every role serves: one that a test killed is started again."""
        deadline_s = time.monotonic() + timeout_s
        left = dict(self.endpoints["metrics"])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while left:
            assert time.monotonic() < deadline_s, f"not ready within {timeout_s:g} s: {sorted(left)}"
            for name, address in tuple(left.items()):
                with contextlib.suppress(OSError), opener.open(f"http://{address}/readyz", timeout=5):
                    del left[name]
            time.sleep(0.1 if left else 0.0)

    async def wait_workers(
        self, holds: Callable[[dict[str, worker_pb2.GetWorkerResponse]], bool], timeout_s: float
    ) -> dict[str, worker_pb2.GetWorkerResponse]:
        """Return the workers' state once it satisfies ``holds``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        last: object = None
        while loop.time() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):
                last = state = await self.workers()
                if holds(state):
                    return state
            await asyncio.sleep(0.1)
        raise AssertionError(f"the workers did not come to the awaited state in {timeout_s} s: {last}")

    def pids(self, *fragments: str) -> list[int]:
        """Return the processes of this installation whose command line has every fragment."""
        return [
            process.pid
            for process in processes(self.state)
            if all(fragment in " ".join(process.info["cmdline"]) for fragment in fragments)
        ]

    def worker_pid(self, worker_id: str) -> int:
        for process in processes(self.state):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FAIRWAY_WORKER_ID") == worker_id and "services worker" in " ".join(
                    process.info["cmdline"]
                ):
                    return int(process.pid)
        raise AssertionError(f"no process of {worker_id}")


def processes(state: Path) -> list[psutil.Process]:
    """Return every live process that belongs to the installation in ``state``."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            text = " ".join(process.info["cmdline"] or ())
            if str(state) in text or process.environ().get("FAIRWAY_STATE_DIR", "").startswith(str(state)):
                found.append(process)
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def at_rest(state: dict[str, worker_pb2.GetWorkerResponse], workers: int = 2) -> bool:
    """Every worker has its version READY and holds nothing."""
    versions = [version for worker in state.values() for version in worker.versions]
    return (
        len(state) == workers
        and len(versions) == workers
        and all(
            version.state == worker_pb2.VERSION_STATE_READY
            and not (
                version.kv_blocks_reserved or version.kv_blocks_used or version.running or version.waiting
            )
            for version in versions
        )
    )
