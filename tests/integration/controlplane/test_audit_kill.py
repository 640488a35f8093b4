"""The control plane is killed with SIGKILL again and again under changes by operators, on a real etcd.

Each acknowledged change is in the log exactly once, each stored change has its entry, and no entry is
without its change. A client that was written from the specification verifies the log after all kills.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.ledger_stores import AUDIT, FolderLedger
from services.controlplane.audit_reads import AuditReader
from services.core.audit import PENDING
from services.core.records import TENANTS
from services.rpc.channel import auth_metadata, open_channel
from services.runtime.clock import SystemClock
from tests.support.audited_plane import (
    ADMIN_KEY,
    KEY,
    audited_plane,
    exported,
    outside_of,
    times_of_changes,
    verified,
)
from tests.support.local_servers import free_port

CLOCK = SystemClock()
KILLS = 12
OPERATORS = 4


class Operators:
    """They create tenants, each under a name of its own, and note which were acknowledged."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.acknowledged: list[str] = []
        self.sent = 0
        self.ends = False

    async def run(self, number: int) -> None:
        channel = open_channel(self._address)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
        while not self.ends:
            name = f"t{number}-{self.sent}"
            self.sent += 1
            request = pb.CreateTenantRequest(
                tenant=pb.Tenant(metadata=pb.Metadata(name=name)), request_id=f"id-{name}"
            )
            for _ in range(2):  # a client repeats a call whose answer was lost, under the same id
                with suppress(Exception):
                    await stub.CreateTenant(request, metadata=auth_metadata(ADMIN_KEY), timeout=2)
                    self.acknowledged.append(name)
                    break
                await asyncio.sleep(0.05)
        await channel.close()


@pytest.mark.timeout(240)
async def test_kills_lose_and_double_no_acknowledged_change(own_etcd: Any, tmp_path: Path) -> None:
    rng, port = random.Random(5), free_port()
    operators = Operators(f"127.0.0.1:{port}")
    running = [asyncio.create_task(operators.run(number)) for number in range(OPERATORS)]
    module = "tests.integration.controlplane.audited_process"
    before = 0
    for _ in range(KILLS):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, own_etcd.address, str(tmp_path), str(port)
        )
        try:
            async with asyncio.timeout(30):
                while len(operators.acknowledged) < before + 20:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(rng.uniform(0.0, 2.5))  # at any place of a batch
        finally:
            process.kill()
            await process.wait()
        before = len(operators.acknowledged)
    operators.ends = True
    await asyncio.gather(*running)

    store = EtcdStore([own_etcd.address], CLOCK)
    tiles = FolderLedger(tmp_path / "tiles", AUDIT)
    try:
        async with asyncio.timeout(10):
            while await store.get(KEY) is not None:
                await asyncio.sleep(0.05)  # the lease of the last leader
        async with audited_plane(store, tiles, CLOCK, tmp_path) as plane:
            while (await store.list(PENDING)).entries:
                await plane.sequence()
                assert plane.sequencer.problem() == ""
            objects = await exported(AuditReader(store, tiles))
        outside = outside_of((tmp_path / "checkpoints").read_text())
        entries = verified(objects, outside)
        stored = [entry.key.removeprefix(TENANTS) for entry in (await store.list(TENANTS)).entries]
    finally:
        await store.close()
    logged = Counter(each["resource"] for each in entries if each["outcome"] == "OK" and each["request_id"])
    lost = [name for name in operators.acknowledged if not logged[name]]
    doubled = [name for name, times in logged.items() if times > 1]
    figures = {
        "kills": KILLS,
        "acknowledged": len(operators.acknowledged),
        "entries": len(entries),
        "outside_checkpoints": len(outside),
        "audit_lost": len(lost),
        "doubled": len(doubled),
    }
    print(f"RESULT {figures}")
    assert (lost, doubled) == ([], [])
    assert logged.keys() == set(stored)
    assert len(operators.acknowledged) > 20 * KILLS


@pytest.mark.sweep
async def test_what_the_log_adds_to_a_change(own_etcd: Any, tmp_path: Path) -> None:
    """Prints the times of a change without an entry, and with one while the log is written, in turn."""
    figures = await times_of_changes(own_etcd.address, tmp_path)
    print(f"RESULT {figures}")
