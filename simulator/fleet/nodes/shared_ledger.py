"""The usage ledger's store, as control planes reach it: named objects, on the far side of the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from services.core.errors import NotFound, StoreUnavailable
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process

LEDGER: Final = "ledger"
_TIMEOUT_S: Final = 5.0
T = TypeVar("T")


class LedgerObjects:
    """What the store holds. It outlives the process, as on a disk."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def create(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    async def names(self, prefix: str, after: str) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.objects if name.startswith(prefix) and name > after))

    async def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise NotFound(f"the ledger has no {name}", name=name)
        return self.objects[name]

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)


def serve_ledger(process: Process, network: Network, ledger: LedgerObjects) -> None:
    """Answer control planes until the process crashes."""
    network.listen(process, LEDGER, lambda connection: None, answers=ledger)


class RemoteLedger:
    """Implements ``ports.ledger_store.LedgerStore`` for one process."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def create(self, name: str, data: bytes) -> bool:
        return await self._ask(lambda ledger: ledger.create(name, data))

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        return await self._ask(lambda ledger: ledger.names(prefix, after))

    async def read(self, name: str) -> bytes:
        return await self._ask(lambda ledger: ledger.read(name))

    async def delete(self, names: Sequence[str]) -> None:
        await self._ask(lambda ledger: ledger.delete(names))

    async def _ask(self, question: Callable[[LedgerObjects], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._network.ask(self._process, LEDGER, question, within_s=_TIMEOUT_S)
        except Unreachable as error:
            raise StoreUnavailable("the ledger did not answer in time", retry_after_s=1.0) from error
