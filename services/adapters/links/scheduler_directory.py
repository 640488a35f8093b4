"""The address of the leading scheduler, from the store's leader key."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from random import Random
from typing import Protocol

from services.core.records import Leader, leader_key
from services.ports.clock import Clock
from services.ports.store import Store
from services.runtime.fleet_state.informer import Informer


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """``epoch`` is the key's create_revision. A hint: only the epoch that the leader itself sends counts."""

    leader_id: str
    address: str
    epoch: int


class LeaderDirectory(Protocol):
    """The current leader as last observed; may be out of date."""

    @property
    def leader(self) -> LeaderAddress | None: ...

    async def wait_changed(self, seen: LeaderAddress | None, timeout_s: float) -> LeaderAddress | None:
        """Return the leader once it differs from ``seen``, or the current one after the timeout."""


class SchedulerDirectory:
    """Implements ``LeaderDirectory`` over an informer on the leader key. The owner runs ``run``.

    While the store is unavailable, the last observed leader stays.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        role: str = "scheduler",
        shard: str = "0",
        rng: Random | None = None,
    ) -> None:
        self._key = leader_key(role, shard)
        self._informer: Informer[Leader] = Informer(
            store, self._key, lambda entry: entry.load(Leader), clock, rng=rng
        )

    @property
    def informer(self) -> Informer[Leader]:
        """The informer that this directory reads."""
        return self._informer

    @property
    def leader(self) -> LeaderAddress | None:
        found = self._informer.view.get(self._key)
        if found is None:
            return None
        return LeaderAddress(found.record.leader_id, found.record.address, found.create_revision)

    async def wait_changed(self, seen: LeaderAddress | None, timeout_s: float) -> LeaderAddress | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    revision, leader = self._informer.revision, self.leader
                    if leader != seen:
                        break
                    await self._informer.wait_changed(revision, timeout_s)
        return self.leader

    async def run(self) -> None:
        """Follow the store until cancelled."""
        await self._informer.run()
