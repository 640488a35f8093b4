"""The reconciler under a real election on a real etcd: it acts, hands over, and is fenced when deposed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from services.adapters.etcd.store import EtcdStore
from services.adapters.memory.store import MemoryStore
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord, decode
from services.controlplane.reconciler import Reconciler
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    EVENTS,
    ROOT,
    WORKERS,
    AssignedVersion,
    Assignment,
    Deployment,
    EventRecord,
    Leader,
    LoadedVersion,
    Meta,
    VersionState,
    Worker,
    dump,
    leader_key,
    load,
)
from services.ports.store import Delete, Put, Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.supervisor import Supervisor
from tests.support.election import StaticElection

KEY = leader_key("controlplane")
CLOCK = SystemClock()


@dataclass
class Plane:
    election: Election
    reconciler: Reconciler
    supervisor: Supervisor
    campaign: asyncio.Task[None]


def fleet_informer(store: Store) -> Informer[FleetRecord | None]:
    return Informer(store, ROOT, decode, CLOCK)


@asynccontextmanager
async def control_plane(store: Store, name: str) -> AsyncIterator[Plane]:
    supervisor = Supervisor(CLOCK)
    informer = fleet_informer(store)
    election = Election(store, KEY, dump(Leader(name, "")), 2, CLOCK)
    reconciler = Reconciler(store, informer, election, CLOCK, events=EventRecorder(store, CLOCK))
    supervisor.spawn("informer", informer.run())
    campaign = supervisor.spawn("election", election.run())
    supervisor.spawn("reconciler", reconciler.run())
    try:
        yield Plane(election, reconciler, supervisor, campaign)
        assert supervisor.healthy, supervisor.failures
    finally:
        await supervisor.close()


async def put(store: Store, key: str, record: object) -> None:
    await store.commit([Put(key, dump(record))])


async def assignments(store: Store) -> dict[str, list[str]]:
    listing = await store.list(ASSIGNMENTS)
    found = [load(entry.value, Assignment) for entry in listing.entries]
    return {one.worker_id: [version.deployment for version in one.versions] for one in found}


async def eventually(check: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():  # the store is not ours to signal
            await asyncio.sleep(0.02)


async def until(store: Store, expected: dict[str, list[str]]) -> None:
    async def check() -> bool:
        return await assignments(store) == expected

    await eventually(check)


def deployment(name: str, replicas: int = 1) -> Deployment:
    return Deployment(Meta(name), "m", "v", "sha256:1", replicas)


async def test_follows_deployments_and_workers_and_hands_over(own_etcd: Any) -> None:
    async with AsyncExitStack() as stack:
        store = EtcdStore([own_etcd.address], CLOCK)
        stack.push_async_callback(store.close)
        first = await stack.enter_async_context(control_plane(store, "a"))
        second = await stack.enter_async_context(control_plane(store, "b"))
        await put(store, WORKERS + "w0", Worker("w0", "x"))
        await put(store, DEPLOYMENTS + "d", deployment("d", 2))
        await until(store, {"w0": ["d"]})
        await put(store, WORKERS + "w1", Worker("w1", "x"))
        await until(store, {"w0": ["d"], "w1": ["d"]})
        await store.commit([Delete(WORKERS + "w0")])
        await put(store, WORKERS + "w2", Worker("w2", "x"))
        await until(store, {"w0": ["d"], "w1": ["d"], "w2": ["d"]})
        for name in ("w1", "w2"):
            ready = LoadedVersion("d", "m", "sha256:1", VersionState.READY)
            await put(store, WORKERS + name, Worker(name, "x", versions=(ready,)))
        await until(store, {"w1": ["d"], "w2": ["d"]})

        leading, standby = (first, second) if first.election.epoch else (second, first)
        leading.campaign.cancel()
        async with asyncio.timeout(30):
            await standby.election.wait_leading()
        await put(store, DEPLOYMENTS + "d", deployment("d", 0))
        await until(store, {"w1": [], "w2": []})


async def synced(store: Store, supervisor: Supervisor) -> Any:
    informer = fleet_informer(store)
    supervisor.spawn("informer", informer.run())
    await informer.wait_synced(5)
    return informer


async def test_deposed_leader_writes_nothing() -> None:
    store = MemoryStore(CLOCK)
    supervisor = Supervisor(CLOCK)
    try:
        await put(store, WORKERS + "w0", Worker("w0", "x"))
        await put(store, DEPLOYMENTS + "d", deployment("d"))
        await put(store, DEPLOYMENTS + "short", deployment("short", 2))
        await put(store, KEY, Leader("old", ""))
        entry = await store.get(KEY)
        assert entry is not None
        informer = await synced(store, supervisor)
        reconciler = Reconciler(
            store,
            informer,
            StaticElection(entry.create_revision),
            CLOCK,
            events=EventRecorder(store, CLOCK),
        )
        await store.commit([Delete(KEY)])
        assert not await reconciler.reconcile(entry.create_revision)
        assert await assignments(store) == {}
        await put(store, KEY, Leader("new", ""))
        assert not await reconciler.reconcile(entry.create_revision)
        assert await assignments(store) == {}
        assert (await store.list(EVENTS)).entries == (), "a deposed leader tells nothing"
        new = await store.get(KEY)
        assert new is not None
        reconciler = Reconciler(
            store,
            informer,
            StaticElection(new.create_revision),
            CLOCK,
            events=EventRecorder(store, CLOCK),
        )
        assert await reconciler.reconcile(new.create_revision)
        assert await assignments(store) == {"w0": ["d", "short"]}
        (told,) = (await store.list(EVENTS)).entries
        assert load(told.value, EventRecord).resource == "short"
    finally:
        await supervisor.close()


async def test_write_on_an_old_view_is_refused_and_planned_again() -> None:
    store = MemoryStore(CLOCK)
    supervisor = Supervisor(CLOCK)
    try:
        await put(store, WORKERS + "w0", Worker("w0", "x"))
        await put(store, DEPLOYMENTS + "d", deployment("d"))
        await put(store, KEY, Leader("me", ""))
        entry = await store.get(KEY)
        assert entry is not None
        informer = await synced(store, supervisor)
        reconciler = Reconciler(
            store,
            informer,
            StaticElection(entry.create_revision),
            CLOCK,
            events=EventRecorder(store, CLOCK),
        )
        other = Assignment("w0", (AssignedVersion("d", "m", "sha256:0"),))
        await put(store, ASSIGNMENTS + "w0", other)  # the view does not know it yet
        assert not await reconciler.reconcile(entry.create_revision)
        supervisor.spawn("reconciler", reconciler.run())

        async def new_version() -> bool:
            held = await store.get(ASSIGNMENTS + "w0")
            assert held is not None
            return load(held.value, Assignment).versions[0].version_digest == "sha256:1"

        await eventually(new_version)
        settled = (await store.list("/")).revision
        await asyncio.sleep(0.5)
        assert (await store.list("/")).revision == settled, "it writes though nothing changed"
    finally:
        await supervisor.close()


@pytest.mark.parametrize("epoch", [None, 99])
async def test_epoch_is_asked_before_each_write(epoch: int | None) -> None:
    store = MemoryStore(CLOCK)
    supervisor = Supervisor(CLOCK)
    try:
        await put(store, WORKERS + "w0", Worker("w0", "x"))
        await put(store, DEPLOYMENTS + "d", deployment("d"))
        await put(store, KEY, Leader("me", ""))
        entry = await store.get(KEY)
        assert entry is not None
        leadership = StaticElection(entry.create_revision)
        reconciler = Reconciler(
            store,
            await synced(store, supervisor),
            leadership,
            CLOCK,
            events=EventRecorder(store, CLOCK),
        )
        leadership.epoch = epoch
        assert not await reconciler.reconcile(entry.create_revision)
        assert await assignments(store) == {}
    finally:
        await supervisor.close()
