"""The informer on the in-memory store, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.errors import StoreUnavailable
from services.ports.store import Committed, Delete, Entry, KeyChanged, KeyRemoved, Put, Store
from services.runtime.fleet_state.informer import Informer, Versioned

Virtual = Callable[[Callable[[Any], Any]], Any]
Seen = list[tuple[str, int | None]]
PREFIX = "/p/"


def decode(entry: Entry) -> str:
    return entry.value.decode("utf-8")


class Watched:
    """An informer, and every change it told of, checked against its view at that moment."""

    def __init__(self, world: Any, store: Store, *, seed: int = 1) -> None:
        self.seen: Seen = []
        self.revisions: list[int] = []
        self.informer = Informer(
            store, PREFIX, decode, world.clock, on_change=self._note, rng=random.Random(seed)
        )

    def _note(self, key: str, record: Versioned[str] | None) -> None:
        self.seen.append((key, record.mod_revision if record is not None else None))
        self.revisions.append(self.informer.revision)


async def put(store: Store, name: str, value: str) -> int:
    outcome = await store.commit([Put(PREFIX + name, value.encode())])
    assert isinstance(outcome, Committed)
    return outcome.revision


async def caught_up(informer: Informer[str], revision: int, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if informer.revision >= revision:
                return
            await asyncio.sleep(0.01)


async def matches(informer: Informer[str], store: MemoryStore) -> bool:
    listing = await store.list(PREFIX)
    expected = {
        e.key: Versioned(e.value.decode(), e.create_revision, e.mod_revision) for e in listing.entries
    }
    return dict(informer.view) == expected


async def history(store: MemoryStore) -> Seen:
    """Every change of the store's life, from its own watch."""
    latest = (await store.list("")).revision
    changes: Seen = []
    async with aclosing(store.watch(PREFIX, 0)) as batches:
        async for batch in batches:
            for event in batch.events:
                if isinstance(event, KeyChanged):
                    changes.append((event.entry.key, event.entry.mod_revision))
                else:
                    assert isinstance(event, KeyRemoved)
                    changes.append((event.key, None))
            if batch.revision >= latest:
                return changes
    raise AssertionError


def test_lists_then_follows(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        await put(world.store, "a", "1")
        watched = Watched(world, world.store)
        informer = watched.informer
        assert (informer.synced, informer.revision, informer.age_s()) == (False, 0, float("inf"))
        world.spawn(informer.run())
        await informer.wait_synced(1.0)
        assert informer.view[PREFIX + "a"] == Versioned("1", 2, 2)
        before = informer.view
        revision = await put(world.store, "a", "2")
        assert await informer.wait_changed(informer.revision, 1.0)
        assert informer.revision == revision
        assert informer.view == {PREFIX + "a": Versioned("2", 2, 3)}
        assert before[PREFIX + "a"].record == "1", "a view that somebody holds does not change"
        await world.store.commit([Delete(PREFIX + "a"), Put(PREFIX + "b", b"3")])
        assert await informer.wait_changed(revision, 1.0)
        assert set(informer.view) == {PREFIX + "b"}

    virtual(scenario)


def test_the_view_is_read_only(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        informer = Watched(world, world.store).informer
        world.spawn(informer.run())
        await informer.wait_synced(1.0)
        with pytest.raises(TypeError):
            informer.view["x"] = Versioned("1", 1, 1)  # type: ignore[index]

    virtual(scenario)


def test_waits_end_on_time(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        link.cut()
        informer = Watched(world, link).informer
        world.spawn(informer.run())
        start_s = world.clock.monotonic_s()
        with pytest.raises(StoreUnavailable):
            await informer.wait_synced(5.0)
        assert world.clock.monotonic_s() - start_s == pytest.approx(5.0)
        link.mend()
        await informer.wait_synced(10.0)
        start_s = world.clock.monotonic_s()
        assert not await informer.wait_changed(informer.revision, 4.0)
        assert world.clock.monotonic_s() - start_s == pytest.approx(4.0)

    virtual(scenario)


def test_resumes_after_a_cut_without_a_gap_or_a_list(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        watched = Watched(world, link)
        world.spawn(watched.informer.run())
        await watched.informer.wait_synced(1.0)
        for number in range(5):
            link.cut()
            for part in range(3):
                await put(world.store, f"k{part}", str(number))
            await world.store.commit([Delete(PREFIX + "k1")])
            await asyncio.sleep(1.0)
            link.mend()
            await asyncio.sleep(random.Random(number).uniform(0, 6))
        await caught_up(watched.informer, (await world.store.list("")).revision)
        assert watched.seen == await history(world.store)
        assert watched.revisions == sorted(watched.revisions)
        assert [name for _, name in link.calls].count("list") == 1

    virtual(scenario)


def test_compacted_history_is_listed_again_and_told_as_differences(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        for name in ("same", "changed", "gone"):
            await put(world.store, name, "1")
        watched = Watched(world, link)
        world.spawn(watched.informer.run())
        await watched.informer.wait_synced(1.0)
        watched.seen.clear()
        link.cut()
        await world.store.commit([Delete(PREFIX + "gone")])
        await put(world.store, "changed", "2")
        latest = await put(world.store, "new", "1")
        world.store.compact(latest)
        await asyncio.sleep(1.0)
        link.mend()
        await caught_up(watched.informer, latest)
        assert watched.seen == [
            (PREFIX + "gone", None),
            (PREFIX + "changed", latest - 1),
            (PREFIX + "new", latest),
        ]
        assert await matches(watched.informer, world.store)

    virtual(scenario)


def test_a_record_that_cannot_be_decoded_is_skipped(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        await world.store.commit([Put(PREFIX + "bad", b"\xff"), Put(PREFIX + "good", b"1")])
        informer = Watched(world, world.store).informer
        world.spawn(informer.run())
        await informer.wait_synced(1.0)
        assert set(informer.view) == {PREFIX + "good"}
        await world.store.commit([Put(PREFIX + "good", b"\xff")])
        latest = await put(world.store, "bad", "repaired")
        await caught_up(informer, latest)
        assert informer.view[PREFIX + "good"].record == "1", "the last good record stays"
        assert informer.view[PREFIX + "bad"].record == "repaired"
        await world.store.commit([Delete(PREFIX + "good")])
        await world.store.commit([Put(PREFIX + "good", b"\xff")])
        await caught_up(informer, latest + 2)
        assert PREFIX + "good" not in informer.view, "a new life of the key is not the old record"

    virtual(scenario)


def test_age_is_the_time_since_the_store_confirmed_the_view(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        informer = Watched(world, link).informer
        world.spawn(informer.run())
        await informer.wait_synced(1.0)
        await asyncio.sleep(60)
        assert informer.age_s() <= 2.0, "bookmarks confirm a quiet view"
        link.cut()
        await asyncio.sleep(30)
        assert 28.0 <= informer.age_s() <= 32.0
        link.mend()
        await asyncio.sleep(10)
        assert informer.age_s() <= 2.0

    virtual(scenario)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_store_that_went_back_does_not_take_the_view_along(virtual: Virtual, compacted: bool) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        informer = Watched(world, link).informer
        world.spawn(informer.run())
        for number in range(4):
            await put(world.store, "a", str(number))
        latest = await put(world.store, "a", "4")
        await caught_up(informer, latest)
        link._store = MemoryStore(world.clock)
        link.compacted = compacted
        link.cut()
        await asyncio.sleep(0)
        link.mend()
        await asyncio.sleep(60)
        assert informer.revision == latest
        assert informer.view[PREFIX + "a"].record == "4"
        assert informer.age_s() > 50

    virtual(scenario)


def test_an_outage_is_met_with_jittered_bounded_retries(virtual: Virtual) -> None:
    async def scenario(world: Any) -> list[float]:
        link = world.link()
        link.timeout_s = 0.0
        link.cut()
        world.spawn(Watched(world, link, seed=7).informer.run())
        await asyncio.sleep(60)
        return [time_s for time_s, _ in link.calls]

    times_s = virtual(scenario)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert gaps_s[0] < 0.3
    assert all(1.0 <= gap_s <= 2.0 for gap_s in gaps_s[6:])
    assert len({round(gap_s, 3) for gap_s in gaps_s[6:]}) > 10, "no two clients stay in step"


async def _writes(world: Any, rng: random.Random, *, compact: bool) -> None:
    for _ in range(rng.randint(5, 60)):
        names = rng.sample("abcdef", rng.randint(1, 3))
        await world.store.commit(
            [
                Delete(PREFIX + n) if rng.random() < 0.3 else Put(PREFIX + n, str(rng.random()).encode())
                for n in names
            ]
        )
        if rng.random() < 0.2:
            await world.store.commit([Put("/other", b"")])
        if compact and rng.random() < 0.1:
            world.store.compact((await world.store.list("")).revision - rng.randint(0, 3))
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.01, 1.0]))


async def _cuts(link: Any, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0, 5))
        link.cut()
        await asyncio.sleep(rng.uniform(0, 3))
        link.mend()


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_converge(virtual: Virtual, seed: int) -> None:
    """Without compaction (even seeds) every event once and in order; always the right view, never back."""

    async def scenario(world: Any) -> None:
        rng = random.Random(seed)
        link = world.link(slow_s=0.2, rng=random.Random(seed))
        watched = Watched(world, link, seed=seed)
        world.spawn(watched.informer.run())
        await watched.informer.wait_synced(30.0)
        chaos = world.spawn(_cuts(link, rng))
        await _writes(world, rng, compact=seed % 2 == 1)
        await world.stop(chaos)
        link.mend()
        await caught_up(watched.informer, (await world.store.list("")).revision, 60.0)
        assert await matches(watched.informer, world.store)
        assert watched.revisions == sorted(watched.revisions)
        if seed % 2 == 0:
            assert watched.seen == await history(world.store)

    virtual(scenario)
