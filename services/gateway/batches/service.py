"""Batches as their tenants see them: created, listed, read and cancelled. ``owner.py`` runs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from services.core.batches import BATCHES, BatchRecord, FilePurpose, id_of_key
from services.core.errors import IdempotencyConflict, InvalidInput, NotFound, OverQuota
from services.core.generation import Principal
from services.gateway.batches.files import FileService
from services.gateway.batches.store import BatchStore
from services.ports.clock import Clock
from services.runtime.fleet_state.informer import RecordView, Versioned

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_WINDOW_H: Final = 168
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,2})h")
_HOUR_S: Final = 3600.0
# More than one where gateways created batches at once, beyond what each observed.
_EVICTED_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class TenantBatchLimits:
    """Bounds of a tenant's batches. At ``max_batches`` a new one evicts those that ended first."""

    max_unfinished: int = 100
    max_batches: int = 5000


class BatchService:
    """Raises the tree of ``core/errors.py``."""

    def __init__(
        self,
        files: FileService,
        store: BatchStore,
        batches: RecordView[BatchRecord],
        clock: Clock,
        limits: TenantBatchLimits,
        *,
        new_id: Callable[[], str],
    ) -> None:
        """``new_id`` returns 24 random hex digits."""
        self.files = files
        self._store = store
        self._batches = batches
        self._clock = clock
        self._limits = limits
        self._new_id = new_id

    async def create(
        self,
        principal: Principal,
        file_id: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str],
        *,
        key: str = "",
    ) -> BatchRecord:
        """Return a new batch, which some gateway validates and runs. ``key``: an idempotency key, whose
        batch is returned once there is one.

        Raises NotFound without the file, InvalidInput, OverQuota, or IdempotencyConflict.
        """
        if endpoint not in ENDPOINTS:
            raise InvalidInput(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
        window_s = window_seconds(window)
        now_s = self._clock.unix_s()
        batch = BatchRecord(
            f"batch_{id_of_key('batch', principal.tenant_id, key) if key else self._new_id()}",
            principal.tenant_id,
            principal.key_id,
            endpoint,
            file_id,
            f"file-{self._new_id()}",
            f"file-{self._new_id()}",
            window,
            now_s,
            now_s + window_s,
            metadata=dict(metadata),
        )
        if key:
            with suppress(NotFound):
                return _same(batch, (await self._store.batch(batch.tenant, batch.batch_id)).record)
        file = await self._store.file(principal.tenant_id, file_id)
        if file.record.purpose is not FilePurpose.BATCH:
            raise InvalidInput("the file's purpose is not batch", field="input_file_id")
        mine = self._held(principal.tenant_id)
        self._check_bounds(principal.tenant_id, mine)
        found = await self._store.add_batch(batch, file)
        if found is batch:
            await self._evict(mine)
        return _same(batch, found)

    def _check_bounds(self, tenant: str, mine: list[Versioned[BatchRecord]]) -> None:
        """Raise OverQuota for a tenant at a bound."""
        if self.files.room_bytes(tenant) <= 0:
            raise OverQuota("the tenant's files have no room for results; delete some")
        unfinished = sum(not held.record.status.is_over for held in mine)
        if unfinished >= self._limits.max_unfinished:
            raise OverQuota(
                f"the tenant has {unfinished} unfinished batches, the maximum; cancel some, or wait for one",
                unfinished=unfinished,
            )

    async def _evict(self, mine: list[Versioned[BatchRecord]]) -> None:
        """Delete what is above the bound with one more batch: those that ended first, with their results."""
        ended = sorted(
            (held for held in mine if held.record.status.is_over),
            key=lambda held: (held.record.end_unix_s, held.record.batch_id),
        )
        for held in ended[: min(_EVICTED_AT_ONCE, max(0, len(mine) - self._limits.max_batches + 1))]:
            await self._store.delete_batch(held)

    async def batch(self, principal: Principal, batch_id: str) -> BatchRecord:
        """Return a batch. Raises NotFound."""
        return (await self._store.batch(principal.tenant_id, batch_id)).record

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return the tenant's batches, the newest first."""
        found = [held.record for held in self._held(tenant)]
        return sorted(found, key=lambda batch: (-batch.create_unix_s, batch.batch_id))

    def _held(self, tenant: str) -> list[Versioned[BatchRecord]]:
        prefix = f"{BATCHES}{tenant}/"
        return [held for key, held in self._batches.view.items() if key.startswith(prefix)]

    async def cancel(self, principal: Principal, batch_id: str) -> BatchRecord:
        """Return the batch, which ends soon. Raises NotFound, or Conflict if it has ended."""
        return await self._store.cancel(principal.tenant_id, batch_id, self._clock.unix_s())


def _same(wanted: BatchRecord, found: BatchRecord) -> BatchRecord:
    """Return the batch that was found. Raises IdempotencyConflict if it is of another request."""
    for name in ("endpoint", "input_file_id", "window", "metadata"):
        if getattr(wanted, name) != getattr(found, name):
            raise IdempotencyConflict(
                "this idempotency key was used for another request; take a new key for a new request",
                field="idempotency_key",
            )
    return found


def window_seconds(window: str) -> float:
    """Return the seconds of a completion window such as ``24h``. Raises InvalidInput."""
    found = _WINDOW.fullmatch(window)
    if found is None or int(found[1]) > MAX_WINDOW_H:
        raise InvalidInput(
            f"completion_window is in hours, such as 24h, and at most {MAX_WINDOW_H}h",
            field="completion_window",
        )
    return int(found[1]) * _HOUR_S
