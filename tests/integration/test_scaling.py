"""Scaling on a real etcd: decisions reach the planner, are fenced, and end with the bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.adapters.etcd.store import EtcdStore
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import decode
from services.controlplane.objectives.policy.book import ObjectivesByClass
from services.controlplane.objectives.store import SliStore
from services.controlplane.reconciler import Reconciler
from services.controlplane.scaling.controller import ScalingController, advancing
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.controlplane.scaling.servicer import ScalingListing
from services.controlplane.telemetry import ScalingTelemetry
from services.core.batches import BATCH_OWNERS, BATCHES, BatchRecord, OwnerRecord
from services.core.errors import NoLeader, NotFound
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    EVENTS,
    OBJECTIVES,
    ROOT,
    SCALED,
    WORKERS,
    Assignment,
    Deployment,
    EventRecord,
    Leader,
    Meta,
    Objective,
    Priority,
    Worker,
    dump,
    leader_key,
    load,
)
from services.core.scaling import Scaled, Scaling
from services.ports.store import Delete, Put, Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.indexes import ObjectiveIndex
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.supervisor import Supervisor
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane

KEY = leader_key("controlplane")
CLOCK = SystemClock()
DIGEST = "sha256:" + "a" * 64


@dataclass
class Scheduler:
    """What the scheduler reports; None: none leads."""

    loads: Mapping[str, PoolLoad] | None = field(default_factory=dict)
    calls: int = 0

    async def __call__(self) -> Mapping[str, PoolLoad]:
        self.calls += 1
        if self.loads is None:
            raise NoLeader("no scheduler leads that can be reached")
        return self.loads


@dataclass
class Plane:
    scaling: ScalingController
    listing: ScalingListing
    election: Any
    campaign: asyncio.Task[None] | None
    slis: SliStore
    objectives: Callable[[], ObjectivesByClass]


@asynccontextmanager
async def control_plane(
    store: Store, name: str, scheduler: Scheduler, election: StaticElection | None = None
) -> AsyncIterator[Plane]:
    supervisor = Supervisor(CLOCK)
    informer = Informer(store, ROOT, decode, CLOCK)
    events = EventRecorder(store, CLOCK)
    campaign = None
    leads: Any = election
    if leads is None:
        leads = Election(store, KEY, dump(Leader(name, "")), 2, CLOCK)
        campaign = supervisor.spawn("election", leads.run())
    batches = Informer(store, BATCHES, lambda entry: load(entry.value, BatchRecord), CLOCK)
    owners = Informer(store, BATCH_OWNERS, lambda entry: load(entry.value, OwnerRecord), CLOCK)
    promised = Informer(store, OBJECTIVES, lambda entry: load(entry.value, Objective), CLOCK)
    index = ObjectiveIndex(promised)
    slis = SliStore(MemoryLedger(), CLOCK, leads, lambda: index.by_class)
    scaling = ScalingController(
        store,
        informer,
        leads,
        CLOCK,
        loads=scheduler,
        burn_of=slis.burn_of,
        batches=lambda: advancing(batches.view, owners.view),
        tuning=ScalerTuning(settle_s=3.0),
        telemetry=ScalingTelemetry(),
    )
    for each in (informer, batches, owners, promised):
        supervisor.spawn(f"informer of {each.prefix}", each.run())
    supervisor.spawn("indicators", slis.run())
    supervisor.spawn("scaling", scaling.run())
    supervisor.spawn("events", events.run())
    supervisor.spawn("reconciler", Reconciler(store, informer, leads, CLOCK, events=events).run())
    try:
        listing = ScalingListing(store, scaling, NoPlane())
        yield Plane(scaling, listing, leads, campaign, slis, lambda: index.by_class)
        assert supervisor.healthy, supervisor.failures
    finally:
        await supervisor.close()


async def eventually(check: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():  # the store is not ours to signal
            await asyncio.sleep(0.05)


class Fleet:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.deployment = Deployment(
            Meta("chat"), "m", "latest", DIGEST, 0, scaling=Scaling(0, 3, idle_s=600.0)
        )

    async def put(self) -> None:
        workers = [Worker(f"w{number}", f"w{number}:1") for number in range(3)]
        await self.store.commit([Put(WORKERS + one.worker_id, dump(one)) for one in workers])
        await self.store.commit([Put(DEPLOYMENTS + "chat", dump(self.deployment))])

    async def change(self, scaling: Scaling | None) -> None:
        self.deployment = replace(self.deployment, scaling=scaling)
        await self.store.commit([Put(DEPLOYMENTS + "chat", dump(self.deployment))])

    async def decided(self) -> Scaled | None:
        entry = await self.store.get(SCALED + "chat")
        return None if entry is None else load(entry.value, Scaled)

    async def assigned(self) -> int:
        listing = await self.store.list(ASSIGNMENTS)
        return sum(bool(load(entry.value, Assignment).versions) for entry in listing.entries)

    async def has(self, replicas: int) -> bool:
        return await self.assigned() == replicas


HELD = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 50.0, 50.0),), held=2)


@pytest.mark.asyncio
async def test_a_decision_reaches_the_planner_and_the_operators_number_stays(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet, scheduler = Fleet(store), Scheduler()
    await fleet.put()
    async with control_plane(store, "a", scheduler) as plane:
        await eventually(lambda: fleet.has(0))
        scheduler.loads = {DIGEST: HELD}
        await eventually(lambda: fleet.has(1))
        decided = await fleet.decided()
        assert decided is not None
        assert decided.reasons[0].signal == "held"
        assert decided.epoch == plane.election.epoch
        await fleet.change(replace(fleet.deployment.scaling or Scaling(), override_replicas=3))
        await eventually(lambda: fleet.has(3))
        entry = await store.get(DEPLOYMENTS + "chat")
        assert entry is not None
        assert load(entry.value, Deployment).replicas == 0, "the operator's number is never written"
        answer = await plane.listing.page(pb.ListScalingRequest(deployment="chat"), forwarded=False)
        (found,) = answer.deployments
        assert (found.replicas, found.present_reasons[0].signal, found.load.held) == (3, "override", 2)
        with pytest.raises(NotFound):
            await plane.listing.page(pb.ListScalingRequest(deployment="none"), forwarded=False)
        await fleet.change(None)
        await eventually(lambda: fleet.has(0))  # the deployment's own number holds again
        await eventually(lambda: _gone(fleet))
        listing = await store.list(EVENTS)
        events = [load(entry.value, EventRecord) for entry in listing.entries]
        assert "1 to 3 replicas: override: an operator set 3 replicas" in [e.message for e in events]
    await store.close()


async def _gone(fleet: Fleet) -> bool:
    return await fleet.decided() is None


@pytest.mark.asyncio
async def test_without_bounds_nothing_is_asked_and_without_a_scheduler_nothing_changes(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet, scheduler = Fleet(store), Scheduler()
    fleet.deployment = replace(fleet.deployment, replicas=2, scaling=None)
    await fleet.put()
    async with control_plane(store, "a", scheduler) as plane:
        await eventually(lambda: fleet.has(2))
        await asyncio.sleep(1.5)
        assert scheduler.calls == 0
        scheduler.loads = None
        await fleet.change(Scaling(0, 3, idle_s=1.0))
        await asyncio.sleep(5.0)  # longer than the settle and the idle time
        assert await fleet.has(2)
        answer = await plane.listing.page(pb.ListScalingRequest(), forwarded=False)
        assert answer.deployments[0].present_reasons[0].signal == "unobserved"
        assert not answer.deployments[0].HasField("load")
        scheduler.loads = {}
        await eventually(lambda: fleet.has(0))
    await store.close()


@pytest.mark.asyncio
async def test_a_deposed_leader_writes_nothing_and_its_successor_keeps_the_replicas(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet, busy, idle = Fleet(store), Scheduler({DIGEST: HELD}), Scheduler({})
    await fleet.put()
    async with control_plane(store, "a", busy) as first:
        await eventually(lambda: fleet.has(1))
        deposed = StaticElection(first.election.epoch)
        assert first.campaign is not None
        first.campaign.cancel()
        await store.commit([Delete(KEY)])
        before = await store.get(SCALED + "chat")
        async with control_plane(store, "b", Scheduler({}), deposed):
            await fleet.change(replace(fleet.deployment.scaling or Scaling(), override_replicas=3))
            await asyncio.sleep(3.0)
            after = await store.get(SCALED + "chat")
            assert before is not None
            assert after is not None
            assert before.mod_revision == after.mod_revision, "its epoch is over, so its fence fails"
            await fleet.change(replace(fleet.deployment.scaling or Scaling(), override_replicas=None))
        async with control_plane(store, "c", idle) as second:
            await eventually(lambda: _leads(second))
            await asyncio.sleep(2.0)
            assert await fleet.has(1), "within the settle time of a new leader nothing is removed"
    await store.close()


async def _leads(plane: Plane) -> bool:
    return plane.scaling.scaler("chat") is not None
