"""Queues, events, nodes and watches over gRPC, with the state in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import common_pb2, controlplane_pb2_grpc
from fairway.v1 import controlplane_pb2 as pb
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.leader_calls import GrpcQueues
from services.adapters.links.scheduler_directory import LeaderAddress
from services.adapters.quarantine import StoreQuarantine
from services.controlplane.audit_reads import AuditReader
from services.controlplane.event_log import EventRecorder
from services.controlplane.resources.accounts import Sealer
from services.controlplane.resources.budgets import Budgets
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.controlplane.spend_alerts import SpendAlerts
from services.core.errors import FailedPrecondition, InvalidInput, NoLeader, NotFound
from services.core.generation import Principal, Usage
from services.core.limits import Claim, Price
from services.core.manifest import sha256_of
from services.core.records import (
    ASSIGNMENTS,
    EVENTS,
    QUARANTINE,
    TENANTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    Budget,
    KeyRole,
    Leader,
    LoadedVersion,
    Meta,
    Priority,
    Tag,
    Tenant,
    VersionRecord,
    VersionState,
    Worker,
    dump,
    leader_key,
    load,
    tag_key,
    version_key,
)
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Delete, Entry, Put
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.supervisor import Supervisor
from services.scheduler.service import GatewayPlacementStream
from simulator.stores.limiter import MemoryLimiter
from tests.integration.scheduler_fleet import (
    TOKEN,
    FakeWorker,
    SchedulerNode,
    StaticDirectory,
    place_spec,
)
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane

ADMIN = auth_metadata("admin")
CLOCK = SystemClock()
OLD, NEW = sha256_of(b"1"), sha256_of(b"2")
HANG_S = 20.0


def _authenticate(token: str | None) -> Principal:
    return Principal("admin", KeyRole.ADMIN)


@dataclass
class Plane:
    store: EtcdStore
    directory: StaticDirectory
    supervisor: Supervisor
    stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, metadata=ADMIN, timeout=HANG_S)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc

    def watch(self, *kinds: pb.ResourceKind.ValueType, after: int = 0) -> Any:
        request = pb.WatchResourcesRequest(kinds=kinds, after_revision=after)
        return self.stub.WatchResources(request, metadata=ADMIN, timeout=HANG_S)

    async def put(self, key: str, record: object) -> None:
        await self.store.commit([Put(key, dump(record))])

    async def record(self) -> None:
        """Return once a recorder follows the store: what was there before is told by none."""
        recorder = EventRecorder(self.store, CLOCK)
        self.supervisor.spawn("recorder", recorder.run())

        async def follows() -> bool:
            return recorder.revision > 0

        await eventually(follows)

    async def deploy(self, name: str, replicas: int = 1) -> pb.Deployment:
        deployment = pb.Deployment(metadata=pb.Metadata(name=name), model="m", version=OLD, replicas=replicas)
        answer = await self.call("CreateDeployment", pb.CreateDeploymentRequest(deployment=deployment))
        return answer.deployment  # type: ignore[no-any-return]


@pytest_asyncio.fixture
async def plane(own_etcd: Any) -> AsyncIterator[Plane]:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    for digest in (OLD, NEW):
        await store.commit([Put(version_key("m", digest), dump(VersionRecord("m", digest, 1, 0.0)))])
    supervisor, directory = Supervisor(CLOCK), StaticDirectory()
    service = ControlPlaneService(store, CLOCK, Sealer(b"k" * 32), MemoryLimiter(CLOCK))
    queues = GrpcQueues(directory, TOKEN, CLOCK, timeout_s=2.5)
    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                ControlPlaneServicer(
                    service,
                    store,
                    queues,
                    *[NoPlane()] * 5,
                    audit=AuditReader(store, MemoryLedger()),
                    require_current=lambda _: None,
                ),
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=_authenticate,
    )
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    yield Plane(store, directory, supervisor, controlplane_pb2_grpc.ControlPlaneServiceStub(channel))
    await channel.close()
    await server.stop(0)
    await supervisor.close()
    await store.close()


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await check():  # the store is not ours to signal
            await asyncio.sleep(0.02)


async def changes_of(stream: Any, count: int) -> list[pb.ResourceChange]:
    """Return the next ``count`` changes that the stream tells."""
    found: list[pb.ResourceChange] = []
    while len(found) < count:
        batch = await stream.read()
        assert isinstance(batch, pb.WatchResourcesResponse), batch
        found += batch.changes
    return found


# --- queues ----------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def scheduler(plane: Plane) -> AsyncIterator[SchedulerNode]:
    node = SchedulerNode(plane.supervisor)
    await node.start()
    yield node
    await node.stop()


async def test_no_queues_without_a_leader(plane: Plane, scheduler: SchedulerNode) -> None:
    with pytest.raises(NoLeader, match="start a scheduler"):
        await plane.call("ListQueues", pb.ListQueuesRequest())
    plane.directory.turn(LeaderAddress("s1", scheduler.address, 1))  # it is said to lead, and does not
    with pytest.raises(NoLeader):
        await plane.call("ListQueues", pb.ListQueuesRequest())
    plane.directory.turn(LeaderAddress("gone", "127.0.0.1:1", 1))
    with pytest.raises(NoLeader):
        await plane.call("ListQueues", pb.ListQueuesRequest())


async def test_queues_are_told_by_pool_tenant_and_class(plane: Plane, scheduler: SchedulerNode) -> None:
    scheduler.election.turn(7)
    plane.directory.turn(LeaderAddress("s1", scheduler.address, 7))
    await plane.deploy("chat")

    async def leads() -> bool:
        return scheduler.service.term is not None

    await eventually(leads)
    stream: GatewayPlacementStream = scheduler.service.open("g1", lambda: None)
    places = [
        (number, place_spec(f"r{number}", digest=OLD, priority=priority, prompt_tokens=10 * number))
        for number, priority in enumerate((Priority.BATCH, Priority.STANDARD, Priority.STANDARD), 1)
    ]
    stream.submit(places)
    term = scheduler.service.term
    assert term is not None

    async def queued() -> bool:
        return len(term.queue) == 3

    await eventually(queued)
    answer = await plane.call("ListQueues", pb.ListQueuesRequest())
    (queue,) = answer.queues
    assert (answer.leader_id, answer.leader_epoch, list(queue.deployments)) == ("s1", 7, ["chat"])
    assert (queue.pool.version_digest, queue.pool.queued, queue.pool.queued_prompt_tokens) == (OLD, 3, 60)
    assert (queue.pool.workers, queue.pool.HasField("predicted_wait")) == (0, False)
    assert [(s.tenant, s.priority, s.queued, s.queued_prompt_tokens) for s in queue.pool.shares] == [
        ("acme", common_pb2.PRIORITY_STANDARD, 2, 50),
        ("acme", common_pb2.PRIORITY_BATCH, 1, 10),
    ]
    assert queue.pool.oldest_wait.ToMilliseconds() >= 0
    other = await plane.call("ListQueues", pb.ListQueuesRequest(tenant="other"))
    assert (other.queues[0].pool.queued, list(other.queues[0].pool.shares)) == (3, [])
    stream.close()


async def test_queues_tell_the_room_of_the_workers(plane: Plane, scheduler: SchedulerNode) -> None:
    scheduler.election.turn(7)
    plane.directory.turn(LeaderAddress("s1", scheduler.address, 7))
    reporter = FakeWorker("w1", kv_blocks=10).reporter(plane.directory, plane.supervisor)

    async def told() -> bool:
        queues = (await plane.call("ListQueues", pb.ListQueuesRequest())).queues
        return bool(queues) and queues[0].pool.serving_workers == 1

    await eventually(told)
    (queue,) = (await plane.call("ListQueues", pb.ListQueuesRequest())).queues
    assert (queue.pool.workers, queue.pool.queued) == (1, 0)
    assert queue.pool.kv_tokens_free == queue.pool.kv_tokens_total == 160
    await reporter.close()


async def test_nothing_is_explained_without_a_leader(plane: Plane) -> None:
    with pytest.raises(NoLeader, match="start a scheduler"):
        await plane.call("ExplainPlacement", pb.ExplainPlacementRequest(request_id="r1"))
    with pytest.raises(NoLeader, match="start a scheduler"):
        await plane.call("ListWorkers", pb.ListWorkersRequest())


async def test_a_placement_is_explained_and_its_worker_listed(plane: Plane, scheduler: SchedulerNode) -> None:
    scheduler.election.turn(7)
    plane.directory.turn(LeaderAddress("s1", scheduler.address, 7))
    worker = FakeWorker("w1", kv_blocks=10)
    reporters = [
        found.reporter(plane.directory, plane.supervisor) for found in (worker, FakeWorker("w2", kv_blocks=1))
    ]

    async def told() -> bool:
        return len((await plane.call("ListWorkers", pb.ListWorkersRequest())).workers) == 2

    await eventually(told)
    stream: GatewayPlacementStream = scheduler.service.open("g1", lambda: None)
    stream.submit([(1, place_spec("r1", prompt_tokens=20)), (2, place_spec("r2", prompt_tokens=120))])

    async def decided() -> bool:
        answer = await plane.call("ExplainPlacement", pb.ExplainPlacementRequest(request_id="r1"))
        return bool(answer.decisions) and answer.decisions[0].outcome == "GRANTED"

    await eventually(decided)
    answer = await plane.call("ExplainPlacement", pb.ExplainPlacementRequest(request_id="r1"))
    for prefix in ("chatcmpl-", "cmpl-"):  # the ids of the answer, as OpenAI's clients show them
        named = pb.ExplainPlacementRequest(request_id=prefix + "r1")
        assert (await plane.call("ExplainPlacement", named)).decisions == answer.decisions
    (decision,) = answer.decisions
    assert (answer.leader_id, answer.leader_epoch, decision.epoch) == ("s1", 7, 7)
    assert (decision.worker_id, decision.tenant, decision.prompt_tokens) == ("w1", "acme", 20)
    assert [ranked.worker_id for ranked in decision.ranked] == ["w1"]
    (waiting,) = (await plane.call("ExplainPlacement", pb.ExplainPlacementRequest(request_id="r2"))).decisions
    assert waiting.outcome == "QUEUED"
    nothing = await plane.call("ExplainPlacement", pb.ExplainPlacementRequest(request_id="r3"))
    assert list(nothing.decisions) == []
    first = await plane.call("ListWorkers", pb.ListWorkersRequest(page_size=1))
    rest = await plane.call("ListWorkers", pb.ListWorkersRequest(page_token=first.next_page_token))
    assert [found.worker_id for found in (*first.workers, *rest.workers)] == ["w1", "w2"]
    pool = first.workers[0].pools[0]
    assert (pool.kv_tokens_total, pool.kv_tokens_room, pool.granted, pool.ready) == (160, 96, 1, True)
    stream.close()
    for reporter in reporters:
        await reporter.close()


# --- quarantine ------------------------------------------------------------------------------------


async def test_every_gateway_admits_an_input_that_is_lifted(plane: Plane) -> None:
    views = [Informer(plane.store, QUARANTINE, _quarantined, CLOCK) for _ in range(2)]
    for number, view in enumerate(views):
        plane.supervisor.spawn(f"entries {number}", view.run())
        await view.wait_synced(HANG_S)
    here, there = (StoreQuarantine(plane.store, view, CLOCK) for view in views)
    fingerprint = "1" * 32
    await here.add(OLD, fingerprint, model="chat", deaths=2)

    async def refused() -> bool:
        return there.find(OLD, fingerprint) is not None

    await eventually(refused)
    (one,) = (await plane.call("ListQuarantined", pb.ListQuarantinedRequest(version_digest=OLD))).inputs
    assert (one.fingerprint, one.model, one.deaths) == (fingerprint, "chat", 2)
    request = pb.DeleteQuarantinedRequest(version_digest=OLD, fingerprint=fingerprint, request_id="r")
    for _ in range(2):
        await plane.call("DeleteQuarantined", request)

    async def admitted() -> bool:
        return not here.holds(OLD) and not there.holds(OLD)

    await eventually(admitted)
    assert (await plane.call("ListQuarantined", pb.ListQuarantinedRequest())).inputs == []


def _quarantined(entry: Entry) -> Quarantined:
    return load(entry.value, Quarantined)


# --- nodes -----------------------------------------------------------------------------------------


def loaded(name: str, state: VersionState = VersionState.READY, **fields: Any) -> LoadedVersion:
    return LoadedVersion(name, "m", OLD, state, **fields)


async def test_a_node_tells_its_memory_its_lease_and_how_far_its_drain_is(plane: Plane) -> None:
    await plane.deploy("d")
    held = loaded("d", weight_bytes=300, kv_bytes=200, needed_bytes=350)
    worker = Worker(
        "w0", "w0:1", labels={"gpu": "a"}, memory_bytes=1000, versions=(held,), memory_free_bytes=500
    )
    await plane.put(WORKERS + "w0", worker)
    await plane.put(ASSIGNMENTS + "w0", Assignment("w0", (AssignedVersion("d", "m", OLD),)))
    node = (await plane.call("GetNode", pb.GetNodeRequest(name="w0"))).node
    assert (node.state, node.memory_bytes, node.memory_free_bytes) == (pb.NODE_STATE_LIVE, 1000, 500)
    assert dict(node.metadata.labels) == {"gpu": "a"}
    assert (node.versions[0].weight_bytes, node.versions[0].kv_bytes) == (300, 200)
    assert not node.HasField("drain")

    node = (await plane.call("DrainNode", pb.DrainNodeRequest(name="w0"))).node
    assert (node.drain.done, node.drain.assigned_versions) == (False, 1)
    assert list(node.drain.waiting_for) == [
        "d: no worker for 1 replicas: 1 has_a_replica; it has 1 replicas, each on a worker of its own, and 0 "
        "are on other workers: add a worker or uncordon one"
    ]
    await plane.put(ASSIGNMENTS + "w0", Assignment("w0"))
    node = (await plane.call("GetNode", pb.GetNodeRequest(name="w0"))).node
    assert (node.drain.done, node.drain.ending_versions) == (False, 1)
    await plane.put(WORKERS + "w0", replace(worker, versions=()))
    assert (await plane.call("GetNode", pb.GetNodeRequest(name="w0"))).node.drain.done


async def test_a_node_is_forgotten_only_once_it_is_gone(plane: Plane) -> None:
    await plane.put(WORKERS + "w0", Worker("w0", "w0:1"))
    await plane.put(ASSIGNMENTS + "w0", Assignment("w0", (AssignedVersion("d", "m", OLD),)))
    with pytest.raises(FailedPrecondition, match="lives"):
        await plane.call("DeleteNode", pb.DeleteNodeRequest(name="w0"))
    await plane.store.commit([Delete(WORKERS + "w0")])
    (node,) = (await plane.call("ListNodes", pb.ListNodesRequest())).nodes
    assert (node.metadata.name, node.state) == ("w0", pb.NODE_STATE_LOST)
    await plane.call("DeleteNode", pb.DeleteNodeRequest(name="w0", request_id="r"))
    await plane.call("DeleteNode", pb.DeleteNodeRequest(name="w0", request_id="r"))
    assert (await plane.call("ListNodes", pb.ListNodesRequest())).nodes == []
    with pytest.raises(NotFound):
        await plane.call("DeleteNode", pb.DeleteNodeRequest(name="w0"))


# --- watches ---------------------------------------------------------------------------------------


async def test_deployments_and_nodes_are_told_with_what_the_fleet_makes_of_them(plane: Plane) -> None:
    await plane.deploy("d")
    stream = plane.watch(pb.RESOURCE_KIND_DEPLOYMENT, pb.RESOURCE_KIND_NODE)
    (first,) = await changes_of(stream, 1)
    assert first.deployment.status.message == "no worker for 1 replicas: there is none"
    await plane.put(WORKERS + "w0", Worker("w0", "w0:1"))
    told = await changes_of(stream, 2)
    assert {change.WhichOneof("resource") for change in told} == {"deployment", "node"}
    await plane.put(ASSIGNMENTS + "w0", Assignment("w0", (AssignedVersion("d", "m", OLD),)))
    (change,) = await changes_of(stream, 1)
    assert change.deployment.status.assigned_replicas == 1
    await plane.put(WORKERS + "w0", Worker("w0", "w0:1", versions=(loaded("d"),)))
    told = await changes_of(stream, 2)
    assert {c.deployment.status.ready_replicas for c in told if c.HasField("deployment")} == {1}
    await plane.store.commit([Delete(WORKERS + "w0"), Delete(ASSIGNMENTS + "w0")])
    told = await changes_of(stream, 2)
    assert [(c.node.metadata.name, c.deleted) for c in told if c.HasField("node")] == [("w0", True)]
    stream.cancel()


async def test_versions_and_tags_are_told_and_a_watch_resumes(plane: Plane) -> None:
    stream = plane.watch(pb.RESOURCE_KIND_MODEL)
    batch = await stream.read()
    assert (batch.snapshot_end, len(batch.changes)) == (True, 2)
    assert {change.model_version.version_digest for change in batch.changes} == {OLD, NEW}
    stream.cancel()
    await plane.put(tag_key("m", "prod"), Tag("m", "prod", OLD))
    await plane.put(tag_key("m", "prod"), Tag("m", "prod", NEW))
    await plane.store.commit([Delete(tag_key("m", "prod")), Delete(version_key("m", OLD))])
    again = plane.watch(pb.RESOURCE_KIND_MODEL, after=batch.revision)
    told = await changes_of(again, 4)
    tags = [(c.model_tag, c.deleted) for c in told if c.HasField("model_tag")]
    assert [(tag.tag, tag.version_digest, deleted) for tag, deleted in tags] == [
        ("prod", OLD, False),
        ("prod", NEW, False),
        ("prod", "", True),
    ]
    assert [c.model_version.version_digest for c in told if c.HasField("model_version")] == [OLD]
    again.cancel()


async def test_a_resumed_watch_tells_what_moved_meanwhile(plane: Plane) -> None:
    await plane.deploy("kept")
    await plane.deploy("gone")
    stream = plane.watch(pb.RESOURCE_KIND_DEPLOYMENT)
    batch = await stream.read()
    assert len(batch.changes) == 2
    stream.cancel()
    await plane.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="gone"))
    await plane.put(WORKERS + "w0", Worker("w0", "w0:1"))
    again = plane.watch(pb.RESOURCE_KIND_DEPLOYMENT, after=batch.revision)
    told = await changes_of(again, 2)
    assert {(c.deployment.metadata.name, c.deleted) for c in told} == {("gone", True), ("kept", False)}
    again.cancel()


async def test_what_cannot_be_watched_says_so(plane: Plane) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.watch(pb.RESOURCE_KIND_LEADER).read()
    assert isinstance(from_rpc_error(caught.value), InvalidInput)


# --- events ----------------------------------------------------------------------------------------


async def test_two_recorders_write_each_event_once_and_they_can_be_filtered(plane: Plane) -> None:
    await plane.record()
    await plane.record()
    await plane.deploy("d", replicas=2)
    for number in range(5):
        await plane.put(WORKERS + "w0", Worker("w0", "w0:1", versions=(loaded("d", engine_restarts=number),)))
    await plane.store.commit([Delete(WORKERS + "w0")])

    async def all_told() -> bool:
        found = await plane.call("ListEvents", pb.ListEventsRequest())
        return any(event.reason == "NODE_LOST" for event in found.events)

    await eventually(all_told)
    events = (await plane.call("ListEvents", pb.ListEventsRequest())).events
    assert [event.reason for event in events] == [
        "NODE_LOST",
        *["ENGINE_RESTARTED"] * 4,
        "VERSION_READY",
        "NODE_JOINED",
        "DEPLOYMENT_CREATED",
    ]
    assert events[0].severity == pb.EVENT_SEVERITY_WARNING
    nodes = pb.ListEventsRequest(kinds=[pb.RESOURCE_KIND_NODE])
    assert {event.resource for event in (await plane.call("ListEvents", nodes)).events} == {"w0"}
    pages: list[str] = []
    token = ""
    while True:
        request = pb.ListEventsRequest(page_size=3, page_token=token, resource="d")
        page = await plane.call("ListEvents", request)
        pages += [event.name for event in page.events]
        token = page.next_page_token
        if not token:
            break
    assert pages == [event.name for event in events if event.resource == "d"]
    entries = (await plane.store.list(EVENTS)).entries
    assert all(entry.lease_id for entry in entries), "every event has its time to live"
    assert all(entry.mod_revision == entry.create_revision for entry in entries), "one was written again"
    with pytest.raises(InvalidInput):
        await plane.call("ListEvents", pb.ListEventsRequest(kinds=[pb.RESOURCE_KIND_UNSPECIFIED]))


async def test_two_control_planes_report_a_threshold_once(plane: Plane) -> None:
    limiter = MemoryLimiter(CLOCK)
    budgets = Budgets(plane.store, CLOCK, limiter)
    await plane.put(TENANTS + "acme", Tenant(Meta("acme")))
    await budgets.create(Budget(Meta("all"), "acme", limit_micros=100))
    held = await limiter.reserve(
        await limiter.admit("acme", "r1", ()),
        [Claim(limit, 90) for limit in Budget(Meta("all"), "acme", limit_micros=100).limits()],
        Price(output_micros=1_000_000),
    )
    await limiter.settle(held, Usage(0, 90))
    key = leader_key("controlplane")
    await plane.put(key, Leader("a", "h:1"))
    first = await plane.store.get(key)
    assert first is not None
    recorders = [EventRecorder(plane.store, CLOCK) for _ in range(2)]
    leads = StaticElection()  # each check is made by hand
    alerts = [SpendAlerts(plane.store, budgets, leads, CLOCK, events=one) for one in recorders]
    await asyncio.gather(*(one.check(first.create_revision) for one in alerts))
    await plane.store.commit([Delete(key)])
    await plane.put(key, Leader("b", "h:2"))
    second = await plane.store.get(key)
    assert second is not None
    await alerts[0].check(first.create_revision)
    await alerts[1].check(second.create_revision)
    events = (await plane.call("ListEvents", pb.ListEventsRequest(kinds=[pb.RESOURCE_KIND_BUDGET]))).events
    assert sorted(event.reason for event in events) == ["BUDGET_SPENT_50", "BUDGET_SPENT_80"]


async def test_events_are_watched_from_the_newest_and_resumed(plane: Plane) -> None:
    await plane.record()
    for name in ("a", "b", "c"):
        await plane.deploy(name)

    async def told() -> bool:
        return len((await plane.call("ListEvents", pb.ListEventsRequest())).events) == 3

    await eventually(told)
    stream = plane.stub.WatchEvents(pb.WatchEventsRequest(newest=2), metadata=ADMIN, timeout=HANG_S)
    batch: Any = await stream.read()
    assert [event.resource for event in batch.events] == ["b", "c"]
    await plane.deploy("d")
    seen: list[str] = []
    revision = 0
    while not seen:
        batch = await stream.read()
        seen, revision = [event.resource for event in batch.events], batch.revision
    assert seen == ["d"]
    stream.cancel()
    await plane.deploy("e")
    again = plane.stub.WatchEvents(
        pb.WatchEventsRequest(after_revision=revision), metadata=ADMIN, timeout=HANG_S
    )
    seen = []
    while not seen:
        batch = await again.read()
        seen = [event.resource for event in batch.events]
    assert seen == ["e"]
    again.cancel()
