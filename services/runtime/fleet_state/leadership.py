"""Leader election: a key created under a lease. Its create_revision is the epoch that fences the leader's
writes.

No locks: a leader counts its lease as lost before the store can grant it to another one, and every process
that has seen a newer epoch rejects an older one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import aclosing
from typing import Final, Protocol

import structlog

from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    CreateRevisionIs,
    KeyRemoved,
    LeaseLost,
    ModRevisionIs,
    Put,
    Store,
)
from services.runtime.fleet_state.lease import LeaseHolder, Registration
from services.runtime.supervisor import first_of

__all__ = ["Election", "Leadership", "LeaseHolder", "Registration"]

log = structlog.get_logger()
_PAUSE_S: Final = 0.5


class Leadership(Protocol):
    """Whether this process leads. The parts of ``Election`` that its owner does not run."""

    @property
    def epoch(self) -> int | None: ...

    def fence(self, epoch: int) -> CreateRevisionIs:
        """Return the condition of a write that the store refuses once another process leads."""

    async def wait_leading(self) -> int: ...

    async def wait_lost(self, epoch: int) -> None: ...


class Election:
    """A candidate for one key. ``run`` campaigns, leads and campaigns again until cancelled."""

    def __init__(
        self,
        store: Store,
        key: str,
        leader_record: bytes,
        ttl_s: int,
        clock: Clock,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._leader_record = leader_record
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._lease = LeaseHolder(store, clock, ttl_s=ttl_s)
        self._epoch: int | None = None
        self._turned = asyncio.Event()

    @property
    def lease(self) -> LeaseHolder:
        return self._lease

    @property
    def epoch(self) -> int | None:
        """The epoch while this process certainly leads, else None. Depends on the time: read it before each
        use."""
        return self._epoch if self._lease.lease_id is not None else None

    def fence(self, epoch: int) -> CreateRevisionIs:
        return CreateRevisionIs(self._key, epoch)

    async def wait_leading(self) -> int:
        """Return the epoch once this process leads, however long that takes."""
        while (epoch := self.epoch) is None:
            await self._turned.wait()
        return epoch

    async def wait_lost(self, epoch: int) -> None:
        """Return once that epoch is over, at the latest when its lease may expire."""
        while self.epoch == epoch:
            await self._turned.wait()

    async def run(self) -> None:
        """Campaign until cancelled; then resign, so that a standby leads at once."""
        try:
            while True:
                try:
                    await self._campaign()
                    await first_of(self._lease.hold(), self._wait_removed(self._epoch or 0))
                except (StoreUnavailable, LeaseLost) as error:
                    log.warning("election.interrupted", key=self._key, error=repr(error))
                await self._step_down()
                await self._clock.sleep(self._rng.uniform(_PAUSE_S / 4, _PAUSE_S))
        finally:
            await self._step_down()

    async def _campaign(self) -> None:
        """Return as the leader. Each attempt takes a new lease, and only when the key does not exist."""
        while True:
            entry = await self._store.get(self._key)
            if entry is not None:
                await self._wait_removed(entry.create_revision)
                continue
            lease_id = await self._lease.acquire()
            put = Put(self._key, self._leader_record, lease_id)
            outcome = await self._store.commit([put], [ModRevisionIs(self._key, 0)])
            if isinstance(outcome, Committed):
                self._lead(outcome.revision)
                return
            await self._lease.release()

    async def _wait_removed(self, epoch: int) -> None:
        """Return when the key created at ``epoch`` is deleted. Retries while the store is unavailable."""
        after_revision = epoch
        while True:
            try:
                async with aclosing(self._store.watch(self._key, after_revision)) as batches:
                    async for batch in batches:
                        if any(isinstance(e, KeyRemoved) and e.key == self._key for e in batch.events):
                            return
                        after_revision = batch.revision
            except StoreUnavailable as error:
                log.info("election.watch_lost", key=self._key, error=repr(error))
            except Compacted:
                with contextlib.suppress(StoreUnavailable):
                    listing = await self._store.list(self._key)
                    if not any(e.key == self._key and e.create_revision == epoch for e in listing.entries):
                        return
                    after_revision = listing.revision
            await self._clock.sleep(self._rng.uniform(_PAUSE_S / 4, _PAUSE_S))

    def _lead(self, epoch: int) -> None:
        self._epoch = epoch
        log.info("election.won", key=self._key, epoch=epoch)
        self._turn()

    async def _step_down(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            log.info("election.stepped_down", key=self._key, epoch=epoch)
            self._turn()
        await self._lease.release()

    def _turn(self) -> None:
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()
