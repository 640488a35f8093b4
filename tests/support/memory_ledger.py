"""The usage ledger's objects in this process, for tests. ``before`` and ``after`` run around each write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.core.errors import NotFound


def _nothing(operation: str, name: str) -> None:
    return None


class MemoryLedger:
    """``TileStore`` in memory. A hook may raise StoreUnavailable: before or after the effect."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.before: Callable[[str, str], None] = _nothing
        self.after: Callable[[str, str], None] = _nothing

    async def create(self, name: str, data: bytes) -> bool:
        await asyncio.sleep(0)
        self.before("create", name)
        created = self.objects.setdefault(name, data) is data
        self.after("create", name)
        return created

    async def replace(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0)
        self.before("replace", name)
        self.objects[name] = data
        self.after("replace", name)

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        await asyncio.sleep(0)
        return tuple(sorted(name for name in self.objects if name.startswith(prefix) and name > after))

    async def read(self, name: str) -> bytes:
        await asyncio.sleep(0)
        if name not in self.objects:
            raise NotFound(f"the ledger has no {name}", name=name)
        return self.objects[name]

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            await asyncio.sleep(0)
            self.before("delete", name)
            self.objects.pop(name, None)
            self.after("delete", name)
