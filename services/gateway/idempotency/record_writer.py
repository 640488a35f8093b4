"""Writes records behind their runs: output, lease renewals, and the ends that the store did not accept."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import StoreUnavailable
from services.core.shares import share_of
from services.gateway.idempotency.ownership import RecordOwnership, write_ending
from services.gateway.idempotency.run import KeyedRun
from services.gateway.idempotency.telemetry import EndingOutcome
from services.gateway.idempotency.types import KeyedPorts
from services.ports.idempotency import Written

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

    def __init__(self, ports: KeyedPorts, released: Callable[[KeyedRun], None]) -> None:
        """``released`` is called for each run that is no longer retained."""
        self._ports = ports
        self._released = released
        self._runs: OrderedDict[KeyedRun, None] = OrderedDict()
        self._of_tenant: Counter[str] = Counter()
        self._bytes = 0  # of the retained ends
        self._has_ends = asyncio.Event()  # at least one end is retained

    def __len__(self) -> int:
        return len(self._runs)

    def retain(self, run: KeyedRun) -> None:
        tenant_id = run.key.tenant_id
        self._runs[run] = None
        self._has_ends.set()
        self._of_tenant[tenant_id] += 1
        self._bytes += run.end_bytes
        if self._bytes > MAX_PENDING_BYTES:
            self._bound_bytes()
        crowded = self._of_tenant[tenant_id] > share_of(MAX_PENDING_ENDS)
        if crowded or len(self._runs) > MAX_PENDING_ENDS:
            dropped = next(each for each in self._runs if not crowded or each.key.tenant_id == tenant_id)
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
        runs = list(self._runs)
        for start in range(0, len(runs), _AT_ONCE):
            async with TaskGroup() as group:
                tries = [group.create_task(self._write(run)) for run in runs[start : start + _AT_ONCE]]
            if not any(found.result() for found in tries):
                return

    async def _write(self, run: KeyedRun) -> bool:
        """Whether it is written. An end that is not written moves behind the others."""
        assert run.pending_end is not None
        try:
            written = await write_ending(self._ports, run.pending_end)
        except StoreUnavailable:
            if run in self._runs:
                self._runs.move_to_end(run)
            return False
        if run in self._runs:  # not dropped meanwhile, nor written by another call of ``write``
            self._remove(run)
            fenced = written is Written.FENCED
            self._ports.telemetry.ending(EndingOutcome.FENCED if fenced else EndingOutcome.WRITTEN)
            self._released(run)
        return True

    def _bound_bytes(self) -> None:
        """Drop the answers of the largest ends until all are within the bound: they are charged, not kept."""
        for run in sorted(self._runs, key=lambda run: -run.end_bytes):
            if self._bytes <= MAX_PENDING_BYTES:
                return
            self._bytes -= run.end_bytes
            run.drop_answer()
            self._bytes += run.end_bytes
            log.warning("idempotency.output_not_kept", record=run.key.digest[:12])

    def _remove(self, run: KeyedRun) -> None:
        del self._runs[run]
        self._bytes -= run.end_bytes
        if not self._runs:
            self._has_ends.clear()
        self._of_tenant[run.key.tenant_id] -= 1
        if not self._of_tenant[run.key.tenant_id]:
            del self._of_tenant[run.key.tenant_id]

    def check_integrity(self) -> None:
        assert self._of_tenant == Counter(run.key.tenant_id for run in self._runs), (
            "tenants are counted wrongly"
        )
        assert self._bytes == sum(run.end_bytes for run in self._runs), "bytes are counted wrongly"
        assert len(self._runs) <= MAX_PENDING_ENDS, "more endings are kept than the bound allows"
        assert all(run.pending_end is not None for run in self._runs), "a kept run has nothing to write"
