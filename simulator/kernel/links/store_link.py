"""The fleet store over the simulated network: one MemoryStore behind a server, a client per process.

The server answers each call from its present state, and feeds all watches from a single one, as etcd does. It
can be paused, cut off or crashed like any process; what it stored outlives it, as on a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from services.adapters.memory.store import MemoryStore
from services.core.errors import StoreUnavailable
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    Entry,
    KeyChanged,
    KeyRemoved,
    Listing,
    Operation,
    WatchBatch,
)
from simulator.kernel.connection import Broken, Silent, SimConnection
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process

T = TypeVar("T")

STORE: Final = "store"
_HISTORY: Final = 10_000  # batches


@dataclass(frozen=True, slots=True)
class _Watch:
    prefix: str
    after_revision: int


class StoreServer:
    """Serves a MemoryStore at an address until its process crashes. The store's clock is the caller's choice:
    leases end by it."""

    def __init__(
        self,
        process: Process,
        network: Network,
        store: MemoryStore,
        *,
        address: str = STORE,
        progress_s: float = 2.0,
    ) -> None:
        self.store = store
        self._process = process
        self._progress_s = progress_s
        self._watchers: dict[int, _Watcher] = {}
        self._history: deque[WatchBatch] = deque(maxlen=_HISTORY)
        self._revision = 0
        self._floor = 0  # watches after an older revision need events that are not stored here
        network.listen(process, address, self._accept, answers=store)
        process.spawn("store.follow", self._follow())
        process.spawn("store.progress", self._send_progress())

    def _accept(self, connection: SimConnection) -> None:
        connection.on_message = lambda message: self._watch(connection, message)
        connection.on_broken = lambda _: self._forget(connection)

    def _forget(self, connection: SimConnection) -> None:
        self._watchers.pop(connection.number, None)

    def _watch(self, connection: SimConnection, wanted: _Watch) -> None:
        floor = max(self._floor, self.store.compacted_revision)
        if wanted.after_revision < floor:
            connection.close(Compacted(f"the history before revision {floor} is deleted"))
            return
        watcher = self._watchers[connection.number] = _Watcher(connection, wanted)
        watcher.send(*self._history)

    async def _follow(self) -> None:
        """Feed every watch from one."""
        while True:
            try:
                async for batch in self.store.watch("", self._revision):
                    self._revision = batch.revision
                    if batch.events:
                        if len(self._history) == _HISTORY:
                            self._floor = self._history[0].revision
                        self._history.append(batch)
                        for watcher in list(self._watchers.values()):
                            watcher.send(batch)
            except Compacted:
                self._revision = self._floor = (await self.store.list("")).revision
                self._history.clear()

    async def _send_progress(self) -> None:
        """Send a periodic progress event, which moves readers to the store's revision."""
        while True:
            await self._process.clock.sleep(self._progress_s)
            for watcher in list(self._watchers.values()):
                watcher.progress(self._revision)


class _Watcher:
    def __init__(self, connection: SimConnection, wanted: _Watch) -> None:
        self._connection = connection
        self._prefix = wanted.prefix
        self._seen = wanted.after_revision

    def send(self, *batches: WatchBatch) -> None:
        """Send what of these the reader has not seen, in one."""
        if self._connection.over is not None:
            return
        seen, prefix = self._seen, self._prefix
        events = tuple(
            event
            for batch in batches
            if batch.revision > seen
            for event in batch.events
            if _revision(event) > seen and _key(event).startswith(prefix)
        )
        if events:
            self._seen = batches[-1].revision
            self._connection.post(WatchBatch(self._seen, events))

    def progress(self, revision: int) -> None:
        if self._connection.over is None:
            self._seen = max(self._seen, revision)
            self._connection.post(WatchBatch(self._seen, ()))


class SimStore:
    """Implements ``ports.store.Store`` for one process, with the time limits of ``adapters.etcd.store``."""

    def __init__(
        self,
        process: Process,
        network: Network,
        *,
        address: str = STORE,
        timeout_s: float = 3.0,
        silence_s: float = 8.0,
    ) -> None:
        self._process = process
        self._network = network
        self._address = address
        self._timeout_s = timeout_s
        self._silence_s = silence_s

    async def get(self, key: str) -> Entry | None:
        return await self._ask(lambda store: store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._ask(lambda store: store.list(prefix))

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        return await self._ask(lambda store: store.commit(operations, conditions))

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._ask(lambda store: store.grant_lease(ttl_s))

    async def keep_alive(self, lease_id: int) -> None:
        await self._ask(lambda store: store.keep_alive(lease_id))

    async def revoke_lease(self, lease_id: int) -> None:
        await self._ask(lambda store: store.revoke_lease(lease_id))

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        try:
            connection = await self._network.connect(self._process, self._address, within_s=self._timeout_s)
        except Unreachable as error:
            raise StoreUnavailable(str(error), retry_after_s=1.0) from None
        try:
            connection.post(_Watch(prefix, after_revision))
            while True:
                yield await connection.receive(self._silence_s)
        except Silent:
            raise StoreUnavailable(f"the watch was silent for {self._silence_s:g} s") from None
        except Broken as broken:
            if isinstance(broken.error, Compacted):
                raise broken.error from None
            raise StoreUnavailable("the watch ended", retry_after_s=1.0) from None
        finally:
            connection.close()

    async def _ask(self, call: Callable[[MemoryStore], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._network.ask(
                self._process,
                self._address,
                call,
                within_s=self._timeout_s,
            )
        except Unreachable as error:
            raise StoreUnavailable(str(error), retry_after_s=1.0) from None


def _key(event: KeyChanged | KeyRemoved) -> str:
    return event.entry.key if isinstance(event, KeyChanged) else event.key


def _revision(event: KeyChanged | KeyRemoved) -> int:
    return event.entry.mod_revision if isinstance(event, KeyChanged) else event.mod_revision
