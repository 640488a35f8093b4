"""The live installation that is attacked: processes, memory, probes, tenants and their usage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import psutil
from redis.asyncio import Redis

from fairway.cli.fleet.ports import load_ports
from fairway.cli.fleet.probes import Probe, grpc_serving
from fairway.cli.fleet.record import FleetRecord, ProcessId
from fairway.cli.state import StateDir
from fairway.client import AdminClient, ClientOptions, FairwayError
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp
from services.runtime.clock import SystemClock
from services.runtime.config import load, read_password
from tests.security.drills.http import head, status_of
from tests.security.drills.judge import Counted
from tests.security.drills.target import Gateway, Target
from tests.support.stack import Stack

LOG_DISK_BYTES: Final = 256 * 1024**2
STATE_DISK_BYTES: Final = 640 * 1024**2
RESERVE_BYTES: Final = 128 * 1024**2
# requests a minute and concurrency of each tenant; 0: no limit. A storm is of `storm` and `other`.
TENANTS: Final = {
    "canary": (0, 0),
    "drills": (0, 0),
    "storm": (0, 5),
    "other": (30, 5),
    "cold": (0, 5),
    "free": (0, 0),
    "session": (0, 0),
    "poor": (30, 0),
    "hoarder": (0, 0),
}
_PROBE_PERIOD_S: Final = 1.0
_SETTLE_S: Final = 20.0
_STORES: Final = ("etcd", "redis")
now_s = SystemClock().monotonic_s


def admin_client(target: Target) -> AdminClient:
    return AdminClient(
        target.controlplane,
        admin_key=target.admin_key,
        registry=target.registry,
        options=ClientOptions(timeout_s=20.0),
    )


@dataclass(slots=True)
class Probing:
    """Asks a target once a second whether it serves. ``silence_s``: longest time without a good answer."""

    ask: Probe
    silence_s: float = 0.0
    last_s: float = field(default_factory=now_s)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                if not await self.ask():
                    self.silence_s = max(self.silence_s, now_s() - self.last_s)
                    self.last_s = now_s()
            await asyncio.sleep(_PROBE_PERIOD_S)

    def take(self) -> float:
        found, self.silence_s = max(self.silence_s, now_s() - self.last_s), 0.0
        return found

    def forget(self) -> None:
        """Measure from now on."""
        self.silence_s, self.last_s = 0.0, now_s()


def ready(address: str) -> Probe:
    """Return a probe for /readyz."""

    async def probe() -> str:
        status, _ = await status_of(
            address, head("/readyz", "", "connection: close", method="GET"), timeout_s=5
        )
        return "" if status == 200 else f"it answers {status}"

    return probe


class Installation:
    """One that serves, as `fairway up --detach` starts it, with the tenants of the drills."""

    def __init__(self, stack: Stack, log_disk: bool) -> None:
        self.log_disk = log_disk
        self.state = StateDir.at(stack.state)
        record, ports = self._record(), load_ports(self.state.ports)
        roles = {name: each for name, each in record.addresses.items() if name not in _STORES}
        self.target = Target(
            state=stack.state,
            model=stack.model,
            admin_key=str(stack.endpoints["admin_key"]),
            gateways=[
                Gateway(name, address, f"127.0.0.1:{ports[f'{name}_http']}")
                for name, address in roles.items()
                if name.startswith("gateway")
            ],
            roles=roles,
            metrics=dict(stack.endpoints["metrics"]),
            keys={},
        )
        self.probes: dict[str, Probing] = {}
        self._known = dict(record.children)
        self._first_rss: dict[ProcessId, float] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, folder: Path, *, workers: int = 2, gateways: int = 2
    ) -> AsyncIterator[Installation]:
        state = StateDir.at(folder)
        with _own_disk(state.logs, LOG_DISK_BYTES) as log_disk, _own_disk(state.data(""), STATE_DISK_BYTES):
            settings = {"FAIRWAY_DISK_RESERVE_BYTES": str(RESERVE_BYTES)}
            # The attacks are on what lies behind a handshake, from clients that have no certificate.
            options = ("--insecure",)
            starting = Stack.started(
                folder,
                workers=workers,
                replicas=workers,
                gateways=gateways,
                settings=settings,
                options=options,
            )
            stack = await asyncio.to_thread(starting.__enter__)
            try:
                found = cls(stack, log_disk)
                found.target.keys.update(await found._create_tenants())
                yield found
            finally:
                await asyncio.to_thread(starting.__exit__, None, None, None)

    async def _create_tenants(self) -> Mapping[str, str]:
        keys = {}
        async with admin_client(self.target) as admin:
            for name, (per_minute, concurrency) in TENANTS.items():
                await admin.tenants.create(
                    cp.Tenant(
                        metadata=cp.Metadata(name=name),
                        requests_per_minute=per_minute,
                        max_concurrency=concurrency,
                        max_priority=common_pb2.PRIORITY_INTERACTIVE,
                    )
                )
                key = cp.Key(metadata=cp.Metadata(name=f"key-{name}"), role=cp.KEY_ROLE_TENANT, tenant=name)
                keys[name] = (await admin.keys.create(key)).secret
        return keys

    # --- processes ------------------------------------------------------------------------------

    def _record(self) -> FleetRecord:
        record = FleetRecord.load(self.state.fleet)
        assert record is not None, "the supervisor has no record"
        return record

    def take_lost(self, expected: tuple[str, ...]) -> list[str]:
        """Return the processes that ended or were replaced since the last call, but those ``expected`` to."""
        try:
            children: Mapping[str, ProcessId] = self._record().children
        except AssertionError:
            children = {}
        lost = [
            name
            for name, known in self._known.items()
            if children.get(name) != known or not known.alive
            if not name.startswith(expected)
        ]
        self._known |= children
        return lost

    def growths(self, *, anew: bool = False) -> dict[str, float]:
        """Return by how many MiB each process of a role grew since it was first measured, or since ``anew``.

        Engines are left out: what they hold is the model's and its KV.
        """
        if anew:
            self._first_rss.clear()
        grown = {}
        for name, child in self._record().children.items():
            if name in _STORES or not child.alive:
                continue
            for process in _family(child.pid):
                if (identity := ProcessId.of(process.pid)) is not None:
                    with contextlib.suppress(psutil.Error):
                        rss = process.memory_info().rss / 1024**2
                        grown[f"{name}/{process.pid}"] = rss - self._first_rss.setdefault(identity, rss)
        return grown

    # --- probes ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def probed(self) -> AsyncIterator[None]:
        """Health of every role, by the supervisor's own probe, and /readyz wherever it is served."""
        asked = {f"{name} health": grpc_serving(address) for name, address in self.target.roles.items()}
        asked |= {f"{name} metrics": ready(address) for name, address in self.target.metrics.items()}
        asked |= {f"{gateway.name} http": ready(gateway.http) for gateway in self.target.gateways}
        self.probes = {name: Probing(ask) for name, ask in asked.items()}
        tasks = [asyncio.create_task(probing.run()) for probing in self.probes.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def healthy(self, timeout_s: float) -> bool:
        """Whether every probe is answered well within the time."""
        deadline_s = now_s() + timeout_s
        began_s = now_s()
        while any(probing.last_s < began_s for probing in self.probes.values()):
            if now_s() > deadline_s:
                return False
            await asyncio.sleep(0.2)
        return True

    # --- usage ----------------------------------------------------------------------------------

    async def settled(self, at_least: Mapping[str, Counted]) -> dict[str, Counted]:
        """Return what the ledger has of each tenant, as soon as it is at least that or after 20 s.

        Raises FairwayError where it could not be read until then.
        """
        deadline_s = now_s() + _SETTLE_S
        async with admin_client(self.target) as admin:
            while True:
                try:
                    records = await admin.usage.list(
                        group_by=[cp.USAGE_DIMENSION_TENANT], start_time=datetime.now(UTC) - timedelta(days=1)
                    )
                    found = dict.fromkeys(at_least, Counted())
                    for each in records:  # one for each source: gateways, workers
                        sums = found.get(each.tenant, Counted())
                        found[each.tenant] = sums + Counted(each.requests, each.output_tokens)
                except FairwayError:
                    if now_s() > deadline_s:
                        raise
                    await asyncio.sleep(0.5)
                    continue
                there = all(found[name].requests >= least.requests for name, least in at_least.items())
                if there or now_s() > deadline_s:
                    return found
                await asyncio.sleep(0.5)


def redis_of(gateway_pid: int) -> Redis:
    """Return a client of the Redis that a gateway was started with."""
    settings = load(psutil.Process(gateway_pid).environ())
    password = read_password(settings.redis_password_file) if settings.redis_password_file else None
    return Redis.from_url(settings.redis_url, password=password)


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, engines left out."""
    found = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if "engine" not in " ".join(each.cmdline()):
                    found.append(each)
    return found


@contextlib.contextmanager
def _own_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Put the folder on a small disk of its own where this user may; yield whether it is."""
    folder.mkdir(parents=True)
    mounted = False
    if os.geteuid() == 0 and shutil.which("mount"):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
