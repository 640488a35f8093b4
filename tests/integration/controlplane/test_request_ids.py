"""Requests with an identifier: done once, answered alike each time, refused with other content."""

from __future__ import annotations

import asyncio
import base64

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.service import ControlPlaneService
from services.core.errors import AlreadyExists, Conflict, EtagMismatch
from services.core.records import TENANTS, WORKERS, Meta, Tag, Tenant, Worker, tag_key
from services.ports.store import Delete
from services.runtime import secrets
from tests.integration.controlplane.plane import DIGEST, OTHER, SEALER, Interleaving, Plane


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


async def test_marker_of_a_request_is_part_of_its_write(plane: Plane) -> None:
    store = Interleaving(plane.clock)
    service = ControlPlaneService(store, plane.clock, SEALER, plane.limiter)

    async def other() -> None:
        await service.tenants.create(Tenant(Meta("b")), request_id="r1")

    store.between = other  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.tenants.create(Tenant(Meta("a")), request_id="r1")
    assert [entry.key for entry in (await store.list(TENANTS)).entries] == [TENANTS + "b"]
