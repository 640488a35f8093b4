"""The records of this gateway's idempotency keys, one for each key and body, and the writes to them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import ConcurrencyExceeded, FairwayError, StoreUnavailable
from services.core.limits import share_of
from services.gateway.events import Delivered, RequestSink
from services.gateway.idempotency.followers import RecordFollower, copy_of
from services.gateway.idempotency.ownership import Launch, RecordOwnership, write_ending
from services.gateway.idempotency.record import Enter, KeyedRecord
from services.gateway.idempotency.telemetry import EndingOutcome, KeyOutcome
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.service_types import RequestCapacity, subtract
from services.ports.idempotency import RecordKey, Written
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

# Tenants whose records are written at once, and records per call. A lease lasts five seconds, so a write must
# not wait behind many calls that time out.
TENANTS_AT_ONCE: Final = 8
RECORDS_AT_ONCE: Final = 64
# Ends that the store has not accepted yet, and how many of them are tried at once.
MAX_PENDING_ENDS: Final = 10_000
_AT_ONCE: Final = 8
# The bytes of all these ends; above them, the largest are ended as too large to keep.
MAX_PENDING_BYTES: Final = 256 * 1024**2


class RecordFlusher:
    """One task per tenant with pending writes; a tenant whose calls are slow delays no other."""

    def __init__(self, ports: KeyedPorts, owned: Callable[[], Iterable[RecordOwnership]]) -> None:
        self._ports = ports
        self._owned = owned
        self._places = asyncio.Semaphore(TENANTS_AT_ONCE)
        self._writing: set[str] = set()

    def start_writes(self, group: TaskGroup) -> None:
        """Write in the group what is due, without waiting for it."""
        for tenant_id, ownerships in self._due().items():
            self._writing.add(tenant_id)
            group.create_task(self._flush(tenant_id, ownerships))

    def _due(self) -> dict[str, list[RecordOwnership]]:
        """Return the pending writes by tenant, without those in progress."""
        now_s = self._ports.clock.monotonic_s()
        found: dict[str, list[RecordOwnership]] = {}
        for ownership in self._owned():
            tenant_id = ownership.hold.key.tenant_id
            if tenant_id not in self._writing and ownership.due(now_s):
                found.setdefault(tenant_id, []).append(ownership)
        return found

    async def _flush(self, tenant_id: str, ownerships: Sequence[RecordOwnership]) -> None:
        try:
            async with self._places:
                for start in range(0, len(ownerships), RECORDS_AT_ONCE):
                    await self._write(ownerships[start : start + RECORDS_AT_ONCE])
        finally:
            self._writing.discard(tenant_id)

    async def _write(self, batch: Sequence[RecordOwnership]) -> None:
        """Append for this batch in one call, except for ownerships that ended while they waited."""
        began_s = self._ports.clock.monotonic_s()
        ownerships = [ownership for ownership in batch if ownership.due(began_s)]
        if not ownerships:
            return
        writes = [ownership.begin_write() for ownership in ownerships]
        answers: tuple[Written | None, ...] = (None,) * len(ownerships)
        answered = False
        try:
            answers = await self._ports.store.append([addition for addition, _ in writes])
            answered = True
        except StoreUnavailable as error:
            log.info("idempotency.flush_failed", records=len(ownerships), reason=error.reason)
        finally:
            for ownership, (_, pieces), answer in zip(ownerships, writes, answers, strict=True):
                ownership.end_write(pieces, answer)
            elapsed_s = self._ports.clock.monotonic_s() - began_s
            self._ports.telemetry.flush(elapsed_s, answered=answered)


class PendingRecordEnds:
    """Retains ends until the store accepts them, and replays them from memory. Above the bound, the oldest
    are dropped. A tenant with more than half of the bound loses its own oldest.
    """

    def __init__(self, ports: KeyedPorts, released: Callable[[KeyedRecord], None]) -> None:
        """``released`` is called for each record that is no longer retained."""
        self._ports = ports
        self._released = released
        self._records: OrderedDict[KeyedRecord, None] = OrderedDict()
        self._of_tenant: Counter[str] = Counter()
        self._bytes = 0  # size of the retained ends
        self._has_ends = asyncio.Event()  # set while an end is retained

    def __len__(self) -> int:
        return len(self._records)

    def retain(self, record: KeyedRecord) -> None:
        tenant_id = record.key.tenant_id
        self._records[record] = None
        self._has_ends.set()
        self._of_tenant[tenant_id] += 1
        self._bytes += record.end_bytes
        if self._bytes > MAX_PENDING_BYTES:
            self._bound_bytes()
        crowded = self._of_tenant[tenant_id] > share_of(MAX_PENDING_ENDS)
        if crowded or len(self._records) > MAX_PENDING_ENDS:
            dropped = next(each for each in self._records if not crowded or each.key.tenant_id == tenant_id)
            self._remove(dropped)
            self._ports.telemetry.ending(EndingOutcome.DROPPED)
            log.error("idempotency.end_dropped", record=dropped.key.digest[:12])
            self._released(dropped)

    async def write_forever(self) -> None:
        """Try the ends at each interval, while there are any."""
        while True:
            await self._has_ends.wait()
            await self._ports.clock.sleep(self._ports.limits.flush_s)
            await self.write()

    async def write(self) -> None:
        """Try each end once, oldest first; stop when the store accepts nothing."""
        records = list(self._records)
        for start in range(0, len(records), _AT_ONCE):
            batch = records[start : start + _AT_ONCE]
            async with TaskGroup() as group:
                tries = [group.create_task(self._write(record)) for record in batch]
            if not any(found.result() for found in tries):
                return

    async def _write(self, record: KeyedRecord) -> bool:
        """Whether it is written. An end that is not written moves behind the others."""
        assert record.pending_end is not None
        try:
            written = await write_ending(self._ports, record.pending_end)
        except StoreUnavailable:
            if record in self._records:
                self._records.move_to_end(record)
            return False
        if record in self._records:  # not dropped meanwhile, nor written by another call of ``write``
            self._remove(record)
            fenced = written is Written.FENCED
            self._ports.telemetry.ending(EndingOutcome.FENCED if fenced else EndingOutcome.WRITTEN)
            self._released(record)
        return True

    def _bound_bytes(self) -> None:
        """Drop the answers of the largest ends until all are within the bound: they are charged, not kept."""
        for record in sorted(self._records, key=lambda record: -record.end_bytes):
            if self._bytes <= MAX_PENDING_BYTES:
                return
            self._bytes -= record.end_bytes
            record.drop_answer()
            self._bytes += record.end_bytes
            log.warning("idempotency.output_not_kept", record=record.key.digest[:12])

    def _remove(self, record: KeyedRecord) -> None:
        del self._records[record]
        self._bytes -= record.end_bytes
        if not self._records:
            self._has_ends.clear()
        subtract(self._of_tenant, record.key.tenant_id)

    def check_integrity(self) -> None:
        assert self._of_tenant == Counter(record.key.tenant_id for record in self._records), (
            "tenants are counted wrongly"
        )
        assert self._bytes == sum(record.end_bytes for record in self._records), "bytes are counted wrongly"
        assert len(self._records) <= MAX_PENDING_ENDS, "more endings are kept than the bound allows"
        assert all(record.pending_end is not None for record in self._records), (
            "a kept record has nothing to write"
        )


class KeyedRecords:
    """Every duplicate of a request that reaches this gateway joins the single request of it."""

    def __init__(
        self, ports: KeyedPorts, supervisor: Supervisor, capacity: RequestCapacity, enter: Enter
    ) -> None:
        self._ports = ports
        self._enter = enter
        self._supervisor = supervisor
        self._capacity = capacity
        self._records: dict[tuple[RecordKey, str], KeyedRecord] = {}
        self._has_records = asyncio.Event()  # set while a record exists
        self._followers: dict[RecordFollower, str] = {}
        self._per_tenant: Counter[str] = Counter()
        self._flusher = RecordFlusher(ports, self.owned)
        self._pending_ends = PendingRecordEnds(ports, self._forget)
        ports.telemetry.export_levels(
            followers=lambda: len(self._followers),
            owned=lambda: sum(1 for _ in self.owned()),
            pending_ends=lambda: len(self._pending_ends),
        )

    @property
    def busy(self) -> int:
        """How many requests and clients a drain has to wait for."""
        return sum(record.pending_end is None for record in self._records.values()) + len(self._followers)

    def owned(self) -> Iterator[RecordOwnership]:
        """Yield the records whose requests record on this gateway."""
        return (record.ownership for record in self._records.values() if record.ownership is not None)

    def attach(
        self,
        key: RecordKey,
        fingerprint: str,
        sink: RequestSink,
        launch: Launch,
        *,
        timeout_s: float,
        client_window: int | None,
        delivered: Delivered | None,
    ) -> RecordFollower:
        """Return the handle of a client of the key's request, which is started, joined or replayed.

        ``launch`` returns the request, if this gateway has to run it. Raises ConcurrencyExceeded,
        ResultExpired.
        """
        most = self._ports.limits.max_tenant_followers
        if self._per_tenant[key.tenant_id] >= most:
            self._ports.telemetry.clients(key.tenant_id, KeyOutcome.REFUSED)
            raise ConcurrencyExceeded(
                f"this gateway serves {most} clients of this tenant's idempotency keys, the maximum",
                retry_after_s=1.0,
                limit=most,
            )
        name = (key, fingerprint)
        record = self._records.get(name)
        first = record is None or not record.joinable
        if record is None or first:
            record = self._records[name] = KeyedRecord(
                key, fingerprint, self._ports, launch, self._enter, self._departed
            )
            self._has_records.set()
        follower = record.join(sink, client_window, delivered, first=first)
        self._followers[follower] = key.tenant_id
        self._per_tenant[key.tenant_id] += 1
        self._capacity.enter(key.tenant_id)
        follower.limit_to(timeout_s)
        if first:
            task = self._supervisor.spawn(f"keyed {key.digest[:12]}", record.serve())
            record.start(task)
            task.add_done_callback(partial(self._end, record))
        return follower

    async def flush_forever(self) -> None:
        """Write the output behind the requests, and renew their leases; a task of the process.

        It does so at each interval while there are records, and sleeps otherwise.
        """
        async with TaskGroup() as group:
            group.create_task(self._pending_ends.write_forever())
            while True:
                await self._has_records.wait()
                await self._ports.clock.sleep(self._ports.limits.flush_s)
                self._bound_memory()
                self._flusher.start_writes(group)

    async def write_endings(self) -> None:
        """Retry once the ends that the store did not accept."""
        await self._pending_ends.write()

    def stop(self, error: FairwayError) -> None:
        """End every request and client here; other gateways can continue."""
        for record in list(self._records.values()):
            record.stop(error)
        for follower in list(self._followers):
            follower.failed(copy_of(error))

    def check_integrity(self) -> None:
        assert sum(self._per_tenant.values()) == len(self._followers), "clients are counted wrongly"
        self._pending_ends.check_integrity()

    def _bound_memory(self) -> None:
        """Grant credit, and stop retaining outputs that are too large, the largest first."""
        limits, total = self._ports.limits, 0
        of_tenant: Counter[str] = Counter()
        sized = [(record.broadcast.log.size_bytes, record) for record in self._records.values()]
        for size, record in sorted(sized, key=lambda found: found[0]):
            record.trim_output()
            total += size
            of_tenant[record.key.tenant_id] += size
            crowded = total > limits.max_logs_bytes
            crowded |= of_tenant[record.key.tenant_id] > share_of(limits.max_logs_bytes)
            if record.broadcast.whole and (size > limits.max_log_bytes or crowded):
                log.warning("idempotency.output_not_kept", record=record.key.digest[:12], size_bytes=size)
                record.stop_retaining()

    def _departed(self, follower: RecordFollower) -> None:
        tenant_id = self._followers.pop(follower, None)
        if tenant_id is not None:
            subtract(self._per_tenant, tenant_id)
            self._capacity.leave(tenant_id)

    def _end(self, record: KeyedRecord, _: asyncio.Task[None]) -> None:
        record.close()
        if record.pending_end is None:
            self._forget(record)
        else:
            self._pending_ends.retain(record)

    def _forget(self, record: KeyedRecord) -> None:
        name = (record.key, record.fingerprint)
        if self._records.get(name) is record:
            del self._records[name]
            if not self._records:
                self._has_records.clear()
