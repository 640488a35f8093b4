"""What keeps a version from being made of chunks that garbage collection is deleting.

Two keys: ``sweeping`` is there, under a lease, while somebody deletes; ``sweeps`` is written before every
batch of deletions. Whoever makes a version waits until nobody deletes, looks for its chunks, and commits
only if no batch began since. Whoever deletes writes both, looks which versions there are, then deletes.
Whichever commits first, the other sees it.
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
# A batch takes seconds. Its lease outlasts it by more than one deletion takes (two requests of at most 10 s
# in a bucket), and frees the fence after a crash.
LEASE_S: Final = 60
BATCH_S: Final = 30.0
_WAIT_S: Final = 20.0
_LOOK_S: Final = 0.2


class SweepFence:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def conditions(self) -> Sequence[Condition]:
        """Return what a commit has to hold to: nobody has deleted anything since. Waits while somebody does.

        Raises Unavailable when that takes too long.
        """
        deadline_s = self._clock.monotonic_s() + _WAIT_S
        while True:
            # In this order: a sweep that begins after the first look moves the key that was looked at, one
            # that began before is over at the second look or seen by it.
            sweeps = await self._store.get(SWEEPS)
            if await self._store.get(SWEEPING) is None:
                return (ModRevisionIs(SWEEPS, sweeps.mod_revision if sweeps is not None else 0),)
            if self._clock.monotonic_s() > deadline_s:
                raise Unavailable("garbage is being collected: try again", retry_after_s=5.0)
            await self._clock.sleep(_LOOK_S)

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[Deadline]:
        """Nobody makes a version until the yielded deadline. Raises Conflict when another one sweeps."""
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
        except FairwayError as error:  # it ends by itself
            log.info("sweep_fence.release_failed", error=error.message)


class Deadline:
    """When a batch must have ended. It is counted from before the fence was up, so it is never late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock.monotonic_s() + BATCH_S

    @property
    def has_passed(self) -> bool:
        return self._clock.monotonic_s() > self._until_s
