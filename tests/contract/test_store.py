"""What every ``Store`` does, checked on a real etcd, on the in-memory one and over the simulated network, and
guarded, after a restore."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from aetcd import rpc

from services.adapters.etcd.store import EtcdStore
from services.adapters.memory.store import MemoryStore
from services.core.errors import InvalidInput
from services.core.records import STORE_GENERATION, StoreGeneration, dump
from services.ports.store import (
    Committed,
    Compacted,
    ConditionFailed,
    CreateRevisionIs,
    Delete,
    KeyChanged,
    KeyRemoved,
    LeaseLost,
    ModRevisionIs,
    Operation,
    Put,
    Store,
    ValueIs,
    WatchBatch,
)
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.guarded_store import GuardedStore
from simulator.kernel.links.store_link import SimStore, StoreServer
from tests.support.simulated import Check, World, checks_of, simulate

PATIENCE_S = 60.0
BASE = 5000
Event = KeyChanged | KeyRemoved


@dataclass(frozen=True)
class Kit:
    store: Store
    prefix: str
    compact: Callable[[int], Awaitable[None]]

    def key(self, name: str) -> str:
        return self.prefix + name

    async def put(self, name: str, value: bytes = b"v") -> int:
        outcome = await self.store.commit([Put(self.key(name), value)])
        assert isinstance(outcome, Committed)
        return outcome.revision

    async def names(self) -> list[str]:
        listing = await self.store.list(self.prefix)
        return [entry.key.removeprefix(self.prefix) for entry in listing.entries]


@pytest_asyncio.fixture(params=["etcd", "memory", "guarded"])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    prefix = f"/test/{uuid.uuid4().hex}/"
    if request.param == "memory":
        memory = MemoryStore(SystemClock(), bookmark_s=0.5)

        async def compact_memory(revision: int) -> None:
            memory.compact(revision)

        yield Kit(memory, prefix, compact_memory)
        memory.check_integrity()
        return
    if request.param == "guarded":
        inner = MemoryStore(SystemClock(), bookmark_s=0.5)
        await inner.commit([Put(STORE_GENERATION, dump(StoreGeneration("gen_1", BASE)))])

        async def compact_inner(revision: int) -> None:
            inner.compact(revision - BASE)

        yield Kit(GuardedStore(inner, SystemClock()), prefix, compact_inner)
        inner.check_integrity()
        return
    endpoint: str = request.getfixturevalue("etcd_endpoint")
    store = EtcdStore([endpoint], SystemClock(), progress_s=0.5)

    async def compact_etcd(revision: int) -> None:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            await rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision), timeout=5)

    yield Kit(store, prefix, compact_etcd)
    await store.close()


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Kit]:
    machine = world.process("store")
    memory = MemoryStore(machine.clock, bookmark_s=0.5)
    StoreServer(machine, world.network, memory, progress_s=0.5)

    async def compact(revision: int) -> None:
        memory.compact(revision)

    yield Kit(SimStore(world.process("client"), world.network), "/test/", compact)
    memory.check_integrity()


def key_of(event: Event) -> str:
    return event.entry.key if isinstance(event, KeyChanged) else event.key


def revision_of(event: Event) -> int:
    return event.entry.mod_revision if isinstance(event, KeyChanged) else event.mod_revision


async def take(batches: AsyncGenerator[WatchBatch, None], events: int) -> list[WatchBatch]:
    """The batches with events up to that many events, bookmarks left out."""
    taken: list[WatchBatch] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in batches:
            if batch.events:
                taken.append(batch)
            if sum(len(b.events) for b in taken) >= events:
                return taken
    raise AssertionError("the watch ended")


def events_of(batches: list[WatchBatch]) -> list[Event]:
    return [event for batch in batches for event in batch.events]


async def test_entry_carries_its_revisions(kit: Kit) -> None:
    assert await kit.store.get(kit.key("a")) is None
    first = await kit.put("a", b"1")
    second = await kit.put("a", b"\x00\xff")
    entry = await kit.store.get(kit.key("a"))
    assert entry is not None
    assert (entry.value, entry.create_revision, entry.mod_revision) == (b"\x00\xff", first, second)
    assert second > first
    await kit.store.commit([Delete(kit.key("a"))])
    third = await kit.put("a", b"3")
    again = await kit.store.get(kit.key("a"))
    assert again is not None
    assert again.create_revision == again.mod_revision == third


async def test_list_is_sorted_and_stays_under_the_prefix(kit: Kit) -> None:
    for name in ("b", "a/2", "a/10", "ü"):
        await kit.put(name)
    await kit.store.commit([Put(kit.prefix[:-1] + "0", b"a neighbour"), Put(kit.prefix[:-1], b"parent")])
    assert await kit.names() == ["a/10", "a/2", "b", "ü"]
    latest = await kit.put("z")
    listing = await kit.store.list(kit.prefix)
    assert listing.revision == latest


async def test_list_of_many_pages_is_whole(kit: Kit) -> None:
    names = [f"{number:05}" for number in range(2500)]
    for start in range(0, len(names), 100):
        await kit.store.commit([Put(kit.key(name), b"v") for name in names[start : start + 100]])
    assert await kit.names() == names


async def test_create_if_absent_has_one_winner(kit: Kit) -> None:
    async def create(value: bytes) -> object:
        return await kit.store.commit([Put(kit.key("k"), value)], [ModRevisionIs(kit.key("k"), 0)])

    outcomes = await asyncio.gather(*(create(b"%d" % number) for number in range(8)))
    won = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Committed)]
    assert len(won) == 1
    entry = await kit.store.get(kit.key("k"))
    assert entry is not None
    assert entry.value == b"%d" % won[0]


async def test_commit_is_all_or_none(kit: Kit) -> None:
    seen = await kit.put("a", b"old")
    newer = await kit.put("a", b"new")
    operations: list[Operation] = [
        Put(kit.key("a"), b"mine"),
        Put(kit.key("b"), b"mine"),
        Delete(kit.key("c")),
    ]
    failed = await kit.store.commit(operations, [ModRevisionIs(kit.key("a"), seen)])
    assert failed == ConditionFailed(newer)
    assert await kit.names() == ["a"]
    done = await kit.store.commit(operations, [ModRevisionIs(kit.key("a"), newer)])
    assert isinstance(done, Committed)
    assert done.revision == newer + 1
    listing = await kit.store.list(kit.prefix)
    assert {entry.mod_revision for entry in listing.entries} == {done.revision}


async def test_every_condition_counts(kit: Kit) -> None:
    revision = await kit.put("a")
    true, false = ModRevisionIs(kit.key("a"), revision), ModRevisionIs(kit.key("b"), revision)
    assert isinstance(await kit.store.commit([Put(kit.key("c"), b"")], [true, false]), ConditionFailed)
    assert await kit.names() == ["a"]


async def test_a_value_is_a_condition(kit: Kit) -> None:
    await kit.put("a", b"one")
    holds, other, absent = (
        ValueIs(kit.key("a"), b"one"),
        ValueIs(kit.key("a"), b"two"),
        ValueIs(kit.key("b"), b""),
    )
    for conditions in ([other], [absent], [holds, other]):
        assert isinstance(await kit.store.commit([Put(kit.key("c"), b"")], conditions), ConditionFailed)
    assert isinstance(await kit.store.commit([Put(kit.key("c"), b"")], [holds]), Committed)


async def test_create_revision_fences_an_old_leader(kit: Kit) -> None:
    epoch = await kit.put("leader", b"1")
    await kit.put("leader", b"still 1")
    fence = CreateRevisionIs(kit.key("leader"), epoch)
    assert isinstance(await kit.store.commit([Put(kit.key("x"), b"1")], [fence]), Committed)
    await kit.store.commit([Delete(kit.key("leader"))])
    assert isinstance(await kit.store.commit([Put(kit.key("x"), b"2")], [fence]), ConditionFailed)
    await kit.put("leader", b"2")
    assert isinstance(await kit.store.commit([Put(kit.key("x"), b"2")], [fence]), ConditionFailed)
    entry = await kit.store.get(kit.key("x"))
    assert entry is not None
    assert entry.value == b"1"


async def test_a_commit_is_bounded(kit: Kit) -> None:
    twice: list[Operation] = [Put(kit.key("a"), b"1"), Put(kit.key("a"), b"2")]
    many: list[Operation] = [Put(kit.key(f"{number}"), b"") for number in range(129)]
    large: list[Operation] = [Put(kit.key("a"), bytes(1_500_000))]
    for operations in (twice, many, large):
        with pytest.raises(InvalidInput):
            await kit.store.commit(operations)
    assert await kit.names() == []
    await kit.store.commit(many[:128])
    await kit.store.commit([Put(kit.key("a"), bytes(1_490_000))])
    assert len(await kit.names()) == 129


async def test_revoked_lease_takes_its_keys(kit: Kit) -> None:
    lease, other = await kit.store.grant_lease(60), await kit.store.grant_lease(60)
    await kit.store.commit(
        [Put(kit.key("a"), b"", lease), Put(kit.key("b"), b"", other), Put(kit.key("c"), b"")]
    )
    await kit.store.commit([Put(kit.key("d"), b"", lease)])
    await kit.store.commit([Put(kit.key("d"), b"moved", other)])
    entry = await kit.store.get(kit.key("a"))
    assert entry is not None
    assert entry.lease_id == lease
    await kit.store.keep_alive(lease)
    await kit.store.revoke_lease(lease)
    await kit.store.revoke_lease(lease)
    assert await kit.names() == ["b", "c", "d"]
    with pytest.raises(LeaseLost):
        await kit.store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        await kit.store.commit([Put(kit.key("e"), b""), Put(kit.key("f"), b"", lease)])
    assert await kit.names() == ["b", "c", "d"]
    await kit.store.revoke_lease(other)


async def test_lease_ends_unless_kept_alive(kit: Kit) -> None:
    loop = asyncio.get_running_loop()
    longest_s, removed, names = math.inf, list[str](), list[str]()
    while longest_s > 1.0:  # the lease was not kept alive in time: the machine stood still
        kept_s, longest_s = loop.time(), 0.0
        left, kept = await kit.store.grant_lease(2), await kit.store.grant_lease(2)
        before = await kit.put("marker")
        await kit.store.commit([Put(kit.key("left"), b"", left), Put(kit.key("kept"), b"", kept)])
        removed.clear()
        async with asyncio.timeout(PATIENCE_S), aclosing(kit.store.watch(kit.prefix, before)) as batches:
            async for batch in batches:
                removed += [event.key for event in batch.events if isinstance(event, KeyRemoved)]
                if removed:
                    break
                try:
                    await kit.store.keep_alive(kept)
                except LeaseLost:
                    assert loop.time() - kept_s > 1.0
                    break
                kept_s, longest_s = loop.time(), max(longest_s, loop.time() - kept_s)
        names = await kit.names()
        longest_s = max(longest_s, loop.time() - kept_s)
        await kit.store.revoke_lease(kept)
    assert removed == [kit.key("left")]
    assert names == ["kept", "marker"]


async def test_watch_replays_then_follows(kit: Kit) -> None:
    start = (await kit.store.list(kit.prefix)).revision
    revisions = [await kit.put("a", b"1"), await kit.put("b", b"2")]
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        events = events_of(await take(batches, 2))
        await kit.store.commit([Put(kit.prefix[:-1] + "0", b"a neighbour")])
        await kit.store.commit([Delete(kit.key("a"))])
        revisions.append((await kit.store.list(kit.prefix)).revision)
        events += events_of(await take(batches, 1))
    assert [revision_of(event) for event in events] == revisions
    assert [key_of(event) for event in events] == [kit.key("a"), kit.key("b"), kit.key("a")]
    assert [type(event) for event in events] == [KeyChanged, KeyChanged, KeyRemoved]
    first = events[0]
    assert isinstance(first, KeyChanged)
    assert (first.entry.value, first.entry.create_revision) == (b"1", revisions[0])


async def test_watch_from_each_revision_is_the_rest_of_the_history(kit: Kit) -> None:
    start = (await kit.store.list(kit.prefix)).revision
    for number in range(12):
        await kit.store.commit([Put(kit.key("k"), b"%d" % number), Put(kit.key(f"k{number}"), b"")])
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        history = events_of(await take(batches, 24))
    for revision in sorted({revision_of(event) for event in history})[:-1]:
        rest = [event for event in history if revision_of(event) > revision]
        async with aclosing(kit.store.watch(kit.prefix, revision)) as batches:
            assert events_of(await take(batches, len(rest))) == rest


async def test_a_long_history_can_be_resumed_after_any_batch(kit: Kit) -> None:
    """Longer than what etcd puts into one answer, whose header is then ahead of its events."""
    start = (await kit.store.list(kit.prefix)).revision
    for _ in range(25):
        await asyncio.gather(*(kit.put(f"{number}") for number in range(100)))
    revisions: list[int] = []
    batches_seen = 0
    after = start
    while len(revisions) < 2500:
        async with aclosing(kit.store.watch(kit.prefix, after)) as batches:
            (batch,) = await take(batches, 1)
        revisions += [revision_of(event) for event in batch.events]
        after = batch.revision
        batches_seen += 1
        assert batches_seen <= 2500
    assert revisions == list(range(start + 1, start + 2501))


async def test_batches_never_split_a_revision(kit: Kit) -> None:
    """Large enough that etcd sends the answer in fragments."""
    start = (await kit.store.list(kit.prefix)).revision
    for number in range(6):
        await kit.store.commit([Put(kit.key(f"{number}/{part}"), bytes(400_000)) for part in range(3)])
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        taken = await take(batches, 18)
    last = start
    for batch in taken:
        revisions = [revision_of(event) for event in batch.events]
        assert revisions == sorted(revisions)
        assert all(revisions.count(revision) == 3 for revision in revisions)
        assert revisions[0] > last
        assert batch.revision >= revisions[-1]
        last = batch.revision


async def test_a_quiet_watch_gives_bookmarks_to_resume_from(kit: Kit) -> None:
    start = await kit.put("a")
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        neighbour = await kit.store.commit([Put(kit.prefix[:-1] + "0", b"a neighbour")])
        async with asyncio.timeout(PATIENCE_S):
            async for batch in batches:
                assert batch.events == ()
                if batch.revision >= neighbour.revision:
                    break
    later = await kit.put("b")
    async with aclosing(kit.store.watch(kit.prefix, batch.revision)) as batches:
        (only,) = events_of(await take(batches, 1))
    assert revision_of(only) == later


async def test_compacted_history_is_told(kit: Kit) -> None:
    start = await kit.put("a", b"1")
    await kit.put("a", b"2")
    latest = await kit.put("a", b"3")
    await kit.compact(latest)
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        with pytest.raises(Compacted):
            await take(batches, 1)
    listing = await kit.store.list(kit.prefix)
    assert [entry.value for entry in listing.entries] == [b"3"]
    later = await kit.put("a", b"4")
    async with aclosing(kit.store.watch(kit.prefix, listing.revision)) as batches:
        (only,) = events_of(await take(batches, 1))
    assert revision_of(only) == later


async def test_a_watch_in_the_present_outlives_compaction(kit: Kit) -> None:
    start = await kit.put("a", b"1")
    async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
        await kit.put("a", b"2")
        await take(batches, 1)
        await kit.compact((await kit.store.list(kit.prefix)).revision)
        later = await kit.put("a", b"3")
        (only,) = events_of(await take(batches, 1))
    assert revision_of(only) == later


async def test_a_cancelled_watch_leaves_the_store_usable(kit: Kit) -> None:
    start = await kit.put("a")

    async def follow() -> None:
        async with aclosing(kit.store.watch(kit.prefix, start)) as batches:
            async for _ in batches:
                pass

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await kit.names() == ["a"]


@pytest.mark.parametrize("check", checks_of(globals(), "kit"))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)
