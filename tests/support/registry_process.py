"""A registry as a process of its own, and a proxy before it that counts bytes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairway.cli import embedded
from services.adapters.etcd.store import EtcdStore
from services.core.records import KEYS, ApiKey, KeyRole, Meta, dump
from services.ports.store import Put
from services.rpc.channel import auth_metadata
from services.runtime import secrets
from services.runtime.clock import SystemClock
from tests.support import local_servers
from tests.tidy.sources import ROOT

TOKEN: Final = "t" * 40
SILENT: Final = ("sh", "-c", 'exec "$@" >&- 2>&-', "sh")
# Printed by the child: gRPC's threads make it unsafe to run anything between a fork and an exec.
_PROGRAM: Final = """
import runpy, sys
from tests.support import local_servers
local_servers.die_with_parent()
sys.argv = ["services", "registry"]
runpy.run_module("services", run_name="__main__")
"""


class RegistryProcess:
    """It can be killed and started again, on the same port and with the same state."""

    def __init__(self, folder: Path, etcd: str, environment: Mapping[str, str]) -> None:
        self.port = local_servers.free_port()
        self.blobs = folder / "blobs"
        self._folder = folder
        self._etcd = etcd
        self._process: subprocess.Popen[bytes] | None = None
        self.output: int | None = None  # the descriptor that it writes its log to; None: a file of its own
        self.silent = False  # it begins without stdout and stderr
        self.admin: tuple[tuple[str, str], ...] = ()
        (folder / "token").write_text(TOKEN)
        (folder / "ticket").write_text("k" * 40)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAIRWAY_")},
            "FAIRWAY_ETCD_ENDPOINTS": etcd,
            "FAIRWAY_LISTEN": f"{embedded.LOOPBACK}:{self.port}",
            "FAIRWAY_METRICS_LISTEN": f"{embedded.LOOPBACK}:{local_servers.free_port()}",
            "FAIRWAY_STATE_DIR": str(folder),
            "FAIRWAY_INTERNAL_TOKEN_FILE": str(folder / "token"),
            "FAIRWAY_TICKET_KEY_FILE": str(folder / "ticket"),
            **environment,
        }

    @property
    def address(self) -> str:
        return f"{embedded.LOOPBACK}:{self.port}"

    @property
    def metrics(self) -> str:
        return self._environment["FAIRWAY_METRICS_LISTEN"]

    def start(self) -> None:
        """Return once it serves. Blocks."""
        self._launch()
        self._wait()

    async def start_beside(self) -> None:
        """The same while the loop goes on. The process ends with the thread that launches it: this one."""
        self._launch()
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + 100
        while not self._is_serving():
            assert time.monotonic() < deadline_s, "the registry does not start"
            assert self._process.poll() is None, (self._folder / "registry.log").read_text()[-2000:]
            time.sleep(0.05)

    def _launch(self) -> None:
        with (self._folder / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*(SILENT if self.silent else ()), sys.executable, "-c", _PROGRAM],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log if self.output is None else self.output,
                stderr=log if self.output is None else self.output,
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def stop(self) -> int:
        """SIGTERM; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(timeout=60)
        self._process = None
        return code

    async def make_admin(self) -> None:
        """Put an administrator's key into the store; before the start, so that the registry loads it."""
        name = f"registry-{self.port}"
        text, hashed = secrets.new_key(name, secrets.new_secret())
        store = EtcdStore((self._etcd,), SystemClock())
        try:
            await store.commit([Put(KEYS + name, dump(ApiKey(Meta(name), KeyRole.ADMIN, hashed)))])
        finally:
            await store.close()
        self.admin = auth_metadata(text)

    def _is_serving(self) -> bool:
        with suppress(grpc.RpcError), grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False


class CountingProxy:
    """Bytes that passed since ``reset``: ``up`` to the target, ``down`` from it."""

    def __init__(self, target: str) -> None:
        self.up = self.down = 0
        self.address = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()

    def reset(self) -> None:
        self.up = self.down = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CountingProxy]:
        server = await asyncio.start_server(self._serve, embedded.LOOPBACK, 0)
        self.address = f"{embedded.LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError):
                target = await asyncio.open_connection(self._host, self._port)
                await asyncio.gather(
                    self._pump(reader, target[1], True), self._pump(target[0], writer, False)
                )
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_up: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if is_up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                sink.write(data)
                await sink.drain()
        except OSError:
            return
        finally:
            sink.close()
