"""Deletes what is stored of erased tenants. Their keys are destroyed already: what is left does not open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import structlog

from services.core.errors import FairwayError
from services.core.records import TENANT_KEYS, TenantKeyring, dump
from services.gateway.batches.files import FileService
from services.gateway.response_cache import CACHE_SPACE
from services.gateway.responses.store import RESPONSES_SPACE
from services.ports.clock import Clock
from services.ports.store import ModRevisionIs, Put, Store
from services.runtime.fleet_state.informer import RecordView, Versioned

log = structlog.get_logger()

_ROUND_S: Final = 2.0
SPACES: Final = ("", RESPONSES_SPACE, CACHE_SPACE)


class Erasure:
    """``run`` is a task of each gateway; each step may be repeated by another one."""

    def __init__(
        self,
        rings: RecordView[TenantKeyring],
        store: Store,
        files: FileService,
        clock: Clock,
        *,
        erase_records: Callable[[str], Awaitable[int]],
        may_hold: Callable[[str], bool],
    ) -> None:
        """``erase_records`` deletes the records of a tenant or of a space of it; it returns their number.
        ``may_hold``: whether the stores of this gateway are those of a tenant."""
        self._rings = rings
        self._store = store
        self._files = files
        self._clock = clock
        self._erase_records = erase_records
        self._may_hold = may_hold

    async def run(self) -> None:
        """Collect what is stored of erased tenants, until cancelled; survives an outage of the stores."""
        while True:
            await self._clock.sleep(_ROUND_S)
            for key, held in list(self._rings.view.items()):
                tenant, ring = key.removeprefix(TENANT_KEYS), held.record
                if ring.erase_unix_s and not ring.collect_unix_s and self._may_hold(tenant):
                    try:
                        await self._collect(tenant, held)
                    except FairwayError as error:
                        log.warning("erasure.failed", tenant=tenant, error=error.message)

    async def _collect(self, tenant: str, held: Versioned[TenantKeyring]) -> None:
        parts = await self._files.erase(tenant)
        records = 0
        for space in SPACES:
            records += await self._erase_records(tenant + space)
        key = TENANT_KEYS + tenant
        ring = replace(held.record, collect_unix_s=self._clock.unix_s())
        await self._store.commit([Put(key, dump(ring))], [ModRevisionIs(key, held.mod_revision)])
        log.info("erasure.collected", tenant=tenant, parts=parts, records=records)
