"""ControlPlaneService on loopback: the real server, servicer and service over the store."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc, worker_pb2
from services.adapters.grpc_queues import GrpcQueues
from services.adapters.memory_store import MemoryStore
from services.adapters.scheduler_directory import SchedulerDirectory
from services.controlplane.bootstrap import bootstrap
from services.controlplane.sealing import Sealer
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.errors import (
    AlreadyExists,
    Conflict,
    EtagMismatch,
    FailedPrecondition,
    FairwayError,
    InvalidInput,
    NotFound,
    Unauthenticated,
    Unimplemented,
    UnsupportedFeature,
)
from services.core.generation import Principal
from services.core.manifest import sha256_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    KEYS,
    ROOT,
    TENANTS,
    WORKERS,
    ApiKey,
    AssignedVersion,
    Assignment,
    Deployment,
    KeyRole,
    LoadedVersion,
    Meta,
    Tag,
    Tenant,
    VersionRecord,
    VersionState,
    Worker,
    dump,
    load,
    tag_key,
    version_key,
)
from services.ports.store import Delete, Put
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, Service
from services.rpc.status import from_rpc_error
from services.runtime import secrets
from services.runtime.clock import SystemClock

ADMIN = auth_metadata("admin")
SEALER = Sealer(b"k" * 32)
DIGEST, OTHER = sha256_of(b"1"), sha256_of(b"2")


class TurnedClock(SystemClock):
    """The real clock, ahead by what a test turned it."""

    ahead_s = 0.0

    def unix_s(self) -> float:
        return super().unix_s() + self.ahead_s

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@dataclass
class Plane:
    store: MemoryStore
    clock: TurnedClock
    stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub
    revoked: set[str]

    async def call(self, method: str, request: object) -> object:
        try:
            return await getattr(self.stub, method)(request, metadata=ADMIN, timeout=10)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc

    async def tenant(self, name: str, request_id: str = "", **fields: object) -> pb.Tenant:
        tenant = pb.Tenant(metadata=pb.Metadata(name=name), **fields)  # type: ignore[arg-type]
        answer = await self.call("CreateTenant", pb.CreateTenantRequest(tenant=tenant, request_id=request_id))
        assert isinstance(answer, pb.CreateTenantResponse)
        return answer.tenant

    async def key(
        self, name: str, tenant: str = "", request_id: str = "", **fields: object
    ) -> pb.CreateKeyResponse:
        role = pb.KEY_ROLE_TENANT if tenant else pb.KEY_ROLE_ADMIN
        key = pb.Key(metadata=pb.Metadata(name=name), role=role, tenant=tenant, **fields)  # type: ignore[arg-type]
        answer = await self.call("CreateKey", pb.CreateKeyRequest(key=key, request_id=request_id))
        assert isinstance(answer, pb.CreateKeyResponse)
        return answer

    async def deployment(
        self, name: str, version: str = "prod", request_id: str = "", **fields: object
    ) -> pb.Deployment:
        message = pb.Deployment(
            metadata=pb.Metadata(name=name),
            model="tiny",
            version=version,
            **{"replicas": 1, **fields},  # type: ignore[arg-type]
        )
        request = pb.CreateDeploymentRequest(deployment=message, request_id=request_id)
        answer = await self.call("CreateDeployment", request)
        assert isinstance(answer, pb.CreateDeploymentResponse)
        return answer.deployment

    async def put(self, key: str, record: object) -> None:
        await self.store.commit([Put(key, dump(record))])

    async def stored_key(self, name: str) -> ApiKey:
        entry = await self.store.get(KEYS + name)
        assert entry is not None
        return load(entry.value, ApiKey)


def _authenticate(credentials: str | None) -> Principal:
    if credentials is None or not credentials.endswith("admin"):
        raise Unauthenticated("no")
    return Principal("admin", KeyRole.ADMIN)


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[Plane]:
    clock = TurnedClock()
    store = MemoryStore(clock, bookmark_s=0.2)
    for digest in (DIGEST, OTHER):
        record = VersionRecord("tiny", digest, 1, 0.0)
        await store.commit([Put(version_key("tiny", digest), dump(record))])
    await store.commit([Put(tag_key("tiny", "prod"), dump(Tag("tiny", "prod", DIGEST)))])
    revoked: set[str] = set()

    def require_current(who: Principal) -> None:
        if who.key_id in revoked:
            raise Unauthenticated("the API key is not valid any more")

    queues = GrpcQueues(SchedulerDirectory(store, clock), "t" * 40, clock, timeout_s=0.2)
    server = RpcServer(
        [
            Service(
                pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                ControlPlaneServicer(
                    ControlPlaneService(store, clock, SEALER), store, queues, require_current=require_current
                ),
            )
        ],
        listen="127.0.0.1:0",
        internal_token="t" * 40,
        new_incident=lambda: "inc",
        authenticate=_authenticate,
    )
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    yield Plane(store, clock, controlplane_pb2_grpc.ControlPlaneServiceStub(channel), revoked)
    await channel.close()
    await server.stop(0)


# --- tenants ---------------------------------------------------------------------------------------


async def test_tenant_lives_from_create_to_delete(plane: Plane) -> None:
    made = await plane.tenant("acme", requests_per_minute=60, display_name="Acme")
    assert (made.requests_per_minute, made.weight, made.display_name) == (60, 1.0, "Acme")
    with pytest.raises(AlreadyExists):
        await plane.tenant("acme")
    made.requests_per_minute = 120
    updated = (await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=made))).tenant  # type: ignore[attr-defined]
    assert updated.requests_per_minute == 120
    assert updated.metadata.create_time == made.metadata.create_time
    assert updated.metadata.etag != made.metadata.etag
    with pytest.raises(EtagMismatch):
        await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=made))
    with pytest.raises(EtagMismatch):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme", etag=made.metadata.etag))
    made.metadata.etag = ""
    await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=made))
    await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    for method, request in (
        ("GetTenant", pb.GetTenantRequest(name="acme")),
        ("DeleteTenant", pb.DeleteTenantRequest(name="acme")),
        ("UpdateTenant", pb.UpdateTenantRequest(tenant=made)),
    ):
        with pytest.raises(NotFound):
            await plane.call(method, request)


@pytest.mark.parametrize("name", ["a.b", "a" * 65])
async def test_a_tenant_has_a_name_that_its_keys_can_name(plane: Plane, name: str) -> None:
    with pytest.raises(InvalidInput, match="at most 64"):
        await plane.tenant(name)
    longest = "a" * 64
    await plane.tenant(longest)
    assert (await plane.key("k", longest)).key.tenant == longest


@pytest.mark.parametrize("limit", [{"tokens_per_minute": 1000}, {"weight": 2.0}])
async def test_limit_that_nothing_holds_is_refused(plane: Plane, limit: dict[str, float]) -> None:
    with pytest.raises(UnsupportedFeature):
        await plane.tenant("acme", **limit)  # type: ignore[arg-type]
    tenant = await plane.tenant("acme", weight=1.0)
    with pytest.raises(UnsupportedFeature):
        tenant.MergeFrom(pb.Tenant(**limit))  # type: ignore[arg-type]
        await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))


async def test_same_request_id_creates_once_and_conflicts_with_other_content(plane: Plane) -> None:
    first = await plane.tenant("acme", "r1", requests_per_minute=60)
    assert await plane.tenant("acme", "r1", requests_per_minute=60) == first
    with pytest.raises(Conflict):
        await plane.tenant("acme", "r1", requests_per_minute=61)
    with pytest.raises(AlreadyExists):
        await plane.tenant("acme", "r2", requests_per_minute=60)
    plane.clock.ahead_s = 601
    with pytest.raises(AlreadyExists):
        await plane.tenant("acme", "r1", requests_per_minute=60)


async def test_racing_creates_with_one_request_id_agree(plane: Plane) -> None:
    made = await asyncio.gather(*(plane.tenant("acme", "r1") for _ in range(8)))
    assert len({tenant.metadata.etag for tenant in made}) == 1


async def test_one_request_id_for_two_names_makes_one(plane: Plane) -> None:
    made = await asyncio.gather(plane.tenant("a", "r1"), plane.tenant("b", "r1"), return_exceptions=True)
    assert sorted(type(one).__name__ for one in made) == ["Conflict", "Tenant"]
    assert len((await plane.store.list(TENANTS)).entries) == 1


async def test_repeated_update_is_the_first_answer_though_its_etag_is_spent(plane: Plane) -> None:
    tenant = await plane.tenant("acme", "r1")
    tenant.requests_per_minute = 5
    request = pb.UpdateTenantRequest(tenant=tenant, request_id="r2")
    first = await plane.call("UpdateTenant", request)
    assert await plane.call("UpdateTenant", request) == first
    request.tenant.requests_per_minute = 6
    with pytest.raises(Conflict):
        await plane.call("UpdateTenant", request)
    request.request_id = "r1"
    with pytest.raises(Conflict):
        await plane.call("UpdateTenant", request)


async def test_lists_come_in_pages(plane: Plane) -> None:
    for number in range(5):
        await plane.tenant(f"t{number}")
    names, token, pages = [], "", 0
    while True:
        answer = await plane.call("ListTenants", pb.ListTenantsRequest(page_size=2, page_token=token))
        assert isinstance(answer, pb.ListTenantsResponse)
        names += [tenant.metadata.name for tenant in answer.tenants]
        pages, token = pages + 1, answer.next_page_token
        if pages == 1:
            await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="t0"))
        if not token:
            break
    assert (names, pages) == (["t0", "t1", "t2", "t3", "t4"], 3)
    with pytest.raises(InvalidInput):
        await plane.call("ListTenants", pb.ListTenantsRequest(page_token="!!"))


# --- keys ------------------------------------------------------------------------------------------


async def test_key_is_shown_once_and_stored_as_a_hash(plane: Plane) -> None:
    await plane.tenant("acme")
    made = await plane.key("team-a", "acme", models=["tiny"])
    name, secret = secrets.parse_key(made.secret)
    assert name == "team-a"
    entry = await plane.store.get(KEYS + "team-a")
    assert entry is not None
    assert secret.encode() not in entry.value
    assert secrets.verify(secret, load(entry.value, ApiKey).secret_hash)
    got = await plane.call("GetKey", pb.GetKeyRequest(name="team-a"))
    for answer in (got, await plane.call("ListKeys", pb.ListKeysRequest())):
        body = answer.SerializeToString()  # type: ignore[attr-defined]
        assert secret.encode() not in body
        assert load(entry.value, ApiKey).secret_hash.encode() not in body


async def test_rotation_keeps_the_old_secret_for_its_grace(plane: Plane) -> None:
    await plane.tenant("acme")
    old = secrets.parse_key((await plane.key("k", "acme")).secret)[1]
    request = pb.RotateKeyRequest(name="k")
    request.grace.FromSeconds(60)
    new = secrets.parse_key((await plane.call("RotateKey", request)).secret)[1]  # type: ignore[attr-defined]
    stored = await plane.stored_key("k")
    assert old != new
    assert secrets.verify(new, stored.secret_hash)
    assert secrets.verify(old, stored.previous_secret_hash)
    assert stored.previous_expire_unix_s == pytest.approx(plane.clock.unix_s() + 60, abs=5)
    await plane.call("RotateKey", pb.RotateKeyRequest(name="k"))
    stored = await plane.stored_key("k")
    assert (stored.previous_secret_hash, stored.previous_expire_unix_s) == ("", 0.0)
    assert not secrets.verify(new, stored.secret_hash)


async def test_a_key_is_narrowed_and_keeps_its_secret_role_and_tenant(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("other")
    before = (await plane.key("k.1", "acme")).key
    hashed = (await plane.stored_key("k.1")).secret_hash
    wanted = pb.Key(
        metadata=pb.Metadata(name="k.1", labels={"team": "a"}),
        role=pb.KEY_ROLE_TENANT,
        tenant="acme",
        models=["m"],
    )
    await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))
    stored = await plane.stored_key("k.1")
    assert (stored.models, stored.secret_hash) == (("m",), hashed)
    assert stored.meta.labels == {"team": "a"}
    with pytest.raises(EtagMismatch):
        wanted.metadata.etag = before.metadata.etag
        await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))
    wanted.metadata.etag, wanted.tenant = "", "other"
    with pytest.raises(InvalidInput):
        await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))


async def test_a_repeated_key_request_has_the_same_secret_and_the_store_does_not(plane: Plane) -> None:
    await plane.tenant("acme")
    first = await plane.key("k", "acme", "r1")
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k"))
    assert await plane.key("k", "acme", "r1") == first, "the first answer, though the key is gone"
    with pytest.raises(Conflict):
        await plane.key("k2", "acme", "r1")
    secret = secrets.parse_key(first.secret)[1]
    stored = b"".join(entry.value for entry in (await plane.store.list("/")).entries)
    assert secret.encode() not in stored
    raw = base64.b32decode(secret.upper() + "====")
    assert raw not in stored
    assert raw.hex().encode() not in stored


async def test_a_repeated_rotation_rotates_once_and_costs_nobody_the_grace(plane: Plane) -> None:
    await plane.tenant("acme")
    old = secrets.parse_key((await plane.key("k", "acme")).secret)[1]
    request = pb.RotateKeyRequest(name="k", request_id="r1")
    request.grace.FromSeconds(60)
    answers = await asyncio.gather(*(plane.call("RotateKey", request) for _ in range(6)))
    assert all(answer == answers[0] for answer in answers)
    new = secrets.parse_key(answers[0].secret)[1]  # type: ignore[attr-defined]
    stored = await plane.stored_key("k")
    assert secrets.verify(new, stored.secret_hash)
    assert secrets.verify(old, stored.previous_secret_hash)
    request.grace.FromSeconds(61)
    with pytest.raises(Conflict):
        await plane.call("RotateKey", request)
    with pytest.raises(EtagMismatch):
        await plane.call("RotateKey", pb.RotateKeyRequest(name="k", etag="1"))


async def test_every_repeated_deletion_and_node_request_is_answered_once(plane: Plane) -> None:
    await plane.tenant("acme")
    delete = pb.DeleteTenantRequest(name="acme", request_id="r1")
    await plane.call("DeleteTenant", delete)
    await plane.tenant("acme", requests_per_minute=7)
    await plane.call("DeleteTenant", delete)
    assert (await plane.call("GetTenant", pb.GetTenantRequest(name="acme"))).tenant.requests_per_minute == 7  # type: ignore[attr-defined]
    await plane.put(WORKERS + "w0", Worker("w0", "x"))
    cordon = pb.CordonNodeRequest(name="w0", request_id="r1")
    first = (await plane.call("CordonNode", cordon)).node  # type: ignore[attr-defined]
    await plane.call("UncordonNode", pb.UncordonNodeRequest(name="w0"))
    again = (await plane.call("CordonNode", cordon)).node  # type: ignore[attr-defined]
    assert (again.cordoned, again.metadata.etag) == (True, first.metadata.etag), "the first answer"
    now = (await plane.call("GetNode", pb.GetNodeRequest(name="w0"))).node  # type: ignore[attr-defined]
    assert not now.cordoned, "and nothing was done again"
    with pytest.raises(EtagMismatch):
        await plane.call("DrainNode", pb.DrainNodeRequest(name="w0", etag=first.metadata.etag))
    with pytest.raises(Conflict):
        await plane.call("DrainNode", pb.DrainNodeRequest(name="w0", request_id="r1"))
    await plane.store.commit([Delete(WORKERS + "w0")])
    await plane.call("DeleteNode", pb.DeleteNodeRequest(name="w0"))
    again = (await plane.call("CordonNode", cordon)).node  # type: ignore[attr-defined]
    assert (again.cordoned, again.metadata.etag) == (True, first.metadata.etag), "though it is forgotten"


async def test_a_deployment_request_is_answered_as_it_was_though_its_tag_moved(plane: Plane) -> None:
    made = await plane.deployment("d", "prod", "r1")
    await plane.put(tag_key("tiny", "prod"), Tag("tiny", "prod", OTHER))
    again = await plane.deployment("d", "prod", "r1")
    assert (again.version_digest, again.metadata.etag) == (DIGEST, made.metadata.etag)
    assert again.status.tag_digest == OTHER, "the tag is somewhere else now"
    update = pb.UpdateDeploymentRequest(deployment=again, request_id="r2")
    moved = (await plane.call("UpdateDeployment", update)).deployment  # type: ignore[attr-defined]
    assert moved.version_digest == OTHER


async def test_a_version_that_is_deleted_meanwhile_is_not_deployed(plane: Plane) -> None:
    store: MemoryStore = (interleaving := Interleaving(plane.clock))
    await store.commit([Put(version_key("tiny", DIGEST), dump(VersionRecord("tiny", DIGEST, 1, 0.0)))])
    service = ControlPlaneService(store, plane.clock, SEALER)

    async def forget() -> None:
        await store.commit([Delete(version_key("tiny", DIGEST))])

    interleaving.between = forget  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.deployments.create(Deployment(Meta("d"), "tiny", DIGEST, "", 1))
    assert (await store.list(DEPLOYMENTS)).entries == ()


async def test_keys_need_a_role_and_an_owner(plane: Plane) -> None:
    with pytest.raises(FailedPrecondition):
        await plane.key("k", "nobody")
    await plane.tenant("acme")
    for key in (
        pb.Key(metadata=pb.Metadata(name="k"), tenant="acme"),
        pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_TENANT),
        pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_ADMIN, tenant="acme"),
    ):
        with pytest.raises(InvalidInput):
            await plane.call("CreateKey", pb.CreateKeyRequest(key=key))
    past = pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_ADMIN)
    past.expire_time.FromSeconds(1)
    with pytest.raises(InvalidInput):
        await plane.call("CreateKey", pb.CreateKeyRequest(key=past))
    admin = await plane.key("ops")
    assert admin.key.role == pb.KEY_ROLE_ADMIN


async def test_tenant_with_keys_is_not_deleted(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.key("k", "acme")
    with pytest.raises(FailedPrecondition):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k"))
    await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    assert (await plane.store.list(ROOT + "guards/")).entries == (), "nothing of it is left"


class Interleaving(MemoryStore):
    """Lets a test act between the look at the keys and the deletion."""

    between = None

    async def commit(self, operations, conditions=()):  # type: ignore[no-untyped-def]
        if self.between is not None:
            act, self.between = self.between, None
            await act()
        return await super().commit(operations, conditions)


async def test_key_made_while_its_tenant_is_deleted_leaves_no_orphan(plane: Plane) -> None:
    store = Interleaving(plane.clock)
    service = ControlPlaneService(store, plane.clock, SEALER)
    await service.accounts.create_tenant(Tenant(Meta("acme")))

    async def make() -> None:
        await service.accounts.create_key(ApiKey(Meta("k"), KeyRole.TENANT, "", tenant="acme"))

    store.between = make  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.accounts.delete_tenant("acme")
    assert await store.get(TENANTS + "acme") is not None
    assert await store.get(KEYS + "k") is not None


async def test_marker_of_a_request_is_part_of_its_write(plane: Plane) -> None:
    store = Interleaving(plane.clock)
    service = ControlPlaneService(store, plane.clock, SEALER)

    async def other() -> None:
        await service.accounts.create_tenant(Tenant(Meta("b")), request_id="r1")

    store.between = other  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.accounts.create_tenant(Tenant(Meta("a")), request_id="r1")
    assert [entry.key for entry in (await store.list(TENANTS)).entries] == [TENANTS + "b"]


# --- deployments -----------------------------------------------------------------------------------


async def test_deployment_pins_a_tag_to_its_digest(plane: Plane) -> None:
    made = await plane.deployment("chat", executor="null")
    assert (made.version, made.version_digest, made.executor) == ("prod", DIGEST, "null")
    await plane.put(tag_key("tiny", "prod"), Tag("tiny", "prod", OTHER))
    got = await plane.call("GetDeployment", pb.GetDeploymentRequest(name="chat"))
    assert got.deployment.version_digest == DIGEST  # type: ignore[attr-defined]
    got.deployment.replicas = 3  # type: ignore[attr-defined]
    updated = await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=got.deployment))  # type: ignore[attr-defined]
    assert updated.deployment.version_digest == OTHER  # type: ignore[attr-defined]
    assert (await plane.deployment("pinned", OTHER)).version_digest == OTHER
    for version in ("absent", sha256_of(b"absent")):
        with pytest.raises(NotFound):
            await plane.deployment("d", version)
    with pytest.raises(InvalidInput):
        await plane.deployment("d", "../prod")


async def test_what_a_client_claims_of_server_fields_is_ignored(plane: Plane) -> None:
    made = await plane.deployment(
        "chat", version_digest=OTHER, status=pb.DeploymentStatus(ready_replicas=9, message="all is well")
    )
    assert made.version_digest == DIGEST
    assert made.status.ready_replicas == 0
    assert made.status.message == "no worker for 1 replicas: there is none"


async def test_status_joins_workers_and_says_what_is_missing(plane: Plane) -> None:
    await plane.deployment("chat", replicas=3)
    states = {"w0": VersionState.READY, "w1": VersionState.FAILED}
    for worker_id, state in states.items():
        loaded = LoadedVersion("chat", "tiny", DIGEST, state, "no room" if worker_id == "w1" else "")
        await plane.put(WORKERS + worker_id, Worker(worker_id, "127.0.0.1:1", versions=(loaded,)))
        held = Assignment(worker_id, (AssignedVersion("chat", "tiny", DIGEST),))
        await plane.put(ASSIGNMENTS + worker_id, held)
    held = Assignment("dead", (AssignedVersion("chat", "tiny", DIGEST),))
    await plane.put(ASSIGNMENTS + "dead", held)
    got = await plane.call("GetDeployment", pb.GetDeploymentRequest(name="chat"))
    status = got.deployment.status  # type: ignore[attr-defined]
    assert (status.assigned_replicas, status.ready_replicas) == (2, 1)
    assert status.message == "no worker for 1 replicas: 2 has_a_replica; w1: no room"
    assert [replica.state for replica in status.replicas] == [
        worker_pb2.VERSION_STATE_READY,
        worker_pb2.VERSION_STATE_FAILED,
    ]
    listed = await plane.call("ListDeployments", pb.ListDeploymentsRequest())
    assert listed.deployments[0].status == status  # type: ignore[attr-defined]


async def test_a_page_of_deployments_plans_the_fleet_once(plane: Plane) -> None:
    for number in range(60):
        await plane.put(WORKERS + f"w{number}", Worker(f"w{number}", "127.0.0.1:1"))
    for number in range(240):
        deployment = Deployment(Meta(f"d{number}"), "tiny", "prod", DIGEST, replicas=4)
        await plane.put(DEPLOYMENTS + f"d{number}", deployment)
    began_s = plane.clock.monotonic_s()
    listed = await plane.call("ListDeployments", pb.ListDeploymentsRequest(page_size=1000))
    elapsed_s = plane.clock.monotonic_s() - began_s
    assert len(listed.deployments) == 240  # type: ignore[attr-defined]
    assert elapsed_s < 3, "a plan per deployment keeps the control plane from renewing its lease"


# --- nodes -----------------------------------------------------------------------------------------


async def test_nodes_are_cordoned_drained_and_given_back(plane: Plane) -> None:
    with pytest.raises(NotFound):
        await plane.call("CordonNode", pb.CordonNodeRequest(name="w0"))
    await plane.put(WORKERS + "w0", Worker("w0", "127.0.0.1:9", zone="a", labels={"gpu": "x"}))
    steps = [
        ("CordonNode", pb.CordonNodeRequest(name="w0"), (True, False)),
        ("DrainNode", pb.DrainNodeRequest(name="w0"), (True, True)),
        ("CordonNode", pb.CordonNodeRequest(name="w0"), (True, True)),
        ("UncordonNode", pb.UncordonNodeRequest(name="w0"), (False, False)),
    ]
    for method, request, expected in steps:
        node = (await plane.call(method, request)).node  # type: ignore[attr-defined]
        assert (node.cordoned, node.draining) == expected
        assert (node.address, node.zone, dict(node.metadata.labels)) == ("127.0.0.1:9", "a", {"gpu": "x"})
    listed = await plane.call("ListNodes", pb.ListNodesRequest())
    assert [node.metadata.name for node in listed.nodes] == ["w0"]  # type: ignore[attr-defined]
    got = await plane.call("GetNode", pb.GetNodeRequest(name="w0"))
    assert got.node.incarnation > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "request_"),
    [("WatchResources", pb.WatchResourcesRequest()), ("WatchEvents", pb.WatchEventsRequest())],
)
async def test_a_watch_ends_with_the_key_that_opened_it(plane: Plane, method: str, request_: object) -> None:
    stream: Any = getattr(plane.stub, method)(request_, metadata=ADMIN, timeout=10)
    await stream.read()
    plane.revoked.add("admin")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert isinstance(from_rpc_error(caught.value), Unauthenticated)


async def test_a_record_that_cannot_be_read_takes_no_other_with_it(plane: Plane) -> None:
    await plane.deployment("good")
    await plane.tenant("acme")
    await plane.put(WORKERS + "w0", Worker("w0", "x"))
    bad = [DEPLOYMENTS + "bad", TENANTS + "bad", WORKERS + "w1", ASSIGNMENTS + "w2", tag_key("tiny", "prod")]
    await plane.store.commit([Put(key, b"{") for key in bad])
    deployments = (await plane.call("ListDeployments", pb.ListDeploymentsRequest())).deployments  # type: ignore[attr-defined]
    assert [found.metadata.name for found in deployments] == ["good"]
    tenants = (await plane.call("ListTenants", pb.ListTenantsRequest())).tenants  # type: ignore[attr-defined]
    assert [found.metadata.name for found in tenants] == ["acme"]
    nodes = (await plane.call("ListNodes", pb.ListNodesRequest())).nodes  # type: ignore[attr-defined]
    states = [(found.metadata.name, found.state) for found in nodes]
    assert states == [
        ("w0", pb.NODE_STATE_LIVE),
        ("w1", pb.NODE_STATE_LOST),
        ("w2", pb.NODE_STATE_LOST),
    ]
    stream = plane.stub.WatchResources(pb.WatchResourcesRequest(), metadata=ADMIN, timeout=10)
    begun: Any = await stream.read()
    told = {change.WhichOneof("resource") for change in begun.changes}
    assert (begun.snapshot_end, told) == (True, {"deployment", "node", "tenant", "model_version"})
    stream.cancel()


# --- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ListRollouts", pb.ListRolloutsRequest()),
        ("GetBudget", pb.GetBudgetRequest(name="b")),
        ("ListUsage", pb.ListUsageRequest()),
        ("ListAuditEvents", pb.ListAuditEventsRequest()),
        ("AbortRollout", pb.AbortRolloutRequest(name="r")),
    ],
)
async def test_what_is_not_there_yet_says_so(plane: Plane, method: str, request_: object) -> None:
    with pytest.raises(Unimplemented, match="not served yet"):
        await plane.call(method, request_)


async def test_every_method_is_served_or_says_that_it_is_not(plane: Plane) -> None:
    """No method falls through to the generated base, which would be an internal error."""
    base = controlplane_pb2_grpc.ControlPlaneServiceServicer
    for method in pb.DESCRIPTOR.services_by_name["ControlPlaneService"].methods:
        assert getattr(ControlPlaneServicer, method.name) is not getattr(base, method.name), method.name


async def test_watch_tells_what_is_there_then_changes_and_resumes(plane: Plane) -> None:
    await plane.tenant("acme")
    stream = plane.stub.WatchResources(
        pb.WatchResourcesRequest(kinds=[pb.RESOURCE_KIND_TENANT, pb.RESOURCE_KIND_KEY]),
        metadata=ADMIN,
        timeout=10,
    )
    first = await stream.read()
    assert isinstance(first, pb.WatchResourcesResponse)
    assert first.snapshot_end
    assert [change.tenant.metadata.name for change in first.changes] == ["acme"]
    await plane.put(WORKERS + "w0", Worker("w0", "x"))  # not asked for
    secret = (await plane.key("k", "acme")).secret
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k"))
    told: list[pb.WatchResourcesResponse] = []
    while sum(len(batch.changes) for batch in told) < 2:
        batch = await stream.read()
        assert isinstance(batch, pb.WatchResourcesResponse)
        told.append(batch)
    changes = [change for batch in told for change in batch.changes]
    assert [(c.WhichOneof("resource"), c.key.metadata.name, c.deleted) for c in changes] == [
        ("key", "k", False),
        ("key", "k", True),
    ]
    assert secret.split("_")[2].encode() not in b"".join(batch.SerializeToString() for batch in told)
    stream.cancel()
    again = plane.stub.WatchResources(
        pb.WatchResourcesRequest(after_revision=first.revision), metadata=ADMIN, timeout=10
    )
    batch = await again.read()
    assert isinstance(batch, pb.WatchResourcesResponse)
    assert not batch.snapshot_end
    again.cancel()
    plane.store.compact(10**6)
    await plane.tenant("late")
    old = plane.stub.WatchResources(pb.WatchResourcesRequest(after_revision=1), metadata=ADMIN, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await old.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# --- bootstrap -------------------------------------------------------------------------------------


async def test_bootstrap_makes_and_replaces_the_admin_key(tmp_path: Path) -> None:
    clock = SystemClock()
    store, file = MemoryStore(clock), tmp_path / "admin_key"
    text, _ = secrets.new_key("admin", b"1" * 32)
    file.write_text(text + "\n")
    file.chmod(0o600)
    assert await bootstrap(store, clock, file) == "admin"
    entry = await store.get(KEYS + "admin")
    assert entry is not None
    assert load(entry.value, ApiKey).role is KeyRole.ADMIN
    assert await bootstrap(store, clock, file) == "admin"
    assert await store.get(KEYS + "admin") == entry, "an unchanged file writes nothing"
    other, _ = secrets.new_key("admin", b"2" * 32)
    file.write_text(other)
    await bootstrap(store, clock, file)
    changed = await store.get(KEYS + "admin")
    assert changed is not None
    assert secrets.verify(secrets.parse_key(other)[1], load(changed.value, ApiKey).secret_hash)
    assert secrets.parse_key(other)[1].encode() not in changed.value


@pytest.mark.parametrize(
    ("content", "mode"), [("fw_admin_" + "a" * 52, 0o644), ("hello", 0o600), ("", 0o600)]
)
async def test_bootstrap_refuses_a_file_that_others_read_or_that_is_no_key(
    tmp_path: Path, content: str, mode: int
) -> None:
    clock, file = SystemClock(), tmp_path / "admin_key"
    store = MemoryStore(clock)
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(FailedPrecondition) as caught:
        await bootstrap(store, clock, file)
    assert "aaaa" not in str(caught.value)
    assert (await store.list(KEYS)).entries == ()
    with pytest.raises(FairwayError):
        await bootstrap(store, clock, tmp_path / "absent")
