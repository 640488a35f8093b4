"""Signals of a deployment beside its queue, on a real etcd: zones, burn rates, and lines of batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fairway.cli.commands.scaling import explanation
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import slis_pb2
from services.adapters.etcd.store import EtcdStore
from services.controlplane.objectives.servicer import SliServicer
from services.core.arms import SliReport, SliSums
from services.core.batches import BatchRecord, BatchStatus, OwnerRecord, batch_key, owner_key
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import (
    ASSIGNMENTS,
    NODES,
    OBJECTIVES,
    WORKERS,
    Assignment,
    LoadedVersion,
    Meta,
    Node,
    Objective,
    Priority,
    VersionState,
    Worker,
    dump,
    load,
)
from services.core.scaling import Scaling
from services.ports.store import Delete, Put
from services.rpc.convert.slis import report_to_proto
from tests.integration.test_scaling import CLOCK, DIGEST, Fleet, Plane, Scheduler, control_plane, eventually
from tests.support.slis import key_of

RATE = 100.0
READY = LoadedVersion("chat", "m", DIGEST, VersionState.READY)


class Arriving(Scheduler):
    """Reports requests of the first class that arrive at a rate."""

    per_s = 250.0

    async def __call__(self) -> dict[str, PoolLoad]:
        self.calls += 1
        arrived = self.per_s * CLOCK.monotonic_s()
        return {DIGEST: PoolLoad((ClassLoad(Priority.INTERACTIVE, 2.0, arrived=arrived),), RATE, 10.0)}


async def fleet_of(store: EtcdStore, zones: str, most: int) -> Fleet:
    fleet = Fleet(store)
    fleet.deployment = replace(fleet.deployment, scaling=Scaling(1, most))
    workers = [Worker(f"w{n}", f"w{n}:1", zone=zone, versions=(READY,)) for n, zone in enumerate(zones)]
    await store.commit([Put(WORKERS + one.worker_id, dump(one)) for one in workers])
    await fleet.change(fleet.deployment.scaling)
    return fleet


async def explained(plane: Plane) -> pb.DeploymentScaling:
    answer = await plane.listing.page(pb.ListScalingRequest(deployment="chat"), forwarded=False)
    return answer.deployments[0]


async def signals(plane: Plane) -> dict[str, int]:
    return {one.signal: one.replicas for one in (await explained(plane)).present_reasons}


@pytest.mark.asyncio
async def test_the_first_class_has_its_replicas_whichever_zone_is_lost(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet = await fleet_of(store, "aaabb", 4)
    await store.commit([Put(WORKERS + "w9", dump(Worker("w9", "w9:1", zone="c", labels={"other": "1"})))])
    await store.commit([Put(NODES + "w9", dump(Node("w9", cordoned=True)))])
    async with control_plane(store, "a", Arriving()) as plane:
        await eventually(lambda: fleet.has(4), 30.0)
        found = await explained(plane)
        assert found.present_reasons[0].signal in ("zone", "maximum"), found
        assert (await signals(plane))["zone"] > (await signals(plane))["sustained"]
        assert {one.zone: one.replicas for one in found.zones} == {"a": 2, "b": 2}
        assert "zones: 2 in a, 2 in b" in explanation(found, CLOCK.unix_s())
        placed = [load(one.value, Assignment) for one in (await store.list(ASSIGNMENTS)).entries]
        used = [one.worker_id for one in placed if one.versions]
        assert sum(name in ("w3", "w4") for name in used) == 2, "half of them survive the loss of either"
        for name in ("w3", "w4"):
            await store.commit([Put(NODES + name, dump(Node(name, cordoned=True)))])

        async def gone() -> bool:
            return "zone" not in await signals(plane)

        await eventually(gone)
    await store.close()


@pytest.mark.asyncio
async def test_an_objective_that_burns_while_requests_wait_adds_replicas(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet = await fleet_of(store, "aaa", 3)
    objective = Objective(Meta("o"), "chat", Priority.STANDARD, availability=0.99)
    await store.commit([Put(OBJECTIVES + "o", dump(objective))])
    waits = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, 5.0, 5.0),), RATE, 10.0)
    async with control_plane(store, "a", Scheduler({DIGEST: waits})) as plane:
        await eventually(lambda: fleet.has(1))
        await eventually(lambda: _counts(plane))
        assert "burn" not in await signals(plane)
        report = SliReport(CLOCK.unix_s(), {key_of("chat", DIGEST): SliSums(requests=100, errors=20)}, {})
        message = slis_pb2.ReportSlisRequest(source="g", first=1, oldest=1, reports=[report_to_proto(report)])
        context: Any = None
        await SliServicer(plane.slis).ReportSlis(message, context)
        await eventually(lambda: fleet.has(2))
        found = await explained(plane)
        assert found.reasons[0].signal == "burn"
        assert found.load.classes[0].burn_ratio == pytest.approx(20.0)
        assert "budget spent 20 times too fast" in "\n".join(explanation(found, CLOCK.unix_s()))
    await store.close()


async def _counts(plane: Plane) -> bool:
    return plane.slis.leads and plane.scaling.scaler("chat") is not None and bool(plane.objectives())


@pytest.mark.asyncio
async def test_lines_of_a_batch_get_the_replicas_that_finish_them_in_time(own_etcd: Any) -> None:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    fleet = await fleet_of(store, "aaaaa", 5)
    now_s = CLOCK.unix_s()
    batch = BatchRecord(
        "batch_1",
        "acme",
        "k",
        "/v1/completions",
        "f",
        "o",
        "e",
        "1h",
        now_s,
        now_s + 3700.0,
        BatchStatus.IN_PROGRESS,
        lines=2000,
        models={"chat": 1000, "other": 1000},
        next_line=200,
        work=200_000.0,
    )
    idle = PoolLoad((ClassLoad(Priority.BATCH, arrived=5.0),), RATE, 10.0)
    async with control_plane(store, "a", Scheduler({DIGEST: idle})) as plane:
        await eventually(lambda: fleet.has(1))
        await store.commit([Put(batch_key("acme", "batch_1"), dump(batch))])
        await eventually(lambda: fleet.has(3))  # 900 lines of 1,000 tokens in 3,540 s
        found = await explained(plane)
        assert found.reasons[0].signal == "deadlines"
        (lines,) = found.load.classes[0].due
        assert (lines.left.seconds, lines.work) == (3660, 900_000.0)
        assert "lines of batches: 9e+05 left" in "\n".join(explanation(found, CLOCK.unix_s()))
        await store.commit([Put(owner_key("acme", "batch_1"), dump(OwnerRecord("g", stalled=True)))])
        await eventually(lambda: fleet.has(1))  # its lines are refused for another reason
        await store.commit([Delete(owner_key("acme", "batch_1"))])
        await eventually(lambda: fleet.has(3))
        await store.commit([Put(batch_key("acme", "batch_1"), dump(batch.cancelled(now_s)))])
        await eventually(lambda: fleet.has(1))
    await store.close()
