"""The informer against a real etcd that is killed, restarted, frozen, compacted and cut off.

Each example draws writes and mishaps at random; afterwards the view must be what etcd lists, it must never
have gone back, and as long as nothing was compacted every change must have been told once and in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from aetcd import rpc

from services.adapters.etcd.store import EtcdStore
from services.core.errors import StoreUnavailable
from services.ports.store import Committed, Delete, Entry, Operation, Put
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer, Versioned

PREFIX = "/p/"
PATIENCE_S = 20.0
Change = tuple[str, int | None]


class Proxy:
    """A TCP relay to the server: connections through it can be cut, refused, or left open in silence."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._connections: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self.port = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.mend()
            self.cut()
            await asyncio.sleep(0.05)

    def cut(self) -> None:
        for writer in tuple(self._connections):
            writer.transport.abort()

    def refuse(self) -> None:
        self._refusing = True
        self.cut()

    def silence(self) -> None:
        self._flowing.clear()

    def mend(self) -> None:
        self._refusing = False
        self._flowing.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._connections |= {writer, upstream_writer}
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        for side in (writer, upstream_writer):
            side.transport.abort()
            self._connections.discard(side)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()  # one side ended: so does the other


class Writer:
    """Random writes through a connection of its own, and what each of them did, by revision."""

    def __init__(self, store: EtcdStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self.changes: list[Change] = []
        self._present: set[str] = set()
        self.revision = 0

    async def write(self) -> None:
        names = self._rng.sample("abcdef", self._rng.randint(1, 3))
        operations: list[Operation] = [
            Delete(PREFIX + name)
            if self._rng.random() < 0.3
            else Put(PREFIX + name, b"%f" % self._rng.random())
            for name in sorted(names)
        ]
        outcome = await self._store.commit(operations)
        assert isinstance(outcome, Committed)
        self.revision = outcome.revision
        for operation in operations:
            if isinstance(operation, Put):
                self._present.add(operation.key)
                self.changes.append((operation.key, outcome.revision))
            elif operation.key in self._present:
                self._present.discard(operation.key)
                self.changes.append((operation.key, None))


class Observer:
    def __init__(self, store: EtcdStore, seed: int) -> None:
        self.told: list[Change] = []
        self.revisions: list[int] = []
        self.informer = Informer(
            store,
            PREFIX,
            decode,
            SystemClock(),
            on_change=self._note,
            max_backoff_s=0.3,
            rng=random.Random(seed),
        )

    def _note(self, key: str, record: Versioned[bytes] | None) -> None:
        self.told.append((key, record.mod_revision if record is not None else None))
        self.revisions.append(self.informer.revision)


def decode(entry: Entry) -> bytes:
    return entry.value


async def compact(address: str, revision: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision), timeout=5)


async def mishap(kind: str, etcd: Any, proxy: Proxy, store: EtcdStore) -> None:
    if kind == "restart":
        await asyncio.to_thread(etcd.kill)
        await asyncio.to_thread(etcd.start)
    elif kind == "cut":
        proxy.cut()
    elif kind == "refuse":
        proxy.refuse()
    elif kind == "silence":
        proxy.silence()
    elif kind == "compact":
        with suppress(grpc.aio.AioRpcError):  # compacted up to there before
            await compact(etcd.address, (await store.list(PREFIX)).revision)


async def example(etcd: Any, seed: int, kinds: list[str]) -> None:
    rng = random.Random(seed)
    clock = SystemClock()
    proxy = Proxy(etcd.port)
    direct = EtcdStore([etcd.address], clock)
    await direct.commit([Delete(PREFIX + name) for name in "abcdef"])
    async with proxy.serve():
        through = EtcdStore([f"127.0.0.1:{proxy.port}"], clock, timeout_s=0.5, progress_s=0.1, silence_s=0.4)
        writer, observer = Writer(direct, rng), Observer(through, seed)
        running = asyncio.create_task(observer.informer.run())
        try:
            await observer.informer.wait_synced(PATIENCE_S)
            for _ in range(rng.randint(2, 4)):
                kind = rng.choice(kinds)
                for _ in range(rng.randint(0, 30)):
                    await write_through_restarts(writer)
                await mishap(kind, etcd, proxy, direct)
                for _ in range(rng.randint(0, 30)):
                    await write_through_restarts(writer)
                await asyncio.sleep(rng.choice([0.0, 0.1, 0.6]))
                if kind != "compact" and "compact" in kinds and rng.random() < 0.5:
                    await mishap("compact", etcd, proxy, direct)
                proxy.mend()
            await check(observer, writer, direct, exact="compact" not in kinds)
        finally:
            running.cancel()
            await asyncio.wait({running})
            await through.close()
            await direct.close()


async def write_through_restarts(writer: Writer) -> None:
    """A refused connection wrote nothing: try again. No write is under way while the server is killed."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await writer.write()
                return
            except StoreUnavailable as error:
                if error.metadata["code"] != "UNAVAILABLE":
                    raise
                await asyncio.sleep(0.05)


async def check(observer: Observer, writer: Writer, store: EtcdStore, *, exact: bool) -> None:
    informer = observer.informer
    listing = await store.list(PREFIX)
    last = writer.revision
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if informer.revision >= last:
                break
            await asyncio.sleep(0.02)
    expected = {e.key: Versioned(e.value, e.create_revision, e.mod_revision) for e in listing.entries}
    assert dict(informer.view) == expected
    assert observer.revisions == sorted(observer.revisions), "the view went back"
    if exact:
        assert observer.told == writer.changes, "an event was lost, doubled or reordered"


@pytest.mark.parametrize("seed", range(3))
async def test_without_compaction_every_change_is_told_once_and_in_order(own_etcd: Any, seed: int) -> None:
    await example(own_etcd, seed, ["restart", "cut", "refuse", "silence"])


@pytest.mark.parametrize("seed", range(3))
async def test_with_compaction_the_view_converges_and_never_goes_back(own_etcd: Any, seed: int) -> None:
    await example(own_etcd, 100 + seed, ["restart", "cut", "refuse", "silence", "compact"])


async def test_a_store_that_is_frozen_is_noticed_and_survived(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], SystemClock(), timeout_s=0.5, progress_s=0.1, silence_s=0.5)
    observer = Observer(store, 1)
    running = asyncio.create_task(observer.informer.run())
    try:
        await observer.informer.wait_synced(PATIENCE_S)
        written = await store.commit([Put(PREFIX + "a", b"1")])
        assert await observer.informer.wait_changed(written.revision - 1, PATIENCE_S)
        own_etcd.freeze()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while observer.informer.age_s() <= 1.0:
                    await asyncio.sleep(0.05)
            assert observer.informer.view[PREFIX + "a"].record == b"1", "the last state is served on"
        finally:
            own_etcd.thaw()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if observer.informer.age_s() < 0.5:
                    break
                await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await store.close()
