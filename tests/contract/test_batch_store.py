"""Files and batches in a store: owners exclude each other, former owners write nothing, cancellations stay.

Checked on a real etcd and on the in-memory store.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from services.adapters.etcd.store import EtcdStore
from services.adapters.memory.store import MemoryStore
from services.core.batches import (
    BatchRecord,
    BatchStatus,
    FilePart,
    FilePurpose,
    StoredFile,
)
from services.core.errors import Conflict, NotFound
from services.gateway.batches.store import ENDING_S, BatchStore, OwnedBatch, OwnershipLost
from services.ports.store import Store
from services.runtime.clock import SystemClock

PART = FilePart("sha256:" + "0" * 64, 10)


@dataclass
class BatchKit:
    etcd: Store
    store: BatchStore
    tenant: str
    file: StoredFile
    batch: BatchRecord

    async def claimed(self, lease_s: int = 60) -> OwnedBatch:
        lease = await self.etcd.grant_lease(lease_s)
        held = await self.store.claim(self.tenant, self.batch.batch_id, "g", lease)
        assert held is not None
        return held


@pytest_asyncio.fixture(params=["etcd", "memory"])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[BatchKit]:
    clock, tenant = SystemClock(), f"t-{uuid.uuid4().hex}"
    etcd: Store = MemoryStore(clock)
    if request.param == "etcd":
        etcd = EtcdStore((request.getfixturevalue("etcd_endpoint"),), clock)
    ids = [f"file-{number:024x}" for number in range(3)]
    now_s = clock.unix_s()
    file = StoredFile(ids[0], tenant, "in", FilePurpose.BATCH, now_s, now_s + 60.0, (PART,))
    batch = BatchRecord(
        f"batch_{0:024x}",
        tenant,
        "k",
        "/v1/completions",
        ids[0],
        ids[1],
        ids[2],
        "24h",
        now_s,
        now_s + 60.0,
    )
    store = BatchStore(etcd, clock)
    await store.add_file(file)
    await store.add_batch(batch, await store.file(tenant, ids[0]))
    yield BatchKit(etcd, store, tenant, file, batch)
    if isinstance(etcd, EtcdStore):
        await etcd.close()


async def test_one_owner_at_a_time(kit: BatchKit) -> None:
    held = await kit.claimed()
    lease = await kit.etcd.grant_lease(60)
    assert await kit.store.claim(kit.tenant, kit.batch.batch_id, "other", lease) is None
    await kit.store.release(kit.tenant, kit.batch.batch_id, held.epoch)
    assert await kit.store.claim(kit.tenant, kit.batch.batch_id, "other", lease) is not None


async def test_a_batch_is_free_when_its_owners_lease_lapses(kit: BatchKit) -> None:
    first = await kit.claimed(lease_s=1)
    async with asyncio.timeout(10):
        lease = await kit.etcd.grant_lease(60)
        while (second := await kit.store.claim(kit.tenant, kit.batch.batch_id, "g2", lease)) is None:
            await asyncio.sleep(0.1)
    assert second.epoch > first.epoch
    with pytest.raises(OwnershipLost):
        await kit.store.advance(first, replace(first.record, next_line=1))
    moved = await kit.store.advance(second, replace(second.record, next_line=2))
    assert (await kit.store.batch(kit.tenant, kit.batch.batch_id)).record == moved.record


async def test_a_release_of_a_former_owner_frees_nothing(kit: BatchKit) -> None:
    first = await kit.claimed()
    await kit.store.release(kit.tenant, kit.batch.batch_id, first.epoch)
    second = await kit.claimed()
    await kit.store.release(kit.tenant, kit.batch.batch_id, first.epoch)
    await kit.store.advance(second, replace(second.record, next_line=1))


async def test_a_cancellation_between_two_commits_is_kept(kit: BatchKit) -> None:
    held = await kit.claimed()
    await kit.store.cancel(kit.tenant, kit.batch.batch_id, 7.0)
    moved = await kit.store.advance(held, replace(held.record, next_line=3, lines=9))
    assert (moved.record.status, moved.record.cancel_unix_s) == (BatchStatus.CANCELLING, 7.0)
    assert (moved.record.next_line, moved.record.lines) == (3, 9)
    assert await kit.store.cancel(kit.tenant, kit.batch.batch_id, 8.0) == moved.record
    ended = await kit.store.advance(moved, replace(moved.record, status=BatchStatus.CANCELLED))
    assert ended.record.status is BatchStatus.CANCELLED
    with pytest.raises(Conflict):
        await kit.store.cancel(kit.tenant, kit.batch.batch_id, 9.0)


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("completed", "completed"),
        ("cancelled", "cancelled"),
        ("failed", "cancelled"),
        ("expired", "cancelled"),
    ],
)
async def test_a_cancellation_that_meets_the_end_is_kept(kit: BatchKit, end: str, shown: str) -> None:
    held = await kit.claimed()
    await kit.store.cancel(kit.tenant, kit.batch.batch_id, 7.0)
    ended = await kit.store.advance(held, replace(held.record, status=BatchStatus(end), end_unix_s=8.0))
    assert (ended.record.status, ended.record.cancel_unix_s) == (BatchStatus(shown), 7.0)
    assert ended.record.end_unix_s == 8.0
    assert (await kit.store.batch(kit.tenant, kit.batch.batch_id)).record == ended.record


async def test_a_repeat_finds_the_write_that_a_cancellation_was_added_to(kit: BatchKit) -> None:
    held = await kit.claimed()
    await kit.store.cancel(kit.tenant, kit.batch.batch_id, 7.0)
    record = replace(held.record, next_line=3)
    moved = await kit.store.advance(held, record)
    assert await kit.store.advance(held, record) == moved


async def test_the_end_and_its_files_are_one_commit_and_a_repeat_changes_nothing(kit: BatchKit) -> None:
    held = await kit.claimed()
    record = replace(held.record, status=BatchStatus.COMPLETED, output=(PART,))
    output = replace(kit.file, file_id=record.output_file_id, purpose=FilePurpose.BATCH_OUTPUT)
    await kit.store.advance(held, record, [output])
    again = await kit.store.advance(held, record, [output])
    assert again.record == record
    assert (await kit.store.file(kit.tenant, record.output_file_id)).record == output
    await kit.store.release(kit.tenant, kit.batch.batch_id, held.epoch)
    lease = await kit.etcd.grant_lease(60)
    assert await kit.store.claim(kit.tenant, kit.batch.batch_id, "g", lease) is None, "it has ended"
    assert PART.digest in await kit.store.named_parts()


async def test_the_input_is_kept_as_long_as_its_batch_may_run(kit: BatchKit) -> None:
    found = await kit.store.file(kit.tenant, kit.file.file_id)
    assert found.record == replace(kit.file, expire_unix_s=kit.batch.expire_unix_s + ENDING_S)
    for number, more_s, kept_s in ((1, -9.0, 0.0), (2, 9.0, 9.0)):
        expire_unix_s = kit.batch.expire_unix_s + more_s
        other = replace(kit.batch, batch_id=f"batch_{number:024x}", expire_unix_s=expire_unix_s)
        await kit.store.add_batch(other, await kit.store.file(kit.tenant, kit.file.file_id))
        kept = (await kit.store.file(kit.tenant, kit.file.file_id)).record
        assert kept.expire_unix_s == found.record.expire_unix_s + kept_s


async def test_a_batch_needs_its_input(kit: BatchKit) -> None:
    found = await kit.store.file(kit.tenant, kit.file.file_id)
    await kit.store.delete_file(found)
    with pytest.raises(NotFound):
        await kit.store.file(kit.tenant, kit.file.file_id)
    with pytest.raises(Conflict):
        await kit.store.add_batch(replace(kit.batch, batch_id=f"batch_{1:024x}"), found)
    with pytest.raises(NotFound):
        await kit.store.batch(kit.tenant, f"batch_{1:024x}")


async def test_parts_that_a_batch_names_are_kept(kit: BatchKit) -> None:
    held = await kit.claimed()
    parts = [FilePart("sha256:" + f"{number:064x}", 10) for number in range(1, 4)]
    record = replace(held.record, output=(parts[0],), errors=(parts[1],), early=(parts[2],))
    await kit.store.advance(held, record)
    assert {part.digest for part in parts} <= await kit.store.named_parts()
