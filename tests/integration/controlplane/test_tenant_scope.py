"""What people of a tenant see and change: their own, and nothing that shows what else there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import options_pb2
from services.core.errors import (
    FailedPrecondition,
    FairwayError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from tests.integration.controlplane.plane import Plane

SERVICE = pb.DESCRIPTOR.services_by_name["ControlPlaneService"]
ROLES = {"tenant-admin": pb.KEY_ROLE_TENANT_ADMIN, "tenant": pb.KEY_ROLE_TENANT}


async def ask(plane: Plane, method: str, request: Any, *, key: str = "admin") -> Any:
    return await plane.call(method, request, key=key)


async def member(plane: Plane, name: str, tenant: str, role: str = "tenant-admin", **fields: Any) -> str:
    """Return the text of a new key that the control plane accepts."""
    key = pb.Key(metadata=pb.Metadata(name=name), role=ROLES[role], tenant=tenant, **fields)
    text = (await ask(plane, "CreateKey", pb.CreateKeyRequest(key=key))).secret

    async def accepted() -> bool:
        try:
            await ask(plane, "GetCaller", pb.GetCallerRequest(), key=text)
        except Unauthenticated:
            return False
        return True

    while not await accepted():
        await asyncio.sleep(0.005)
    return str(text)


@pytest.fixture
async def two(plane: Plane) -> tuple[str, str]:
    """The keys of the admins of acme and of beta, each of which has a key and a budget besides."""
    texts = []
    for tenant in ("acme", "beta"):
        await plane.tenant(tenant)
        texts.append(await member(plane, f"{tenant}.lead", tenant))
        await plane.key(f"{tenant}.ci", tenant)
        await plane.budget(f"{tenant}-all", tenant)
    await plane.key("ops")
    return texts[0], texts[1]


def reach(method: str, name: str, tenant: str) -> Any:
    """Return a request that names a resource of the method's kind."""
    request = getattr(pb, f"{method}Request")()
    fields = request.DESCRIPTOR.fields_by_name
    if "name" in fields:
        request.name = name
    if "request_name" in fields:
        request.request_name = name
    for each in ("key", "budget"):
        if each in fields and fields[each].message_type is not None:
            getattr(request, each).CopyFrom(
                pb.Key(metadata=pb.Metadata(name=name), role=pb.KEY_ROLE_TENANT, tenant=tenant)
            )
    return request


async def outcome(plane: Plane, method: str, request: Any, key: str) -> str:
    """Return the error of a call without the names in it, or the answer."""
    try:
        return str(await ask(plane, method, request, key=key))
    except FairwayError as error:
        return f"{error.reason}: {error.message}"


async def test_what_others_have_is_not_there(plane: Plane, two: tuple[str, str]) -> None:
    """Every method that tenants may call, with another's name and with one that nobody has."""
    open_to = options_pb2.ACCESS_TENANT_ADMIN
    methods = [m.name for m in SERVICE.methods if open_to in m.GetOptions().Extensions[options_pb2.access]]
    named = [method for method in methods if method not in ("GetCaller", "CreateKey")]
    assert {"GetTenant", "GetKey", "RotateKey", "UpdateKey", "DeleteKey", "GetBudget"} <= set(named)
    for method in named:
        others = {"Tenant": "beta", "Budget": "beta-all"}.get(method.removeprefix("Get"), "beta.ci")
        for theirs in (others, "ops"):
            there = await outcome(plane, method, reach(method, theirs, "beta"), two[0])
            absent = await outcome(plane, method, reach(method, "nothing", "nothing"), two[0])
            assert there.replace(theirs, "nothing").replace("beta", "nothing") == absent, method
            assert method.startswith(("List", "Diagnose")) or there.startswith("NOT_FOUND"), method
    assert (await plane.stored_key("beta.ci")).previous_secret_hash == ""


async def test_lists_have_the_own_alone(plane: Plane, two: tuple[str, str]) -> None:
    tenants = await ask(plane, "ListTenants", pb.ListTenantsRequest(), key=two[0])
    keys = await ask(plane, "ListKeys", pb.ListKeysRequest(), key=two[0])
    budgets = await ask(plane, "ListBudgets", pb.ListBudgetsRequest(), key=two[0])
    assert [one.metadata.name for one in tenants.tenants] == ["acme"]
    assert [one.metadata.name for one in keys.keys] == ["acme.ci", "acme.lead"]
    assert [one.metadata.name for one in budgets.budgets] == ["acme-all"]
    tenant = await member(plane, "acme.app", "acme", "tenant")
    assert len((await ask(plane, "ListBudgets", pb.ListBudgetsRequest(), key=tenant)).budgets) == 1
    for method in ("ListKeys", "ListTenants", "ListNodes"):
        with pytest.raises(PermissionDenied):
            await ask(plane, method, getattr(pb, f"{method}Request")(), key=tenant)


async def test_use_of_others_is_not_listed(plane: Plane, two: tuple[str, str]) -> None:
    for wanted in ("", "acme"):
        found = await ask(plane, "ListUsage", pb.ListUsageRequest(tenant=wanted), key=two[0])
        assert [one.tenant for one in found.records] == ["acme"]
    for wanted in ("beta", "nothing"):
        assert not (await ask(plane, "ListUsage", pb.ListUsageRequest(tenant=wanted), key=two[0])).records
    assert plane.usage.asked == ["acme", "acme"]


async def test_a_tenants_admin_manages_the_keys_of_its_tenant(plane: Plane, two: tuple[str, str]) -> None:
    for role in ROLES.values():
        name = f"acme.new-{role}"
        key = pb.Key(metadata=pb.Metadata(name=name), role=role, tenant="acme")
        await ask(plane, "CreateKey", pb.CreateKeyRequest(key=key), key=two[0])
        await ask(plane, "RotateKey", pb.RotateKeyRequest(name=name), key=two[0])
        key.limits.requests_per_minute = 5
        await ask(plane, "UpdateKey", pb.UpdateKeyRequest(key=key), key=two[0])
        assert (await plane.stored_key(name)).limits.requests_per_minute == 5
        await ask(plane, "DeleteKey", pb.DeleteKeyRequest(name=name), key=two[0])


@pytest.mark.parametrize(
    ("name", "role", "tenant", "error"),
    [
        ("acme.x", pb.KEY_ROLE_TENANT, "beta", FailedPrecondition),  # as for a tenant that is not there
        ("acme.x", pb.KEY_ROLE_TENANT, "nothing", FailedPrecondition),
        ("acme.x", pb.KEY_ROLE_ADMIN, "", PermissionDenied),
        ("acme.x", pb.KEY_ROLE_VIEWER, "", PermissionDenied),
        ("acme.x", pb.KEY_ROLE_AUDITOR, "", PermissionDenied),
        ("acme.x", pb.KEY_ROLE_OPERATOR, "", PermissionDenied),
        ("beta.x", pb.KEY_ROLE_TENANT, "acme", InvalidInput),  # names of keys are shared
        ("beta.ci", pb.KEY_ROLE_TENANT, "acme", InvalidInput),
        ("ops", pb.KEY_ROLE_TENANT, "acme", InvalidInput),
    ],
)
async def test_a_tenants_admin_creates_no_key_beyond_its_tenant(
    plane: Plane, two: tuple[str, str], name: str, role: int, tenant: str, error: type[FairwayError]
) -> None:
    key = pb.Key(metadata=pb.Metadata(name=name), role=role, tenant=tenant)  # type: ignore[arg-type]
    with pytest.raises(error):
        await ask(plane, "CreateKey", pb.CreateKeyRequest(key=key), key=two[0])


async def test_no_key_gets_more_than_the_key_that_hands_it_out(plane: Plane, two: tuple[str, str]) -> None:
    await plane.deployment("a")
    await plane.deployment("b")
    end = Timestamp(seconds=int(plane.clock.unix_s()) + 1000)
    limits = pb.Limits(requests_per_minute=10, max_timeout=Duration(seconds=5))
    bounded: dict[str, Any] = {"models": ["a"], "expire_time": end, "limits": limits}
    lead = await member(plane, "acme.bounded", "acme", **bounded)

    def wanted(name: str, **changes: Any) -> pb.Key:
        fields = {**bounded, **changes}
        return pb.Key(metadata=pb.Metadata(name=name), role=pb.KEY_ROLE_TENANT_ADMIN, tenant="acme", **fields)

    within = pb.CreateKeyRequest(key=wanted("acme.within"))
    await ask(plane, "CreateKey", within, key=lead)
    beyond: list[dict[str, Any]] = [
        {"models": []},
        {"models": ["a", "b"]},
        {"expire_time": None},
        {"expire_time": Timestamp(seconds=end.seconds + 1)},
        {"limits": pb.Limits(requests_per_minute=10)},
        {"limits": pb.Limits(requests_per_minute=11, max_timeout=Duration(seconds=5))},
        {"limits": None},
    ]
    for changes in beyond:
        with pytest.raises(PermissionDenied, match="more than your own"):
            create = pb.CreateKeyRequest(key=wanted("acme.beyond", **changes))
            await ask(plane, "CreateKey", create, key=lead)
        for name in ("acme.within", "acme.bounded"):  # its own as well
            with pytest.raises(PermissionDenied, match="more than your own"):
                await ask(plane, "UpdateKey", pb.UpdateKeyRequest(key=wanted(name, **changes)), key=lead)
    with pytest.raises(PermissionDenied, match="more than your own"):  # its new secret would be the caller's
        await ask(plane, "RotateKey", pb.RotateKeyRequest(name="acme.lead"), key=lead)
    await ask(plane, "RotateKey", pb.RotateKeyRequest(name="acme.within"), key=lead)


async def test_request_ids_are_a_tenants_own(plane: Plane, two: tuple[str, str]) -> None:
    """An answer with a secret is repeated to its tenant and to no other that uses the same id."""
    made = []
    for tenant, text in zip(("acme", "beta"), two, strict=True):
        key = pb.Key(metadata=pb.Metadata(name=f"{tenant}.one"), role=pb.KEY_ROLE_TENANT, tenant=tenant)
        request = pb.CreateKeyRequest(key=key, request_id="1")
        first = await ask(plane, "CreateKey", request, key=text)
        assert (await ask(plane, "CreateKey", request, key=text)).secret == first.secret
        made.append(first.secret)
    rotation = pb.RotateKeyRequest(name="acme.one", request_id="2")
    await ask(plane, "RotateKey", rotation, key=two[0])
    with pytest.raises(NotFound):
        await ask(plane, "RotateKey", rotation, key=two[1])


async def test_events_and_watches_show_a_viewer_no_tenants_keys_or_budgets(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.budget("acme-all", "acme")
    key = pb.Key(metadata=pb.Metadata(name="eye"), role=pb.KEY_ROLE_VIEWER)
    text = (await ask(plane, "CreateKey", pb.CreateKeyRequest(key=key))).secret
    metadata = (("authorization", f"Bearer {text}"),)
    await plane.deployment("chat")
    seen: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for caller in ((("authorization", "Bearer admin"),), metadata):
        call = plane.stub.WatchResources(pb.WatchResourcesRequest(), metadata=caller)
        kinds: set[str] = set()
        while True:
            answer: Any = await call.read()
            kinds |= {str(change.WhichOneof("resource")) for change in answer.changes}
            if answer.snapshot_end:
                break
        call.cancel()
        seen[caller] = kinds
    hidden = {"tenant", "key", "budget"}
    admin, viewer = seen.values()
    assert hidden <= admin
    assert viewer == admin - hidden
    for kind in (pb.RESOURCE_KIND_KEY, pb.RESOURCE_KIND_TENANT, pb.RESOURCE_KIND_BUDGET):
        with pytest.raises(PermissionDenied):
            await ask(plane, "ListEvents", pb.ListEventsRequest(kinds=[kind]), key=text)
    await ask(plane, "ListEvents", pb.ListEventsRequest(), key=text)


async def test_a_caller_may_see_who_it_is(plane: Plane, two: tuple[str, str]) -> None:
    found = await ask(plane, "GetCaller", pb.GetCallerRequest(), key=two[0])
    assert found == pb.GetCallerResponse(key="acme.lead", role=pb.KEY_ROLE_TENANT_ADMIN, tenant="acme")
