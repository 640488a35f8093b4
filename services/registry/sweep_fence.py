"""Fence between version creation and garbage collection: no version is created from chunks being deleted.

The key ``sweeping`` exists, under a lease, while a collector deletes. The key ``sweeps`` is written before
every batch of deletions. To create a version, the registry waits until no collector deletes, checks that the
chunks exist, and commits only if no batch has begun since. A collector writes both keys, lists the versions,
then deletes. The one that commits second observes the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog

from services.core.errors import Conflict, FairwayError, Unavailable
from services.core.records import ROOT
from services.ports.clock import Clock
from services.ports.store import Committed, Condition, ModRevisionIs, Put, Store

log = structlog.get_logger()

SWEEPING: Final = ROOT + "guards/registry-sweeping"
SWEEPS: Final = ROOT + "guards/registry-sweeps"
# A batch takes seconds. The lease is longer than a batch by more than one deletion takes (two requests of at
# most 10 s in a bucket), and it frees the fence after a crash.
LEASE_S: Final = 60
BATCH_S: Final = 30.0
_WAIT_S: Final = 20.0
_LOOK_S: Final = 0.2


class SweepFence:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def conditions(self) -> Sequence[Condition]:
        """Return the condition of a commit: no collector has deleted anything since. Waits while a collector
        deletes.

        Raises Unavailable when the wait takes too long.
        """
        deadline_s = self._clock.monotonic_s() + _WAIT_S
        while True:
            # Order matters: a sweep that starts after the first read changes the key that was read; one that
            # started before has ended by the second read or is observed by it.
            sweeps = await self._store.get(SWEEPS)
            if await self._store.get(SWEEPING) is None:
                return (ModRevisionIs(SWEEPS, sweeps.mod_revision if sweeps is not None else 0),)
            if self._clock.monotonic_s() > deadline_s:
                raise Unavailable("garbage is being collected: try again", retry_after_s=5.0)
            await self._clock.sleep(_LOOK_S)

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[Deadline]:
        """Block version creation until the yielded deadline. Raises Conflict while another collector
        sweeps."""
        lease_id = await self._store.grant_lease(LEASE_S)
        try:
            deadline = Deadline(self._clock)
            done = await self._store.commit(
                [Put(SWEEPING, b"", lease_id), Put(SWEEPS, b"")], [ModRevisionIs(SWEEPING, 0)]
            )
            if not isinstance(done, Committed):
                raise Conflict("garbage is being collected by another registry")
            yield deadline
        finally:
            await self._release(lease_id)

    async def _release(self, lease_id: int) -> None:
        try:
            await self._store.revoke_lease(lease_id)
        except FairwayError as error:  # the lease expires by itself
            log.info("sweep_fence.release_failed", error=error.message)


class Deadline:
    """Time limit of a batch. It is counted from before the fence was created, so it never ends late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock.monotonic_s() + BATCH_S

    @property
    def has_passed(self) -> bool:
        return self._clock.monotonic_s() > self._until_s
