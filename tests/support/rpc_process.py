"""A server as the roles build it, in a process of its own: its memory and its pauses can be measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairway.cli.authority import Authority
from fairway.client import tls_credentials
from fairway.client.endpoints import open_channel
from fairway.v1 import inference_pb2, inference_pb2_grpc
from tests.support.certificates import issued
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
KEY = (("authorization", "Bearer tenant-key"),)
INTERNAL = "i" * 32
MIB = 1024 * 1024
# As ``python -m services`` does: grpc reads its environment when it is imported.
_START = "from services.runtime.process import grpc_environment as grpc; grpc.prepare(); "
_START += "from tests.support.rpc_process import main; main()"
TLS: Final = "TEST_TLS_DIR"  # variable with the folder of the certificates of such a process


@dataclass
class RpcProcess:
    process: psutil.Process
    port: int
    metrics_port: int
    log: Path
    credentials: grpc.ChannelCredentials | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self) -> Any:
        return open_channel(self.address, self.credentials, (("grpc.max_send_message_length", -1),))

    def peak_mib(self) -> float:
        """The most that was resident at any time; what is resident, where the system does not report it."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        peaks = [float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")]
        return peaks[0] if peaks else self.rss_mib()

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss) / MIB

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, certificates: Authority | None = None) -> Iterator[RpcProcess]:
        """With ``certificates``, its ports have TLS, and ``credentials`` are those of an operator."""
        variables, credentials = {}, None
        if certificates is not None:
            variables[TLS] = str(issued(certificates, "worker").folder)
            credentials = tls_credentials(issued(certificates, "operator").folder)
        log = folder / "server.log"
        with log.open("wb") as lines:
            child = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdout=subprocess.PIPE,
                stderr=lines,
                cwd=ROOT,
                env=variables
                | {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")},
            )
            try:
                assert child.stdout is not None
                port, metrics_port = map(int, child.stdout.readline().split())
                yield cls(psutil.Process(child.pid), port, metrics_port, log, credentials)
                assert child.poll() is None, log.read_text()
            finally:
                child.kill()
                child.communicate()


@dataclass
class Canary:
    """Waits of probes and of an authenticated caller under load; the probe uses new connections."""

    waits_s: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    refusals: int = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def beside(
        cls, address: str, credentials: grpc.ChannelCredentials | None = None
    ) -> AsyncIterator[Canary]:
        canary = cls({"probe": [], "tenant": []})
        async with open_channel(address, credentials, ()) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=KEY, wait_for_ready=True)
            tasks = [
                asyncio.create_task(canary._run("probe", lambda: canary._probe(address, credentials))),
                asyncio.create_task(
                    canary._run(
                        "tenant",
                        lambda: stub.ListModels(inference_pb2.ListModelsRequest(), metadata=KEY, timeout=30),
                    )
                ),
            ]
            try:
                yield canary
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str, ask: Any) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await ask()
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{name}: {error.code().name} {error.details()}")
                if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    self.refusals += 1  # grpc cancels what it cannot queue while a flood begins
            self.waits_s[name].append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)

    async def _probe(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        own = (("grpc.use_local_subchannel_pool", 1),)
        async with open_channel(address, credentials, own) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)

    async def answered(self, worst_s: float) -> None:
        """Return once each has one more answer. Raises TimeoutError."""
        before = {name: len(waits_s) for name, waits_s in self.waits_s.items()}
        await until(lambda: all(len(self.waits_s[name]) > before[name] for name in before), worst_s)

    async def judge(self, worst_s: float) -> None:
        """Raises TimeoutError for silence, AssertionError for a long wait or when more than a few were
        refused."""
        await self.answered(worst_s)  # What is under way counts as well.
        assert len(self.failures) == self.refusals, self.failures
        assert self.refusals <= sum(map(len, self.waits_s.values())) / 2, self.failures
        assert self.worst_s() < worst_s

    def worst_s(self) -> float:
        assert all(self.waits_s.values())
        return max(wait_s for waits_s in self.waits_s.values() for wait_s in waits_s)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse()

    async def Complete(self, request: Any, context: Any) -> Any:
        return inference_pb2.CompleteResponse()

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async for _ in request_iterator:
            await context.write(inference_pb2.SessionResponse())


async def _serve() -> None:
    from services.core.errors import Unauthenticated
    from services.core.generation import Principal
    from services.core.records import KeyRole
    from services.rpc.interceptors.metrics import RpcMetrics
    from services.rpc.server import RpcServer, RpcService, RpcTelemetry, ServerTls
    from services.runtime.certificates import FolderCertificates
    from services.runtime.clock import SystemClock
    from services.runtime.process.free_memory import return_free_memory
    from services.runtime.telemetry.logging import LineBudget
    from services.runtime.telemetry.metrics import Metrics
    from services.runtime.telemetry.server import TelemetryServer

    def authenticate(token: str | None) -> Principal:
        if token != "tenant-key":
            raise Unauthenticated("the API key is not valid")
        return Principal("t", KeyRole.TENANT, "acme")

    clock, folder = SystemClock(), os.environ.get(TLS)
    certificates = FolderCertificates(Path(folder), clock) if folder else None
    metrics = TelemetryServer(Metrics().registry, "127.0.0.1:0", problems=tuple, certificates=certificates)
    server = RpcServer(
        [
            RpcService(
                inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
                inference_pb2_grpc.add_InferenceServiceServicer_to_server,
                Servicer(),  # type: ignore[abstract]
            )
        ],
        listen="127.0.0.1:0",
        internal_token=INTERNAL,
        new_incident=lambda: "inc_1",
        authenticate=authenticate,
        telemetry=RpcTelemetry(RpcMetrics(Metrics()), clock, None, LineBudget(clock.monotonic_s, 20)),
        tls=None if certificates is None else ServerTls(certificates, clock),
    )
    await metrics.start()
    await server.start()
    await server.set_serving(True)
    print(server.port, metrics.port, flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(return_free_memory(clock))
        tasks.create_task(server.guard_connections(clock))


def main() -> None:
    import uvloop

    from services.runtime.process.free_memory import limit_fragmentation
    from services.runtime.telemetry import logging

    limit_fragmentation()
    logging.configure(role="test")
    uvloop.run(_serve())
