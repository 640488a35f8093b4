"""Tenants from create to delete, and what keeps one from being deleted."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.service import ControlPlaneService
from services.core.errors import (
    AlreadyExists,
    Conflict,
    EtagMismatch,
    FailedPrecondition,
    InvalidInput,
    ModelNotFound,
    NotFound,
)
from services.core.records import KEYS, ROOT, TENANTS, ApiKey, KeyRole, Meta, Tenant
from tests.integration.controlplane.plane import SEALER, Interleaving, Plane


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


async def test_a_commitment_above_the_token_rate_is_refused(plane: Plane) -> None:
    with pytest.raises(InvalidInput, match="1001 tokens per minute are committed, and only 1000"):
        await plane.tenant("acme", tokens_per_minute=1000, committed_tokens_per_minute=1001)
    tenant = await plane.tenant("acme", tokens_per_minute=1000, committed_tokens_per_minute=1000)
    tenant.tokens_per_minute = 999
    with pytest.raises(InvalidInput):
        await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))
    tenant.tokens_per_minute = 0
    await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))


async def test_what_holds_under_pressure_is_kept_and_checked(plane: Plane) -> None:
    policy = pb.DegradePolicy(max_output_tokens=256, smaller_models={"chat": "chat-small"})
    for deployment in ("chat", "chat-small"):
        await plane.deployment(deployment)
    made = await plane.tenant("acme", weight=2.5, committed_tokens_per_minute=60_000, degrade=policy)
    assert (made.weight, made.committed_tokens_per_minute, made.degrade) == (2.5, 60_000, policy)
    assert not (await plane.tenant("plain")).HasField("degrade")
    for models in ({"chat": "chat"}, {"chat": "No Name"}, {"": "chat"}):
        with pytest.raises(InvalidInput, match=r"smaller|names"):
            await plane.tenant("other", degrade=pb.DegradePolicy(smaller_models=models))


async def test_a_policy_names_deployments_that_exist(plane: Plane) -> None:
    await plane.deployment("chat")
    policy = pb.DegradePolicy(smaller_models={"chat": "nope"})
    with pytest.raises(ModelNotFound, match="no deployment 'nope'") as caught:
        await plane.tenant("acme", degrade=policy)
    assert caught.value.metadata["field"] == "tenant.degrade.smaller_models"
    tenant = await plane.tenant("acme")
    tenant.degrade.CopyFrom(policy)
    with pytest.raises(ModelNotFound, match="no deployment 'nope'"):
        await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))
    await plane.deployment("nope")
    await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))
    await plane.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="nope"))
    tenant.display_name, tenant.metadata.etag = "Acme", ""
    await plane.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))


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


async def test_tenant_with_keys_is_not_deleted(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.key("k", "acme")
    with pytest.raises(FailedPrecondition):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k"))
    await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    assert (await plane.store.list(ROOT + "guards/")).entries == (), "nothing of it is left"


async def test_key_made_while_its_tenant_is_deleted_leaves_no_orphan(plane: Plane) -> None:
    store = Interleaving(plane.clock)
    service = ControlPlaneService(store, plane.clock, SEALER, plane.limiter)
    await service.tenants.create(Tenant(Meta("acme")))

    async def make() -> None:
        await service.keys.create(ApiKey(Meta("k"), KeyRole.TENANT, "", tenant="acme"))

    store.between = make  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.tenants.delete("acme")
    assert await store.get(TENANTS + "acme") is not None
    assert await store.get(KEYS + "k") is not None
