"""Writes records behind their runs: the output, and the renewal of the leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import StoreUnavailable
from services.gateway.idempotency.ownership import Tenure
from services.gateway.idempotency.types import KeyedPorts
from services.ports.idempotency import Written

log = structlog.get_logger()

# Tenants whose records are written at once, and records per call. A lease lasts five seconds, so a write must
# not wait behind many calls that time out.
TENANTS_AT_ONCE: Final = 8
RECORDS_AT_ONCE: Final = 64


class RecordFlusher:
    """One task per tenant with pending writes; a tenant whose calls are slow delays no other."""

    def __init__(self, ports: KeyedPorts, owned: Callable[[], Iterable[Tenure]]) -> None:
        self._ports = ports
        self._owned = owned
        self._places = asyncio.Semaphore(TENANTS_AT_ONCE)
        self._writing: set[str] = set()

    async def flush_forever(self) -> None:
        async with TaskGroup() as group:
            while True:
                await self._ports.clock.sleep(self._ports.limits.flush_s)
                for tenant_id, tenures in self._due().items():
                    self._writing.add(tenant_id)
                    group.create_task(self._flush(tenant_id, tenures))

    def _due(self) -> dict[str, list[Tenure]]:
        """Return the pending writes by tenant, without those in progress."""
        now_s = self._ports.clock.monotonic_s()
        found: dict[str, list[Tenure]] = {}
        for tenure in self._owned():
            tenant_id = tenure.hold.key.tenant_id
            if tenant_id not in self._writing and tenure.due(now_s):
                found.setdefault(tenant_id, []).append(tenure)
        return found

    async def _flush(self, tenant_id: str, tenures: Sequence[Tenure]) -> None:
        try:
            async with self._places:
                for start in range(0, len(tenures), RECORDS_AT_ONCE):
                    await self._write(tenures[start : start + RECORDS_AT_ONCE])
        finally:
            self._writing.discard(tenant_id)

    async def _write(self, batch: Sequence[Tenure]) -> None:
        """Append for this batch in one call, except for ownerships that ended while they waited."""
        began_s = self._ports.clock.monotonic_s()
        tenures = [tenure for tenure in batch if tenure.due(began_s)]
        if not tenures:
            return
        writes = [tenure.begin_write() for tenure in tenures]
        answers: tuple[Written | None, ...] = (None,) * len(tenures)
        answered = False
        try:
            answers = await self._ports.store.append([addition for addition, _ in writes])
            answered = True
        except StoreUnavailable as error:
            log.info("idempotency.flush_failed", records=len(tenures), reason=error.reason)
        finally:
            for tenure, (_, pieces), answer in zip(tenures, writes, answers, strict=True):
                tenure.end_write(pieces, answer)
            elapsed_s = self._ports.clock.monotonic_s() - began_s
            self._ports.telemetry.flush(elapsed_s, answered=answered)
