"""A fleet under drill: several processes of each role under our own supervisor, a proxy on every edge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import psutil

from fairway.cli.calls import credentials_of
from fairway.cli.fleet.bootstrap import Bootstrap
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.ports import choose_ports
from fairway.cli.fleet.progress import Phase
from fairway.cli.fleet.roles import (
    Addresses,
    port_names,
    role_of,
    role_specs,
    store_specs,
    write_certificates,
)
from fairway.cli.fleet.supervisor import ProcessSupervisor
from fairway.cli.state import StateDir, ensure_secrets, read_secret
from fairway.client.endpoints import open_channel
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.redis.limiter import RedisLimiter
from services.core.limits import Limit, LimitKind
from services.core.records import Leader, leader_key, load
from services.runtime.clock import SystemClock
from tests.chaos.checker import Holding
from tests.chaos.proxy import NAME_VARIABLE, Rule
from tests.support.stack import ROOT, metadata

AT_ONCE: Final = 4  # processes that start together: more of them do not serve in time on a busy machine
DRAIN_S: Final = 20.0
DISK_BYTES: Final = 512 * 1024**2
SMALL_DISK: Final = "worker-1"  # the worker whose model files are on a disk of their own
STORES: Final = ("etcd", "redis")
METERED_MICROS: Final = 10**12
SETTINGS: Final = {
    "FAIRWAY_DISK_RESERVE_BYTES": str(64 * 1024**2),  # of a disk of 512 MiB
    "FAIRWAY_DRAIN_S": f"{DRAIN_S:g}",
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_KV_MEMORY_BYTES": str(64 * 1024**2),
}


class Journal:
    """What the supervisor tells, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        with self._path.open("a") as file:
            file.write(f"{SystemClock().unix_s():.3f} {name} {phase} {detail}\n")

    def close(self) -> None:
        """Nothing is open."""


class Network:
    """The proxy process, and the rules in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._rules: list[Rule] = []

    @classmethod
    async def started(cls, ports: Mapping[str, tuple[int, int | str]], log: Path) -> Network:
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.proxy",
                json.dumps(ports),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
            )
        network = cls(process)
        await network._answer()
        return network

    async def add(self, rule: Rule) -> list[str]:
        """Apply one more rule; return the pairs whose open connections it hit."""
        self._rules.append(rule)
        return await self._apply()

    async def remove(self, rule: Rule) -> None:
        self._rules.remove(rule)
        await self._apply()

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _apply(self) -> list[str]:
        assert self._process.stdin is not None
        rules = [asdict(rule) for rule in self._rules]
        self._process.stdin.write(json.dumps(rules).encode() + b"\n")
        await self._process.stdin.drain()
        return [f"{source} to {target}" for source, target in json.loads(await self._answer())]

    async def _answer(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy ended; its log says why")
        return line


@dataclass(frozen=True, slots=True)
class Shape:
    workers: int = 2
    gateways: int = 2
    schedulers: int = 2
    controlplanes: int = 2
    deploy: bool = True  # whether the bundled model is deployed
    zones: tuple[str, ...] = ()  # zones that workers and gateways take in turn


class Fleet:
    """Everything that a drill may touch. Names of processes are those of `fairway up`."""

    def __init__(
        self,
        state: StateDir,
        addresses: Addresses,
        entries: Mapping[str, str],
        options: UpOptions,
        settings: Mapping[str, str],
        zones: Sequence[str] = (),
    ) -> None:
        self.state = state
        self.addresses = addresses
        self.options = options
        self._own_settings = {**SETTINGS, **settings}
        self.zones = {
            name: zones[number % len(zones)]
            for names in (addresses.worker_names, addresses.gateway_names)
            for number, name in enumerate(names)
            if zones
        }
        self.gateways: dict[str, str] = {name: entries[name] for name in addresses.gateway_names}
        self.network: Network
        self.supervisor: ProcessSupervisor
        self.admin_key = ""
        self.small_disk = False
        self.limiter = RedisLimiter(state.redis_url, SystemClock(), timeout_s=2.0)
        self.store = EtcdStore((state.etcd_address,), SystemClock())
        self._channels: dict[str, grpc.aio.Channel] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, root: Path, shape: Shape, *, settings: Mapping[str, str] | None = None
    ) -> AsyncIterator[Fleet]:
        """Yield a fleet that serves, every role with ``settings``; nothing of it is left afterwards."""
        state = StateDir.at(root)
        state.create()
        ensure_secrets(state)
        options = UpOptions(
            state_dir=str(root),
            workers=shape.workers,
            replicas=shape.workers,
            gateways=shape.gateways,
            schedulers=shape.schedulers,
            controlplanes=shape.controlplanes,
            deploy=shape.deploy,
        )
        names = port_names(options)
        proxied = [name for name in names if not name.endswith(("_http", "_metrics"))]
        edges = [f"edge:{name}" for name in (*STORES, *proxied)]
        ports = choose_ports([*names, *edges], fixed={}, remembered={}, preferred={})
        addresses = Addresses.for_options(options, ports)
        entries = {_process(name): f"127.0.0.1:{ports[f'edge:{name}']}" for name in (*STORES, *proxied)}
        fleet = cls(state, addresses, entries, options, settings or {}, shape.zones)
        pairs: dict[str, tuple[int, int | str]] = {
            _process(name): (ports[f"edge:{name}"], ports[name]) for name in proxied
        }
        for name, address in zip(STORES, (state.etcd_address, state.redis_address), strict=True):
            pairs[name] = (ports[f"edge:{name}"], address.removeprefix("unix:"))
        fleet.network = await Network.started(pairs, state.log("proxy"))
        fleet.supervisor = ProcessSupervisor(Journal(state.logs / "journal"), state.fleet)
        try:
            await fleet._start(entries)
            yield fleet
        finally:
            await fleet._stop()

    async def _start(self, entries: Mapping[str, str]) -> None:
        self._mount()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
        await self.supervisor.start(store_specs(self.state, environ))
        write_certificates(self.state, self.addresses)
        specs = role_specs(self.state, self.addresses, environ, self._settings(entries))
        for begin in range(0, len(specs), AT_ONCE):
            await self.supervisor.start(specs[begin : begin + AT_ONCE])
        await Bootstrap(self.options, self.state, self.addresses, Journal(self.state.logs / "journal")).run()
        self.admin_key = read_secret(self.state, "admin_key")

    def _settings(self, entries: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """What goes over the settings of an installation: every address is that of a proxy."""
        settings = []
        for name in self.addresses.role_names:
            for variable, value in self._own_settings.items():
                settings.append((name, variable, value))
            settings += [
                (name, "FAIRWAY_ZONE", self.zones.get(name, "")),
                (name, NAME_VARIABLE, name),
                (name, "FAIRWAY_LABELS", f"name={name}"),
                (name, "FAIRWAY_ETCD_ENDPOINTS", entries["etcd"]),
                (name, "FAIRWAY_REDIS_URL", f"redis://{entries['redis']}/0"),
                (name, "FAIRWAY_REGISTRY", entries["registry"]),
                (name, "FAIRWAY_ADVERTISE", entries[name]),
            ]
        return settings

    async def _stop(self) -> None:
        for pid in self.pids().values():  # what is frozen could not end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await self.supervisor.stop()
        await self.network.close()
        await self.limiter.close()
        await self.store.close()
        for channel in self._channels.values():
            await channel.close()
        if self.small_disk:
            await asyncio.to_thread(subprocess.run, ["umount", str(self.disk)], check=False)

    # --- processes ------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        return self.supervisor.pids

    def expected_processes(self) -> dict[str, int]:
        """Process counts by name: a worker's engine bears the name of its agent."""
        return {name: 2 if role_of(name) == "worker" else 1 for name in self.addresses.role_names}

    def found_processes(self) -> dict[str, int]:
        """Count the live processes of this fleet, by the name that they were started with."""
        found: Counter[str] = Counter()
        for process in psutil.process_iter(["pid", "status"]):
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                mine = environ.get("FAIRWAY_STATE_DIR", "").startswith(str(self.state.root))
                if mine and process.info["status"] != psutil.STATUS_ZOMBIE and NAME_VARIABLE in environ:
                    found[environ[NAME_VARIABLE]] += 1
        return dict(found)

    async def pid_of(self, target: str) -> int:
        """Return the process id of a name, of ``ROLE:leader``, or of ``engine:WORKER``."""
        kind, _, which = target.partition(":")
        if kind == "engine":
            pid = (await self.worker(which)).versions[0].engine_pid
            if not pid:  # a signal to 0 is for the processes of this drill
                raise LookupError(f"no engine runs on {which}")
            return pid
        return self.pids()[await self.name_of(target)]

    async def name_of(self, target: str) -> str:
        """Return the name of a process: ``ROLE:leader`` is looked up."""
        role, _, which = target.partition(":")
        if which != "leader":
            return which if role == "engine" else target
        entry = await self.store.get(leader_key(role))
        assert entry is not None, f"no {role} leads"
        address = load(entry.value, Leader).address
        port = int(address.rpartition(":")[2])
        edge = next(name for name, value in self.addresses.ports.items() if value == port)
        return edge.removeprefix("edge:")

    # --- disk -----------------------------------------------------------------------------------

    @property
    def disk(self) -> Path:
        return self.state.data(SMALL_DISK) / "models"

    def _mount(self) -> None:
        """Put the model files of one worker on a small disk of their own, where this user may."""
        self.disk.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0 and shutil.which("mount"):
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk)]
            self.small_disk = subprocess.run(command, check=False, capture_output=True).returncode == 0

    # --- what it says of itself -----------------------------------------------------------------

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel past the proxies, for looking."""
        if address not in self._channels:
            options = (("grpc.max_reconnect_backoff_ms", 500), ("grpc.enable_http_proxy", 0))
            credentials = credentials_of(self.addresses.certs)
            self._channels[address] = open_channel(address, credentials, options)
        return self._channels[address]

    async def worker(self, name: str) -> worker_pb2.GetWorkerResponse:
        stub = worker_pb2_grpc.WorkerServiceStub(self.channel(self.addresses.of(name)))
        answer: worker_pb2.GetWorkerResponse = await stub.GetWorker(
            worker_pb2.GetWorkerRequest(), metadata=metadata(self.admin_key), timeout=3
        )
        return answer

    async def holdings(self) -> list[Holding]:
        """Return what each worker holds. Raises AioRpcError while one does not answer."""
        found = []
        for name in self.addresses.worker_names:
            for version in (await self.worker(name)).versions:
                found.append(
                    Holding(
                        name,
                        worker_pb2.VersionState.Name(version.state).removeprefix("VERSION_STATE_"),
                        version.kv_blocks_reserved,
                        version.kv_blocks_used,
                        version.running,
                        version.waiting,
                    )
                )
        return found

    async def grants_outstanding(self) -> int:
        """Return how many grants the leading scheduler counts as given and not yet spoken for."""
        name = await self.name_of("scheduler:leader")
        url = f"http://{self.addresses.of(f'{name}_metrics')}/metrics"
        page = await asyncio.to_thread(read_page, url)
        return sum(
            int(float(line.split()[1]))
            for line in page.splitlines()
            if line.startswith("fairway_scheduler_grants_outstanding")
        )

    async def charged_tokens(self, tenant: str) -> int:
        """Return the tokens, prompt and output, that a tenant was charged so far."""
        (spent,) = await self.limiter.spent(tenant, [Limit(LimitKind.MONTH_MICROS, METERED_MICROS)])
        return spent.settled_micros

    async def deploy_instead(self, deployments: Sequence[cp.Deployment]) -> None:
        """Deploy these in place of the bundled model's deployment."""
        admin = metadata(self.admin_key)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(self.channel(self.addresses.of("controlplane")))
        bundled = cp.DeleteDeploymentRequest(name=self.options.model_name)
        await stub.DeleteDeployment(bundled, metadata=admin, timeout=15)
        for deployment in deployments:
            created = cp.CreateDeploymentRequest(deployment=deployment)
            await stub.CreateDeployment(created, metadata=admin, timeout=15)

    async def unready(self, names: Sequence[str]) -> str:
        """Return which deployments are not at their replicas, "" when all are."""
        admin = metadata(self.admin_key)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(self.channel(self.addresses.of("controlplane")))
        found = []
        for name in names:
            answer = await stub.GetDeployment(cp.GetDeploymentRequest(name=name), metadata=admin, timeout=5)
            ready, wanted = answer.deployment.status.ready_replicas, answer.deployment.replicas
            if ready != wanted:
                found.append(f"{name} has {ready} of {wanted} replicas: {answer.deployment.status.message}")
        return "; ".join(found)

    async def exact(self, names: Sequence[str]) -> set[str]:
        """Return the deployments of which every replica promises exact outputs."""
        admin = metadata(self.admin_key)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(self.channel(self.addresses.of("controlplane")))
        found = set()
        for name in names:
            answer = await stub.GetDeployment(cp.GetDeploymentRequest(name=name), metadata=admin, timeout=5)
            if all("exact" in replica.capabilities for replica in answer.deployment.status.replicas):
                found.add(name)
        return found

    async def meter(self, tenant: str, names: Sequence[str] = ()) -> None:
        """Price deployments at a micro-dollar per token, and give the tenant a budget that shows it.

        Without ``names`` it is that of the bundled model.
        """
        admin = metadata(self.admin_key)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(self.channel(self.addresses.of("controlplane")))
        for name in names or (self.options.model_name,):
            found = await stub.GetDeployment(cp.GetDeploymentRequest(name=name), metadata=admin, timeout=15)
            price = cp.Price(input_micros=10**6, cached_micros=10**6, output_micros=10**6)
            found.deployment.price.CopyFrom(price)
            changed = cp.UpdateDeploymentRequest(deployment=found.deployment)
            await stub.UpdateDeployment(changed, metadata=admin, timeout=15)
        budget = cp.Budget(metadata=cp.Metadata(name=tenant), tenant=tenant, limit_micros=METERED_MICROS)
        await stub.CreateBudget(cp.CreateBudgetRequest(budget=budget), metadata=admin, timeout=15)

    async def create_tenants(self, names: Sequence[str]) -> dict[str, str]:
        """Return an API key per tenant, the tenants being new."""
        admin = metadata(self.admin_key)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(self.channel(self.addresses.of("controlplane")))
        keys = {}
        for name in names:
            tenant = cp.Tenant(metadata=cp.Metadata(name=name))
            await stub.CreateTenant(cp.CreateTenantRequest(tenant=tenant), metadata=admin, timeout=15)
            key = cp.Key(metadata=cp.Metadata(name=f"key-{name}"), role=cp.KEY_ROLE_TENANT, tenant=name)
            created = await stub.CreateKey(cp.CreateKeyRequest(key=key), metadata=admin, timeout=15)
            keys[name] = created.secret
        return keys


def read_page(url: str) -> str:
    """Return what a process exports."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=3) as answer:
        return str(answer.read().decode())


def _process(port_name: str) -> str:
    """Return the name of the process behind a port."""
    return port_name.removesuffix("_grpc")
