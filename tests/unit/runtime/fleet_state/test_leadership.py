"""Leases, registrations and elections on the in-memory store, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from services.core.errors import StoreUnavailable
from services.ports.store import Committed, CreateRevisionIs, Delete, KeyRemoved, LeaseLost, Put
from services.runtime.fleet_state.leadership import Election, LeaseHolder, Registration

Virtual = Callable[[Callable[[Any], Any]], Any]
KEY = "/leaders/scheduler/0"
WORKER = "/workers/w1"
TTL_S = 3


def election(world: Any, store: Any, name: str = "a", seed: int = 1) -> Election:
    return Election(store, KEY, name.encode(), TTL_S, world.clock, rng=random.Random(seed))


def registration(world: Any, store: Any, value: bytes = b"v1") -> Registration:
    return Registration(store, WORKER, value, world.clock, ttl_s=TTL_S, rng=random.Random(1))


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


# --- LeaseHolder


def test_a_held_lease_outlives_its_ttl(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        lease = LeaseHolder(world.store, world.clock, ttl_s=TTL_S)
        assert lease.lease_id is None
        lease_id = await lease.acquire()
        world.spawn(lease.hold())
        await asyncio.sleep(100)
        assert lease.lease_id == lease_id
        await lease.release()
        assert lease.lease_id is None
        with pytest.raises(LeaseLost):
            await world.store.keep_alive(lease_id)

    virtual(scenario)


@pytest.mark.parametrize("timeout_s", [0.0, 0.5, 3.0, 60.0])
def test_loss_is_known_before_the_store_gives_the_lease_away(virtual: Virtual, timeout_s: float) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        link.timeout_s = timeout_s
        lease = LeaseHolder(link, world.clock, ttl_s=TTL_S)
        lease_id = await lease.acquire()
        await world.store.commit([Put("/k", b"", lease_id)])
        holding = world.spawn(lease.hold())
        await asyncio.sleep(10.5)
        link.cut()
        cut_s = world.clock.monotonic_s()
        async with aclosing(world.store.watch("/k", 0)) as batches:
            async for batch in batches:
                if any(isinstance(event, KeyRemoved) for event in batch.events):
                    break
        assert lease.lease_id is None
        await asyncio.sleep(0.001)  # the holder's timer is due at the same moment
        assert holding.done(), "whoever holds is told, not only whoever asks"
        assert world.clock.monotonic_s() - cut_s <= TTL_S + 0.1

    virtual(scenario)


def test_one_missed_keep_alive_is_made_up_for(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        link.timeout_s = 0.1
        lease = LeaseHolder(link, world.clock, ttl_s=TTL_S)
        lease_id = await lease.acquire()
        world.spawn(lease.hold())
        for _ in range(10):
            link.cut()
            await asyncio.sleep(1.5)
            link.mend()
            await asyncio.sleep(1.5)
        assert lease.lease_id == lease_id

    virtual(scenario)


# --- Election


def test_the_epoch_is_the_keys_create_revision(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        candidate = election(world, world.store)
        assert candidate.epoch is None
        world.spawn(candidate.run())
        epoch = await candidate.wait_leading()
        entry = await world.store.get(KEY)
        assert (entry.value, entry.create_revision) == (b"a", epoch)
        await asyncio.sleep(60)
        assert candidate.epoch == epoch

    virtual(scenario)


def test_a_standby_leads_at_once_after_a_resignation(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        first, second = election(world, world.store, "a"), election(world, world.store, "b", 2)
        leading = world.spawn(first.run())
        epoch = await first.wait_leading()
        world.spawn(second.run())
        await asyncio.sleep(10)
        assert second.epoch is None
        await world.stop(leading)
        assert first.epoch is None
        start_s = world.clock.monotonic_s()
        assert await second.wait_leading() > epoch
        assert world.clock.monotonic_s() - start_s < 0.2

    virtual(scenario)


def test_a_cut_leader_is_over_before_the_next_begins(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        first, second = election(world, link, "a"), election(world, world.store, "b", 2)
        world.spawn(first.run())
        epoch = await first.wait_leading()
        world.spawn(second.run())
        lost = world.spawn(first.wait_lost(epoch))
        await asyncio.sleep(10.3)
        link.cut()
        cut_s = world.clock.monotonic_s()
        await until(lambda: second.epoch is not None, 10)
        assert first.epoch is None
        assert lost.done()
        assert world.clock.monotonic_s() - cut_s <= TTL_S + 0.7
        link.mend()
        await asyncio.sleep(30)
        assert first.epoch is None
        assert second.epoch is not None

    virtual(scenario)


def test_a_process_that_was_stopped_does_not_believe_it_leads(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        candidate, mine = election(world, world.store), registration(world, world.store)
        world.spawn(candidate.run())
        world.spawn(mine.run())
        epoch, incarnation = await candidate.wait_leading(), await mine.wait_registered(1.0)
        world.pause_process(TTL_S - 0.1)
        assert (candidate.epoch, mine.incarnation) == (epoch, incarnation)
        world.pause_process(0.2)
        assert (candidate.epoch, mine.incarnation) == (None, None), "before any task could run"
        assert await candidate.wait_leading() > epoch

    virtual(scenario)


def test_a_short_outage_changes_no_leader(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        link.timeout_s = 0.1
        candidate = election(world, link)
        world.spawn(candidate.run())
        epoch = await candidate.wait_leading()
        for _ in range(5):
            link.cut()
            await asyncio.sleep(1.0)
            link.mend()
            await asyncio.sleep(2.0)
        assert candidate.epoch == epoch

    virtual(scenario)


def test_a_leader_whose_key_is_removed_steps_down(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        candidate = election(world, link)
        world.spawn(candidate.run())
        epoch = await candidate.wait_leading()
        await asyncio.sleep(1)
        await world.store.commit([Delete(KEY)])
        await asyncio.wait_for(candidate.wait_lost(epoch), 0.1)
        newer = await candidate.wait_leading()
        assert newer > epoch
        link.cut()  # removed unseen, and the history of it compacted
        await world.store.commit([Delete(KEY)])
        await world.store.commit([Put("/x", b"")])
        world.store.compact(10_000)
        link.mend()
        await asyncio.wait_for(candidate.wait_lost(newer), 2.0)
        assert await candidate.wait_leading() > newer

    virtual(scenario)


def test_a_campaign_whose_answer_was_lost_makes_no_second_leader(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        blocker = await world.store.grant_lease(5)
        await world.store.commit([Put(KEY, b"other", blocker)])
        candidate = election(world, link)
        world.spawn(candidate.run())
        await asyncio.sleep(1)
        original = link.commit

        async def commit(*arguments: Any) -> Any:
            link.lose_next_answer = True
            link.commit = original
            return await original(*arguments)

        link.commit = commit
        epoch = await asyncio.wait_for(candidate.wait_leading(), 30)
        entry = await world.store.get(KEY)
        assert (entry.value, entry.create_revision) == (b"a", epoch)

    virtual(scenario)


@pytest.mark.parametrize("seed", range(25))
def test_never_two_leaders_and_epochs_only_grow(virtual: Virtual, seed: int) -> None:
    """Three candidates with slow and cut links; every fenced write of a believed leader meets the fence."""

    async def scenario(world: Any) -> None:
        rng = random.Random(seed)
        links = [world.link(slow_s=rng.choice([0.0, 0.2, 0.9]), rng=random.Random(n)) for n in range(3)]
        candidates = [election(world, link, str(n), n) for n, link in enumerate(links)]
        for candidate in candidates:
            world.spawn(candidate.run())
        epochs: list[int] = []
        for _ in range(3000):
            await asyncio.sleep(0.02)
            leading = [candidate.epoch for candidate in candidates if candidate.epoch is not None]
            assert len(leading) <= 1, "two leaders"
            if leading:
                if leading != epochs[-1:]:
                    epochs += leading
                fence = CreateRevisionIs(KEY, leading[0])
                assert isinstance(await world.store.commit([Put("/work", b"")], [fence]), Committed)
            if rng.random() < 0.02:
                link = rng.choice(links)
                link.timeout_s = rng.choice([0.0, 1.0, 5.0])
                rng.choice([link.cut, link.mend])()
        assert epochs == sorted(set(epochs))
        for link in links:
            link.mend()
        await until(lambda: any(candidate.epoch is not None for candidate in candidates), 30)

    virtual(scenario)


# --- Registration


def test_a_registration_holds_the_newest_value(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        mine = registration(world, world.store)
        running = world.spawn(mine.run())
        incarnation = await mine.wait_registered(1.0)
        for number in range(5):
            mine.update(b"v%d" % number)
        assert await mine.wait_registered(1.0) == incarnation == mine.incarnation
        entry = await world.store.get(WORKER)
        assert (entry.value, entry.create_revision) == (b"v4", incarnation)
        await asyncio.sleep(60)
        assert mine.incarnation == incarnation
        await world.stop(running)
        assert mine.incarnation is None
        assert await world.store.get(WORKER) is None

    virtual(scenario)


def test_a_lost_lease_gives_a_new_incarnation(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        mine = registration(world, link)
        world.spawn(mine.run())
        first = await mine.wait_registered(1.0)
        link.cut()
        await asyncio.sleep(TTL_S + 0.1)
        assert mine.incarnation is None
        mine.update(b"later")
        with pytest.raises(StoreUnavailable):
            await mine.wait_registered(1.0)
        link.mend()
        second = await mine.wait_registered(10.0)
        assert second > first
        assert (await world.store.get(WORKER)).value == b"later"

    virtual(scenario)


def test_an_update_during_a_short_outage_arrives(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        link = world.link()
        link.timeout_s = 0.1
        mine = registration(world, link)
        world.spawn(mine.run())
        incarnation = await mine.wait_registered(1.0)
        link.cut()
        mine.update(b"v2")
        await asyncio.sleep(1.0)
        link.mend()
        assert await mine.wait_registered(3.0) == incarnation
        assert (await world.store.get(WORKER)).value == b"v2"

    virtual(scenario)


@pytest.mark.parametrize("leased", [True, False])
def test_what_an_earlier_life_left_is_a_new_incarnation(virtual: Virtual, leased: bool) -> None:
    async def scenario(world: Any) -> None:
        lease_id = await world.store.grant_lease(60) if leased else 0
        left = await world.store.commit([Put(WORKER, b"from an earlier life", lease_id)])
        mine = registration(world, world.store)
        world.spawn(mine.run())
        assert await mine.wait_registered(1.0) > left.revision
        await asyncio.sleep(60)
        assert (await world.store.get(WORKER)).value == b"v1"

    virtual(scenario)


def test_a_removed_key_is_put_there_again(virtual: Virtual) -> None:
    async def scenario(world: Any) -> None:
        mine = registration(world, world.store)
        world.spawn(mine.run())
        first = await mine.wait_registered(1.0)
        await world.store.commit([Delete(WORKER)])
        mine.update(b"v2")
        await until(lambda: mine.incarnation not in (None, first), 5.0)
        await world.store.commit([Delete(WORKER)])
        await asyncio.sleep(3 * TTL_S)
        assert (await world.store.get(WORKER)).value == b"v2", "noticed without an update too"

    virtual(scenario)
