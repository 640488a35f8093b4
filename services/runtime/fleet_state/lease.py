"""A lease on the store, kept alive. Its holder detects the loss before the store can grant it again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    CreateRevisionIs,
    Delete,
    Entry,
    LeaseLost,
    ModRevisionIs,
    Put,
    Store,
)
from services.runtime.supervisor import first_of

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


_PAUSE_S: Final = 1.0


class Registration:
    """Owner of one key. ``run`` is its only writer; ``update`` sets the value to store.

    The key is always created anew, so its create_revision, the incarnation, distinguishes two lives. A key
    that an earlier life left is removed with its lease. Two live processes with one key therefore replace
    each other's key, which is logged.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        value: bytes,
        clock: Clock,
        *,
        ttl_s: int = 5,
        rng: random.Random | None = None,
        created: Callable[[], None] = lambda: None,
    ) -> None:
        """``created`` is called whenever the key was created: it has a new incarnation."""
        self._store = store
        self._key = key
        self._value = value
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._lease = LeaseHolder(store, clock, ttl_s=ttl_s)
        self._created = created
        self._check_s = 2.0 * ttl_s
        self._incarnation: int | None = None
        self._written: bytes | None = None
        self._wanted = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def lease(self) -> LeaseHolder:
        return self._lease

    @property
    def incarnation(self) -> int | None:
        """The key's create_revision while the lease is certainly valid, else None."""
        return self._incarnation if self._lease.lease_id is not None else None

    def update(self, value: bytes) -> None:
        """Store this value soon. If updates follow each other, only the last may ever be stored."""
        self._value = value
        self._wanted.set()

    async def wait_registered(self, timeout_s: float) -> int:
        """Return the incarnation once the key has the newest value.

        Raises StoreUnavailable after ``timeout_s``.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.incarnation is None or self._written != self._value:
                    await self._moved.wait()
        incarnation = self.incarnation
        if incarnation is None or self._written != self._value:
            raise StoreUnavailable(f"{self._key} could not be registered within {timeout_s:g} s")
        return incarnation

    async def run(self) -> None:
        """Stay registered until cancelled; then remove the key, if the store responds."""
        try:
            while True:
                try:
                    await self._register()
                    await self._stay()
                except (StoreUnavailable, LeaseLost) as error:
                    log.warning("registration.failed", key=self._key, error=repr(error))
                self._incarnation, self._written = None, None
                await self._lease.release()
                await self._clock.sleep(self._rng.uniform(_PAUSE_S / 4, _PAUSE_S))
        finally:
            self._incarnation, self._written = None, None
            await self._lease.release()

    async def _register(self) -> None:
        lease_id = await self._lease.acquire()
        entry = await self._store.get(self._key)
        if entry is not None:
            await self._remove(entry)
        value = self._value
        outcome = await self._store.commit([Put(self._key, value, lease_id)], [ModRevisionIs(self._key, 0)])
        if not isinstance(outcome, Committed):
            raise StoreUnavailable(f"{self._key} was taken by another process")
        self._incarnation, self._written = outcome.revision, value
        log.info("registration.created", key=self._key, incarnation=outcome.revision)
        self._created()
        self._notify()

    async def _remove(self, entry: Entry) -> None:
        log.warning("registration.predecessor_removed", key=self._key, incarnation=entry.create_revision)
        if entry.lease_id:
            await self._store.revoke_lease(entry.lease_id)
        else:
            await self._store.commit([Delete(self._key)], [ModRevisionIs(self._key, entry.mod_revision)])

    async def _stay(self) -> None:
        """Return when the lease is lost. Raises LeaseLost when another process has replaced the key."""
        await first_of(self._lease.hold(), self._write_updates())

    async def _write_updates(self) -> None:
        """Write each new value, and check periodically that the key still exists."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._write() if self._value != self._written else await self._check()
            except StoreUnavailable as error:
                log.info("registration.write_failed", key=self._key, error=repr(error))
                await self._clock.sleep(self._rng.uniform(_PAUSE_S / 4, _PAUSE_S))
                self._wanted.set()

    async def _write(self) -> None:
        value, lease_id, incarnation = self._value, self._lease.lease_id, self._incarnation
        if lease_id is None or incarnation is None:
            raise LeaseLost("the lease ran out before the update")
        fence = CreateRevisionIs(self._key, incarnation)
        if not isinstance(await self._store.commit([Put(self._key, value, lease_id)], [fence]), Committed):
            raise LeaseLost(f"{self._key} was removed or taken")
        self._written = value
        self._notify()

    async def _check(self) -> None:
        entry = await self._store.get(self._key)
        if entry is None or entry.create_revision != self._incarnation:
            raise LeaseLost(f"{self._key} was removed or taken")

    def _notify(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
