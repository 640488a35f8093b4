"""Files and batches in this process, for tests of one gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from services.adapters.blobs.sealed import SealedParts
from services.adapters.memory.store import MemoryStore
from services.adapters.record_cipher import RecordCipher
from services.core.batches import BATCH_OWNERS, BATCHES, FILES, BatchRecord, OwnerRecord, StoredFile
from services.core.records import load
from services.gateway.batches.files import FileLimits, FileService
from services.gateway.batches.service import BatchService, TenantBatchLimits
from services.gateway.batches.store import BatchStore
from services.ports.blob_store import BlobStore
from services.ports.clock import Clock
from services.ports.store import Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.supervisor import Supervisor
from tests.support.memory_blobs import MemoryBlobs
from tests.support.tenant_keys import tenant_keys


@dataclass
class BatchStack:
    """The stores of files and batches, their views, and their service."""

    etcd: Store
    blobs: BlobStore
    parts: SealedParts
    store: BatchStore
    batches: Informer[BatchRecord]
    owners: Informer[OwnerRecord]
    stored: Informer[StoredFile]
    files: FileService
    service: BatchService

    async def seen(self) -> None:
        """Return once the views have everything that was written before the call."""
        for informer in (self.batches, self.owners, self.stored):
            stored = {
                entry.key: entry.mod_revision for entry in (await self.etcd.list(informer.prefix)).entries
            }
            while {key: held.mod_revision for key, held in informer.view.items()} != stored:
                await informer.wait_changed(informer.revision, 0.05)


def batch_stack(
    clock: Clock,
    limits: FileLimits | None = None,
    *,
    etcd: Store | None = None,
    blobs: BlobStore | None = None,
) -> BatchStack:
    """Return the parts; the views are empty until their informers run."""
    etcd = etcd or MemoryStore(clock)
    blobs = blobs or MemoryBlobs(unix_s=clock.unix_s)
    parts = SealedParts(blobs, RecordCipher(tenant_keys(etcd, clock=clock), _nonces()))
    store = BatchStore(etcd, clock)

    def informer(prefix: str, kind: type[Any]) -> Informer[Any]:
        return Informer(etcd, prefix, lambda entry: load(entry.value, kind), clock)

    batches, owners = informer(BATCHES, BatchRecord), informer(BATCH_OWNERS, OwnerRecord)
    stored = informer(FILES, StoredFile)
    numbers = count(1)

    def new_id() -> str:
        return f"{next(numbers):024x}"

    files = FileService(store, parts, stored, batches, clock, limits or FileLimits(), new_id=new_id)
    service = BatchService(
        files, store, batches, clock, TenantBatchLimits(max_unfinished=3, max_batches=5), new_id=new_id
    )
    return BatchStack(etcd, blobs, parts, store, batches, owners, stored, files, service)


@asynccontextmanager
async def running_stack(clock: Clock, **options: Any) -> AsyncIterator[BatchStack]:
    """Yield the parts with current views."""
    stack, supervisor = batch_stack(clock, **options), Supervisor(clock)
    for informer in (stack.batches, stack.owners, stack.stored):
        supervisor.spawn("informer", informer.run())
        await informer.wait_synced(5.0)
    try:
        yield stack
    finally:
        await supervisor.close()


def memory_batches() -> BatchService:
    """Return a service without files and batches."""
    return batch_stack(SystemClock()).service


def _nonces() -> Any:
    numbers = count(1)
    return lambda size: next(numbers).to_bytes(size, "big")
