"""A lease on the store, kept alive. Its holder detects the loss before the store can grant it again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import LeaseLost, Store

log = structlog.get_logger()
_RETRIES_PER_TTL: Final = 10


class LeaseHolder:
    """At most one lease at a time, owned by the task that calls ``acquire``, ``hold`` and ``release``.

    The store counts the time to live from the moment it handles a keep-alive. This side counts from before
    the keep-alive is sent. So ``lease_id`` is None by the time the store can grant it to another holder.
    """

    def __init__(self, store: Store, clock: Clock, *, ttl_s: int) -> None:
        self._store = store
        self._clock = clock
        self._ttl_s = ttl_s
        self._lease_id: int | None = None
        self._deadline_s = 0.0
        self.renewals = self.failures = self.losses = 0

    @property
    def lease_id(self) -> int | None:
        """The lease while it is certainly valid, else None. Depends on the time: read it before each use."""
        return self._lease_id if self.remaining_s() > 0 else None

    def remaining_s(self) -> float:
        """Return for how long the lease is certainly valid without another keep-alive; 0 when it is not."""
        return max(0.0, self._deadline_s - self._clock.monotonic_s()) if self._lease_id is not None else 0.0

    async def acquire(self) -> int:
        """Return the id of a new lease. Raises StoreUnavailable. Release an earlier lease first."""
        start_s = self._clock.monotonic_s()
        lease_id = await self._store.grant_lease(self._ttl_s)
        self._lease_id, self._deadline_s = lease_id, start_s + self._ttl_s
        return lease_id

    async def hold(self) -> None:
        """Keep the lease alive; return when it is lost, at the latest at its deadline by the local clock."""
        pause_s = self._ttl_s / 3
        while (remaining_s := self.remaining_s()) > 0:
            await self._clock.sleep(min(pause_s, remaining_s))
            if self.remaining_s() == 0:
                break
            try:
                pause_s = self._ttl_s / 3 if await self._keep_alive() else self._ttl_s / _RETRIES_PER_TTL
            except LeaseLost:
                break
        if self._lease_id is not None:
            log.warning("lease.lost", lease_id=f"{self._lease_id:x}")
            self.losses += 1
            self._deadline_s = 0.0

    async def release(self) -> None:
        """Revoke the lease, if any, with its keys. While the store is unavailable, it lapses instead."""
        lease_id, self._lease_id, self._deadline_s = self._lease_id, None, 0.0
        if lease_id is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke_lease(lease_id)

    async def _keep_alive(self) -> bool:
        """Return whether the store extended the lease. Raises LeaseLost."""
        if self._lease_id is None:
            raise LeaseLost("released")
        start_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(self.remaining_s()):
                await self._store.keep_alive(self._lease_id)
        except (StoreUnavailable, TimeoutError) as error:
            log.info("lease.keep_alive_failed", lease_id=f"{self._lease_id:x}", error=repr(error))
            self.failures += 1
            return False
        self.renewals += 1
        self._deadline_s = max(self._deadline_s, start_s + self._ttl_s)
        return True
