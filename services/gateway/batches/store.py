"""Files and batches in the store of fleet state: every change compares what it was decided on.

A batch has at most one owner, a gateway, whose key is under its lease. A commit of an owner holds only while
that key is the one that it created, so a gateway that was frozen or cut off writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from services.core.batches import (
    BATCH_ID,
    BATCHES,
    FILE_ID,
    FILES,
    BatchRecord,
    BatchStatus,
    StoredFile,
    batch_key,
    file_key,
    owner_key,
)
from services.core.errors import Conflict, NotFound, StoreUnavailable
from services.core.records import dump
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Condition,
    CreateRevisionIs,
    Delete,
    LeaseLost,
    ModRevisionIs,
    Put,
    Store,
)
from services.runtime.fleet_state.informer import Versioned

T = TypeVar("T")
_TRIES: Final = 5
# Of a batch: its input stays readable for its end, which another gateway may have to write.
ENDING_S: Final = 86_400.0


class OwnershipLost(Exception):
    """Another gateway runs the batch now, or may: this one writes nothing more of it."""


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch as its owner wrote or read it last. ``epoch``: create_revision of the owner's key."""

    record: BatchRecord
    mod_revision: int
    epoch: int


class BatchStore:
    """Raises StoreUnavailable, within a bounded time, while the store does not answer."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def file(self, tenant: str, file_id: str) -> Versioned[StoredFile]:
        """Return a file. Raises NotFound for one that expired, too."""
        found = await self._get(file_key(tenant, file_id), StoredFile) if FILE_ID.fullmatch(file_id) else None
        if found is None or found.record.expire_unix_s <= self._clock.unix_s():
            raise NotFound("there is no such file", field="file_id")
        return found

    async def batch(self, tenant: str, batch_id: str) -> Versioned[BatchRecord]:
        """Return a batch. Raises NotFound."""
        wanted = batch_key(tenant, batch_id)
        found = await self._get(wanted, BatchRecord) if BATCH_ID.fullmatch(batch_id) else None
        if found is None:
            raise NotFound("there is no such batch", field="batch_id")
        return found

    async def add_file(self, file: StoredFile) -> StoredFile:
        """Store a file and return it, or the one that has its id and did not expire. Raises Conflict."""
        key, mod_revision = file_key(file.tenant, file.file_id), 0
        for _ in range(_TRIES):
            outcome = await self._store.commit([Put(key, dump(file))], [ModRevisionIs(key, mod_revision)])
            if isinstance(outcome, Committed):
                return file
            found = await self._get(key, StoredFile)
            if found is not None and found.record.expire_unix_s > self._clock.unix_s():
                return found.record
            mod_revision = 0 if found is None else found.mod_revision
        raise _changed_meanwhile()

    async def delete_file(self, file: Versioned[StoredFile]) -> None:
        """Return once the file is not found. Raises Conflict if it changed meanwhile."""
        key = file_key(file.record.tenant, file.record.file_id)
        await self._changed([Delete(key)], [ModRevisionIs(key, file.mod_revision)])

    async def add_batch(self, batch: BatchRecord, file: Versioned[StoredFile]) -> BatchRecord:
        """Store a new batch while its input exists, and return it, or the one that has its id.

        The input is kept as long as the batch may run. Raises Conflict if the input changed.
        """
        key = batch_key(batch.tenant, batch.batch_id)
        input_key = file_key(batch.tenant, batch.input_file_id)
        conditions = [ModRevisionIs(key, 0), ModRevisionIs(input_key, file.mod_revision)]
        puts = [Put(key, dump(batch))]
        needed_unix_s = batch.expire_unix_s + ENDING_S
        if file.record.expire_unix_s < needed_unix_s:
            puts.append(Put(input_key, dump(replace(file.record, expire_unix_s=needed_unix_s))))
        try:
            outcome = await self._store.commit(puts, conditions)
        except StoreUnavailable:  # it may be stored
            outcome = await self._store.commit(puts, conditions)
        if isinstance(outcome, Committed):
            return batch
        found = await self._get(key, BatchRecord)
        if found is None:
            raise _changed_meanwhile()
        return found.record

    async def cancel(self, tenant: str, batch_id: str, now_unix_s: float) -> BatchRecord:
        """Return the batch, which ends from now on. Raises NotFound, or Conflict if it has ended."""
        for _ in range(_TRIES):
            found = await self.batch(tenant, batch_id)
            batch = found.record
            if batch.status.is_over:
                raise Conflict(f"the batch is {batch.status} and cannot be cancelled", status=batch.status)
            if batch.status is BatchStatus.CANCELLING:
                return batch
            batch = batch.cancelled(now_unix_s)
            key = batch_key(tenant, batch_id)
            outcome = await self._store.commit(
                [Put(key, dump(batch))], [ModRevisionIs(key, found.mod_revision)]
            )
            if isinstance(outcome, Committed):
                return batch
        raise StoreUnavailable("the batch changes all the time; cancel it again", retry_after_s=1.0)

    async def delete_batch(self, batch: Versioned[BatchRecord]) -> None:
        """Delete a batch that has not changed, with the files of its results."""
        record = batch.record
        key = batch_key(record.tenant, record.batch_id)
        results = [file_key(record.tenant, name) for name in (record.output_file_id, record.error_file_id)]
        deletes = [Delete(each) for each in (key, *results)]
        await self._store.commit(deletes, [ModRevisionIs(key, batch.mod_revision)])

    async def claim(self, tenant: str, batch_id: str, owner: str, lease_id: int) -> OwnedBatch | None:
        """Return the batch, which this owner runs as long as its lease holds; None if it is not free."""
        key = owner_key(tenant, batch_id)
        try:
            outcome = await self._store.commit(
                [Put(key, dump({"gateway": owner}), lease_id)], [ModRevisionIs(key, 0)]
            )
        except LeaseLost:
            return None
        if not isinstance(outcome, Committed):
            return None
        # The record is read behind the claim: a former owner cannot write any more.
        found = await self._get(batch_key(tenant, batch_id), BatchRecord)
        if found is None or found.record.status.is_over:
            await self.release(tenant, batch_id, outcome.revision)
            return None
        return OwnedBatch(found.record, found.mod_revision, outcome.revision)

    async def mark(
        self, tenant: str, batch_id: str, owner: str, lease_id: int, epoch: int, *, stalled: bool
    ) -> None:
        """State in the owner's key whether the batch is stalled."""
        key = owner_key(tenant, batch_id)
        value = dump({"gateway": owner, "stalled": stalled})
        with suppress(LeaseLost):
            await self._store.commit([Put(key, value, lease_id)], [CreateRevisionIs(key, epoch)])

    async def release(self, tenant: str, batch_id: str, epoch: int) -> None:
        """Let another gateway run the batch."""
        key = owner_key(tenant, batch_id)
        await self._store.commit([Delete(key)], [CreateRevisionIs(key, epoch)])

    async def advance(
        self, held: OwnedBatch, record: BatchRecord, files: Sequence[StoredFile] = ()
    ) -> OwnedBatch:
        """Write a batch of its owner, and files with it. A cancellation that came meanwhile is kept.

        Raises OwnershipLost. After StoreUnavailable the same call can be repeated.
        """
        key = batch_key(record.tenant, record.batch_id)
        fence = CreateRevisionIs(owner_key(record.tenant, record.batch_id), held.epoch)
        puts = [Put(file_key(file.tenant, file.file_id), dump(file)) for file in files]
        for _ in range(_TRIES):
            operations = [Put(key, dump(record)), *puts]
            outcome = await self._store.commit(operations, [fence, ModRevisionIs(key, held.mod_revision)])
            if isinstance(outcome, Committed):
                return OwnedBatch(record, outcome.revision, held.epoch)
            found = await self._get(key, BatchRecord)
            owner = await self._store.get(owner_key(record.tenant, record.batch_id))
            if found is None or owner is None or owner.create_revision != held.epoch:
                raise OwnershipLost
            cancel_unix_s = found.record.cancel_unix_s
            if cancel_unix_s:
                record = record.cancelled(cancel_unix_s)
            if found.record == record:  # an earlier attempt, whose outcome was not received
                return OwnedBatch(record, found.mod_revision, held.epoch)
            if found.record != held.record.cancelled(cancel_unix_s):
                raise OwnershipLost
            held = OwnedBatch(found.record, found.mod_revision, held.epoch)
        raise OwnershipLost

    async def all_of(self, tenant: str) -> tuple[list[Versioned[StoredFile]], list[Versioned[BatchRecord]]]:
        """Return the files and the batches of a tenant that are stored now."""
        return (
            await self._listed(f"{FILES}{tenant}/", StoredFile),
            await self._listed(f"{BATCHES}{tenant}/", BatchRecord),
        )

    async def named_parts(self) -> set[str]:
        """Return the digests that a file or a batch names now."""
        found: set[str] = set()
        for entry in (await self._store.list(FILES)).entries:
            found.update(part.digest for part in entry.load(StoredFile).parts)
        for entry in (await self._store.list(BATCHES)).entries:
            found.update(part.digest for part in entry.load(BatchRecord).parts)
        return found

    async def _changed(self, operations: Sequence[Put | Delete], conditions: Sequence[Condition]) -> None:
        if not isinstance(await self._store.commit(operations, conditions), Committed):
            raise _changed_meanwhile()

    async def _listed(self, prefix: str, kind: type[T]) -> list[Versioned[T]]:
        return [
            Versioned(entry.load(kind), entry.create_revision, entry.mod_revision)
            for entry in (await self._store.list(prefix)).entries
        ]

    async def _get(self, key: str, kind: type[T]) -> Versioned[T] | None:
        entry = await self._store.get(key)
        if entry is None:
            return None
        return Versioned(entry.load(kind), entry.create_revision, entry.mod_revision)


def _changed_meanwhile() -> Conflict:
    return Conflict("the file changed meanwhile; read it again", retry_after_s=0.1)
