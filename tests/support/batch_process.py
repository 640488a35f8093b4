"""A process that runs batches of an etcd and a folder as a gateway does; its lines take a moment each.

python -m tests.support.batch_process ETCD FOLDER NAME
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.blobs.sealed import SealedParts
from services.adapters.etcd.store import EtcdStore
from services.app.roles.gateway_batches import status_of
from services.core.batches import BATCH_OWNERS, BATCHES, BatchRecord, OwnerRecord
from services.core.errors import FairwayError
from services.core.generation import Principal
from services.core.records import Meta, Tenant, load
from services.gateway.batches.lines import LineAnswer
from services.gateway.batches.owner import BatchOwner, OwnerLimits
from services.gateway.batches.ports import BatchPorts, BatchTimes
from services.gateway.batches.store import BatchStore
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.supervisor import Supervisor
from tests.support.tenant_keys import record_cipher, tenant_keys

LEASE_S = 2
LINE_S = 0.02


class SlowLines:
    """Implements ``LineCalls``: each line takes a moment, and its answer is its body."""

    async def run(self, principal: Principal, endpoint: str, body: bytes, key: str) -> LineAnswer:
        await asyncio.sleep(LINE_S)
        return LineAnswer(200, body, key)

    def refusal(self, error: FairwayError) -> LineAnswer:
        raise error


async def main(endpoint: str, folder: Path, name: str) -> None:
    clock = SystemClock()
    supervisor, etcd = Supervisor(clock), EtcdStore((endpoint,), clock)
    batches = Informer(etcd, BATCHES, lambda entry: load(entry.value, BatchRecord), clock)
    owners = Informer(etcd, BATCH_OWNERS, lambda entry: load(entry.value, OwnerRecord), clock)
    for informer in (batches, owners):
        supervisor.spawn("informer", informer.run())
        await informer.wait_synced(10.0)
    ports = BatchPorts(
        BatchStore(etcd, clock),
        SealedParts(FolderBlobs(folder), record_cipher(keys=tenant_keys(etcd, clock=clock))),
        SlowLines(),
        clock,
        Random(1),
        tenant_of=lambda principal: Tenant(Meta(principal.tenant_id)),
        status_of=lambda batch: status_of(batch, batches),
        count=lambda _: None,
        room_bytes=lambda _: 1024**3,
        retention_s=lambda _: 30 * 86_400.0,
        deployment_of=str,
        max_line_bytes=1000,
        times=BatchTimes(commit_s=0.1),
    )
    owner = BatchOwner(
        ports,
        batches,
        owners,
        LeaseHolder(etcd, clock, ttl_s=LEASE_S),
        supervisor,
        gateway_id=name,
        limits=OwnerLimits(max_batches=4, max_lines=4, busy_lines=4),
        gateways=lambda: 2,
    )
    await owner.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
