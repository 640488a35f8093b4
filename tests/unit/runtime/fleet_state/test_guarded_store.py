"""The guard of the store's identity, in virtual time over stores in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.errors import StoreReplaced, StoreUnavailable
from services.core.records import ROOT, STORE_GENERATION, StoreGeneration, dump
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    CreateRevisionIs,
    Delete,
    Entry,
    Listing,
    ModRevisionIs,
    Operation,
    Put,
    WatchBatch,
)
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.guarded_store import FILE_NAME, LOOK_S, GuardedStore
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.fleet_state.lease import Registration

Virtual = Callable[[Callable[[Any], Any]], Any]
KEY = ROOT + "k"


class Swapped:
    """The address of a store: what stands behind it can be exchanged, which breaks every watch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.inner = MemoryStore(clock)
        self.answer_s = 0.001
        self.silent = False
        self._lives = 0

    def wipe(self) -> MemoryStore:
        """Start an empty store; return the one of before."""
        before = self.inner
        self.become(MemoryStore(self._clock))
        return before

    async def backup(self) -> MemoryStore:
        """Return a copy of what is there, at the same revision."""
        copy = MemoryStore(self._clock)
        copy._revision = self.inner._revision
        copy._compacted = self.inner._revision
        copy._entries = {
            key: Entry(key, e.value, e.create_revision, e.mod_revision)
            for key, e in self.inner._entries.items()
        }
        return copy

    def become(self, store: MemoryStore) -> None:
        self.inner = store
        self._lives += 1

    async def get(self, key: str) -> Entry | None:
        return await self.inner.get(key)

    async def list(self, prefix: str) -> Listing:
        await asyncio.sleep(0.001)  # others may act while the question and the answer are on their way
        if self.silent:
            raise StoreUnavailable("no answer")
        answer = await self.inner.list(prefix)
        await asyncio.sleep(self.answer_s)
        return answer

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        return await self.inner.commit(operations, conditions)

    async def grant_lease(self, ttl_s: int) -> int:
        return await self.inner.grant_lease(ttl_s)

    async def keep_alive(self, lease_id: int) -> None:
        await self.inner.keep_alive(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        await self.inner.revoke_lease(lease_id)

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        life = self._lives
        async with aclosing(self.inner.watch(prefix, after_revision)) as batches:
            async for batch in batches:
                if life != self._lives:
                    raise StoreUnavailable("the connection broke")
                yield batch


def decode(entry: Entry) -> str:
    return entry.value.decode()


async def founded(world: Any) -> tuple[Swapped, GuardedStore]:
    address = Swapped(world.clock)
    store = GuardedStore(address, world.clock)
    await store.found("gen_a")
    return address, store


def test_the_first_generation_stays_and_only_the_first_is_written(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, _ = await founded(world)
        other = GuardedStore(address, world.clock)
        await other.found("gen_b")
        entry = await address.get(STORE_GENERATION)
        assert entry is not None
        assert entry.value == dump(StoreGeneration("gen_a"))

    virtual(scenario)


def test_before_any_generation_everything_passes(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        store = GuardedStore(Swapped(world.clock), world.clock)
        done = await store.commit([Put(KEY, b"1")], [ModRevisionIs(KEY, 0)])
        entry = await store.get(KEY)
        assert isinstance(done, Committed)
        assert entry is not None
        async with aclosing(store.watch(KEY, entry.mod_revision - 1)) as batches:
            assert (await anext(batches)).revision == done.revision

    virtual(scenario)


CALLS: dict[str, Callable[[GuardedStore], Any]] = {
    "get": lambda store: store.get(KEY),
    "list": lambda store: store.list(ROOT),
    "commit": lambda store: store.commit([Put(KEY, b"2")]),
    "create": lambda store: store.commit([Put(KEY, b"2")], [ModRevisionIs(KEY, 0)]),
    "grant_lease": lambda store: store.grant_lease(5),
    "found": lambda store: store.found("gen_b"),
    "watch": lambda store: anext(store.watch(KEY, 0)),
    "watch the future": lambda store: anext(store.watch(KEY, 10**9)),
}


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_wiped_store_is_neither_read_nor_written(virtual: Virtual, call: str, noticed: bool) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        await store.commit([Put(KEY, b"1")])
        address.wipe()
        empty = address.inner
        if noticed:
            with pytest.raises(StoreReplaced):
                await store.verify()
        with pytest.raises(StoreReplaced, match="no generation record"):
            await CALLS[call](store)
        assert "gen_a" in store.problem()
        assert (await empty.list("")).revision == 1, "something was written"

    virtual(scenario)


def test_a_store_of_another_generation_is_named(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        address.wipe()
        await GuardedStore(address, world.clock).found("gen_b")
        with pytest.raises(StoreReplaced, match="is gen_b, and this process belongs to gen_a"):
            await store.get(KEY)

    virtual(scenario)


def test_the_look_reports_and_takes_back_by_itself(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        world.spawn(store.run())
        before = address.wipe()
        await asyncio.sleep(LOOK_S + 0.1)
        assert store.problem()
        address.become(before)
        await asyncio.sleep(LOOK_S + 0.1)
        assert store.problem() == ""
        assert store.restores == 0, "it was not a restore: nothing was lost"

    virtual(scenario)


def test_a_silent_store_is_reported_until_one_answers(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        world.spawn(store.run())
        await asyncio.sleep(LOOK_S + 0.1)
        assert store.silence() == ""
        address.silent = True
        await asyncio.sleep(2 * LOOK_S + 0.1)
        assert store.silence().startswith("etcd does not answer: changes fail")
        assert "(1" in store.silence(), "the seconds since the first look without an answer"
        address.silent = False
        address.wipe()
        await asyncio.sleep(LOOK_S + 0.1)
        assert (store.silence(), bool(store.problem())) == ("", True), "another one answers"

    virtual(scenario)


def test_everything_deleted_is_a_store_replaced_and_no_change(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        await store.commit([Put(KEY, b"1")])
        informer: Informer[str] = Informer(store, KEY, decode, world.clock)
        world.spawn(informer.run())
        await informer.wait_synced(5)
        await asyncio.sleep(5)  # its watch stands, and was verified
        await address.commit([Delete(KEY), Delete(STORE_GENERATION)])
        await asyncio.sleep(5)
        assert informer.view[KEY].record == "1"
        assert store.problem()

    virtual(scenario)


def test_views_keep_the_last_state_and_converge_after_a_restore(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        await store.commit([Put(KEY, b"1")])
        backup = await address.backup()
        await store.commit([Put(KEY, b"2"), Put(KEY + "-late", b"x")])
        for _ in range(50):
            await store.commit([Put(KEY, b"3")])
        told: list[int] = []
        informer: Informer[str] = Informer(
            store, KEY, decode, world.clock, on_change=lambda *_: told.append(informer.revision)
        )
        world.spawn(informer.run())
        await informer.wait_synced(5)
        address.wipe()
        await asyncio.sleep(20)
        assert {k: v.record for k, v in informer.view.items()} == {KEY: "3", KEY + "-late": "x"}
        address.become(backup)
        await asyncio.sleep(20)
        assert {k: v.record for k, v in informer.view.items()} == {KEY: "1"}
        assert told == sorted(told), "the view went back"
        assert store.restores == 1
        await store.commit([Put(KEY, b"4")])
        await asyncio.sleep(1)
        assert informer.view[KEY].record == "4"

    virtual(scenario)


def test_a_restore_behind_a_reader_that_saw_less_reaches_it_too(virtual: Virtual) -> None:
    """The restored store has passed what a slow reader saw; another process marks the restore for it."""

    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        backup = await address.backup()
        await store.commit([Put(KEY, b"lost")])
        slow = GuardedStore(address, world.clock)
        informer: Informer[str] = Informer(slow, KEY, decode, world.clock)
        world.spawn(informer.run())
        world.spawn(slow.run())
        await informer.wait_synced(5)
        for _ in range(50):
            await store.commit([Put(ROOT + "other", b"")])
        address.become(backup)
        for _ in range(10):
            await address.commit([Put(ROOT + "other", b"")])
        await store.verify()
        assert store.restores == 1
        await asyncio.sleep(20)
        assert dict(informer.view) == {}

    virtual(scenario)


def test_epochs_and_incarnations_do_not_go_back(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        backup = await address.backup()
        for _ in range(100):
            await store.commit([Put(KEY, b"")])
        election = Election(store, ROOT + "leaders/x", b"me", 2, world.clock)
        registration = Registration(store, ROOT + "workers/w", b"w", world.clock)
        world.spawn(election.run())
        world.spawn(registration.run())
        epoch = await election.wait_leading()
        incarnation = await registration.wait_registered(10)
        address.wipe()
        empty = address.inner
        await asyncio.sleep(30)
        assert election.epoch is None
        assert registration.incarnation is None
        assert (await empty.list("")).revision == 1, "it registered in another store"
        address.become(backup)
        await asyncio.sleep(30)
        assert election.epoch is not None
        assert election.epoch > epoch
        assert registration.incarnation is not None
        assert registration.incarnation > incarnation

    virtual(scenario)


def test_conditions_from_before_a_restore_never_hold(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        await store.commit([Put(KEY, b"1")])
        entry = await store.get(KEY)
        assert entry is not None
        backup = await address.backup()
        for _ in range(9):
            await store.commit([Put(KEY + "2", b"")])
        address.become(backup)
        await store.verify()
        for condition in (
            ModRevisionIs(KEY, entry.mod_revision),
            CreateRevisionIs(KEY, entry.create_revision),
        ):
            assert isinstance(await store.commit([Put(KEY, b"2")], [condition]), ConditionFailed)
        with pytest.raises(Compacted):
            await anext(store.watch(KEY, entry.mod_revision))
        again = await store.get(KEY)
        assert again is not None
        assert isinstance(
            await store.commit([Put(KEY, b"2")], [ModRevisionIs(KEY, again.mod_revision)]), Committed
        )

    virtual(scenario)


def test_looks_beside_writes_are_no_restore(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        _, store = await founded(world)

        async def write() -> None:
            for _ in range(200):
                await store.commit([Put(KEY, b"")])
                await asyncio.sleep(0.0007)

        async def look() -> None:
            for _ in range(100):
                await store.verify()

        await asyncio.gather(write(), look(), look())
        assert store.restores == 0

    virtual(scenario)


def test_a_late_answer_of_the_store_of_before_takes_nothing_back(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        backup = await address.backup()
        for _ in range(20):
            await store.commit([Put(KEY, b"")])
        address.answer_s = 1.0
        late = asyncio.create_task(store.verify())
        await asyncio.sleep(0.1)
        address.answer_s = 0.001
        address.become(backup)
        with pytest.raises(StoreUnavailable, match="restored"):
            await store.list(KEY)
        revision = (await store.list(KEY)).revision
        await late
        assert (await store.list(KEY)).revision >= revision
        assert store.restores == 1

    virtual(scenario)


def test_processes_that_observe_a_restore_together_agree(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        address, store = await founded(world)
        backup = await address.backup()
        stores = [store, *(GuardedStore(address, world.clock) for _ in range(4))]
        for _ in range(20):
            await store.commit([Put(KEY, b"")])
        for each in stores:
            await each.verify()
        address.become(backup)
        await asyncio.gather(*(each.verify() for each in stores))
        revisions = {(await each.list(KEY)).revision for each in stores}
        assert len(revisions) == 1
        assert sum(each.restores for each in stores) == 1

    virtual(scenario)


async def test_the_generation_is_remembered_in_a_folder(tmp_path: Path) -> None:
    clock = SystemClock()
    address = Swapped(clock)
    await GuardedStore(address, clock, folder=tmp_path).found("gen_a")
    assert (tmp_path / FILE_NAME).read_text() == "gen_a\n"
    address.wipe()
    restarted = GuardedStore(address, clock, folder=tmp_path)
    with pytest.raises(StoreReplaced):
        await restarted.found("gen_b")
    (tmp_path / FILE_NAME).unlink()  # the operator accepts the store
    await GuardedStore(address, clock, folder=tmp_path).found("gen_b")
    assert (tmp_path / FILE_NAME).read_text() == "gen_b\n"


async def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_a_restart(tmp_path: Path) -> None:
    clock = SystemClock()
    folder = tmp_path / "gone"
    folder.mkdir()
    store = GuardedStore(Swapped(clock), clock, folder=folder)
    folder.rmdir()
    await store.found("gen_a")
    await store.commit([Put(KEY, b"1")])
