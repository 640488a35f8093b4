"""The systems under load: Fairway's installation and worker, and the peers, each ready to answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from bench.batched.connections import Connection, Failed, GrpcStream, HttpConnection, http_request
from bench.batched.load import Target, closed_loop
from bench.batched.model import Rows
from bench.batched.peers.install import is_installed
from bench.batched.peers.servers import MODEL, PAD_TO
from bench.engines.peers.catalog import python_of
from bench.stack import free_port
from fairway.v1 import common_pb2, worker_pb2, worker_pb2_grpc

_STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_EXECUTE: Final = "/fairway.v1.WorkerService/Execute"
GATEWAYS: Final = 2
_READY_S: Final = 90.0
_ERROR_FIELD: Final = 0x0A  # error_message of ModelStreamInferResponse
_ROWS_FIELD: Final = 0x32  # rows of ExecuteResponse
_HEARTBEAT_FIELD: Final = 0x2A
_ANY_EPOCH: Final = 1 << 40
_ANY_REVISION: Final = 1 << 40


async def grpc_stream(
    port: int, path: str, metadata: Sequence[tuple[str, str]], on_failure: Callable[[str], None]
) -> GrpcStream:
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(lambda: GrpcStream(on_failure, path, metadata), "127.0.0.1", port)
    return made


def v2_answer(message: bytes) -> bool:
    """Return True for an answer. Raises Failed for an error."""
    if message[0] == _ERROR_FIELD:
        raise Failed(message[:300].decode(errors="replace"))
    return True


def v2_target(
    name: str,
    ports: Sequence[int],
    model: str,
    rows: Rows,
    metadata: Sequence[tuple[str, str]] = (),
    pids: Sequence[int] = (),
) -> Target:
    """Return servers of the public inference protocol. Connections are streams, to each server in turn."""
    turns = itertools.cycle(ports)

    async def connect(on_failure: Callable[[str], None]) -> Connection:
        return await grpc_stream(next(turns), _STREAM, metadata, on_failure)

    return Target(name, connect, rows.as_v2(model), v2_answer, pids)


def http_target(name: str, port: int, path: str, rows: Rows, pids: Sequence[int] = ()) -> Target:
    headers = (("Content-Type", "application/json"),)

    async def connect(on_failure: Callable[[str], None]) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: HttpConnection(on_failure), "127.0.0.1", port)
        return made

    requests = [http_request(path, body, headers) for body in rows.as_json()]
    return Target(name, connect, requests, lambda _: True, pids)


# --- Fairway --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installation:
    """A whole installation with one worker and two gateways."""

    state: Path
    endpoints: dict[str, Any]

    def fairway(self, *arguments: str, timeout_s: float = 180.0) -> str:
        command = [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(self.state)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def deploy(self, name: str, folder: Path) -> None:
        self.fairway("models", "publish", str(folder), "--name", name)
        self.fairway("deployments", "create", name, "--wait")

    def second_tenant(self) -> str:
        """Return the key of another tenant."""
        self.fairway("tenants", "create", "heavy")
        made = self.fairway("keys", "create", "heavy", "--tenant", "heavy", "--output", "json")
        found: dict[str, Any] = json.loads(made)
        return str(found["secret"])

    def path_target(
        self, model: str, rows: Rows, *, name: str = "path", api_key: str = "", gateways: int = 1
    ) -> Target:
        """Return the first gateways, by the public inference protocol, as a tenant with limits."""
        ports = [int(address.rpartition(":")[2]) for address in self.endpoints["gateways"][:gateways]]
        metadata = (("authorization", f"Bearer {api_key or self.endpoints['api_key']}"),)
        pids = tuple(self.endpoints["pids"].values())
        return v2_target(name, ports, model, rows, metadata, pids)

    def worker_target(self, rows: Rows, *, muxed: bool = False) -> Target:
        """Return the worker by its Execute stream: one per client, or one for all, as a gateway has it."""
        address, incarnation, digest, token = self._worker()
        port, metadata = int(address.rpartition(":")[2]), (("authorization", f"Bearer {token}"),)

        def message(handle: int, index: int) -> bytes:
            row = worker_pb2.StartRow(
                handle=handle, request_id=f"bench-{handle}-{index}", tenant_id="default",
                version_digest=digest,
                priority=common_pb2.PRIORITY_STANDARD, route_revision=_ANY_REVISION, incarnation=incarnation,
                epoch=_ANY_EPOCH, inputs=[rows.tensor(index)],
            )  # fmt: skip
            return worker_pb2.ExecuteRequest(rows=[row]).SerializeToString()

        async def connect(on_failure: Callable[[str], None]) -> GrpcStream:
            return await grpc_stream(port, _EXECUTE, metadata, on_failure)

        count, pids = len(rows.values), (self.endpoints["pids"]["worker-0"],)
        if muxed:
            shared = SharedStream(connect, message, count)
            numbers = [index.to_bytes(4, "big") for index in range(count)]
            return Target("worker_muxed", shared.connect, numbers, lambda _: True, pids)
        messages = [message(1, index) for index in range(count)]
        return Target("worker", connect, messages, _worker_answer, pids)

    def _worker(self) -> tuple[str, int, str, str]:
        """Return the address, the incarnation, the version and the internal token."""
        token = (self.state / "secrets" / "internal_token").read_text().strip()
        address = self.endpoints["workers"][0]
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            found = stub.GetWorker(
                worker_pb2.GetWorkerRequest(), metadata=(("authorization", f"Bearer {token}"),)
            )
        return address, found.incarnation, found.versions[0].version_digest, token


class SharedStream:
    """One Execute stream for all clients of a run; what they send in one turn of the loop is one message."""

    def __init__(
        self,
        connect: Callable[[Callable[[str], None]], Awaitable[GrpcStream]],
        message: Callable[[int, int], bytes],
        count: int,
    ) -> None:
        self._connect = connect
        self._message = message
        self._count = count
        self._stream: GrpcStream | None = None
        self._clients: dict[int, _Client] = {}
        self._outgoing: list[bytes] = []

    async def connect(self, on_failure: Callable[[str], None]) -> Connection:
        if not self._clients:
            self._stream = await self._connect(on_failure)
            self._stream.on_answer = self._answered
        handle = len(self._clients) + 1
        messages = [self._message(handle, index) for index in range(self._count)]
        self._clients[handle] = client = _Client(self, messages)
        return client

    def send(self, message: bytes) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        self._clients.clear()
        if self._stream is not None:
            self._stream.close()

    def _flush(self) -> None:
        assert self._stream is not None, "a client has connected"
        # A repeated field of two encoded messages, one after the other, is that of both.
        self._stream.send(b"".join(self._outgoing))
        self._outgoing.clear()

    def _answered(self, message: bytes) -> None:
        found = worker_pb2.ExecuteResponse.FromString(message)
        for row in found.rows:
            if (client := self._clients.get(row.handle)) is not None:
                client.on_answer(b"")


class _Client:
    """Implements ``Connection`` for one client of a shared stream. A message is a row's number."""

    def __init__(self, shared: SharedStream, messages: Sequence[bytes]) -> None:
        self._shared = shared
        self._messages = messages
        self.on_answer: Callable[[bytes], None] = lambda _: None

    def send(self, message: bytes) -> None:
        self._shared.send(self._messages[int.from_bytes(message, "big")])

    def close(self) -> None:
        self._shared.close()


def _worker_answer(message: bytes) -> bool:
    if message[0] == _ROWS_FIELD:
        return True
    if message[0] == _HEARTBEAT_FIELD:
        return False
    raise Failed(str(worker_pb2.ExecuteResponse.FromString(message)))


@contextlib.contextmanager
def installation(folder: Path, settings: Sequence[str] = ()) -> Iterator[Installation]:
    """Bring an installation up in ``folder``, and down again.

    Its tenant has rates that are never reached, so each request is counted.
    """
    state = folder / "state"
    made = Installation(state, {})
    given = [part for setting in settings for part in ("--set", setting)]
    # The benchmark's own clients take the place of a gateway at the worker, without a certificate.
    made.fairway("up", "--detach", "--no-model", "--insecure", "--gateways", str(GATEWAYS), *given)
    try:
        rates = ("--requests-per-minute", "10000000", "--tokens-per-minute", "2000000000")
        made.fairway("tenants", "update", "default", *rates)
        yield Installation(state, json.loads((state / "endpoints.json").read_text()))
    finally:
        made.fairway("down")


# --- peers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A fixed configuration of a peer. ``seconds``: how long a batch waits for more rows."""

    seconds: float
    batch: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that is installed below ``peers``."""

    name: str
    peers: Path

    @contextlib.contextmanager
    def serving(
        self, model: Path, window: Window, folder: Path, *, packed: bool = False
    ) -> Iterator[Callable[[Rows], Target]]:
        """Yield what makes its target, once it listens. Raises SystemExit."""
        if not is_installed(self.peers, self.name):
            raise SystemExit(f"{self.name} is not installed: make bench-batching-peers")
        port, grpc_port, metrics_port = free_port(), free_port(), free_port()
        command = [
            str(python_of(self.peers, self.name)), "-m", "bench.batched.peers.servers", self.name,
            "--model", str(model), "--port", str(port), "--grpc-port", str(grpc_port),
            "--metrics-port", str(metrics_port), "--batch", str(window.batch),
            "--window", str(window.seconds), *(["--packed"] if packed else []),
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path.cwd()),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        with (folder / f"{self.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            yield lambda rows: self._target(port, grpc_port, rows, process.pid)
        finally:
            _end_group(process)

    def _target(self, port: int, grpc_port: int, rows: Rows, pid: int) -> Target:
        if self.name == "triton":
            return v2_target(self.name, [grpc_port], MODEL, rows.padded(PAD_TO), pids=(pid,))
        path = "/predict" if self.name == "litserve" else "/"
        return http_target(self.name, port, path, rows, (pid,))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Return once the process and its group have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


async def until_ready(target: Target) -> None:
    """Return once it answers. Raises SystemExit."""
    deadline_s = time.monotonic() + _READY_S
    reason = ""
    while time.monotonic() < deadline_s:
        try:
            if (await closed_loop(target, connections=1, seconds=0.5, warm_s=0.0)).seconds:
                return
        except (Failed, OSError) as error:
            reason = str(error)
        await asyncio.sleep(0.5)
    raise SystemExit(f"{target.name} does not answer: {reason}")
