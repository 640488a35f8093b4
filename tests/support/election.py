"""An election that a test decides."""

from __future__ import annotations

import asyncio

from services.core.records import leader_key
from services.ports.store import CreateRevisionIs


class StaticElection:
    """Implements ``Leadership``. Several may lead at once, as when one was frozen."""

    def __init__(self, epoch: int | None = None, key: str = leader_key("controlplane")) -> None:
        self.epoch = epoch
        self._key = key
        self._turned = asyncio.Event()

    def turn(self, epoch: int | None) -> None:
        """Win with this epoch, or lose."""
        self.epoch = epoch
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    def fence(self, epoch: int) -> CreateRevisionIs:
        return CreateRevisionIs(self._key, epoch)

    async def wait_leading(self) -> int:
        while self.epoch is None:
            await self._turned.wait()
        return self.epoch

    async def wait_lost(self, epoch: int) -> None:
        while self.epoch == epoch:
            await self._turned.wait()
