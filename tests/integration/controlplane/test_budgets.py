"""Budgets from create to delete, what was spent of them, and the limits of tenants, keys and users."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import generate_latest

from fairway.v1 import controlplane_pb2 as pb
from services.adapters.memory.store import MemoryStore
from services.controlplane.event_log import EventRecorder, event_of
from services.controlplane.resources.budgets import Budgets
from services.controlplane.spend_alerts import SpendAlerts
from services.controlplane.telemetry import AlertTelemetry
from services.core.errors import (
    AlreadyExists,
    Conflict,
    EtagMismatch,
    FailedPrecondition,
    InvalidInput,
    NotFound,
    StoreUnavailable,
)
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, UsageLimits
from services.core.records import (
    BUDGET_ALERTS,
    EVENTS,
    KEYS,
    TENANTS,
    Budget,
    Leader,
    Meta,
    Tenant,
    dump,
    load,
)
from services.ports.limiter import Spent
from services.ports.store import Put
from services.runtime.telemetry.metrics import Metrics
from simulator.stores.limiter import MemoryLimiter
from tests.integration.controlplane.plane import Interleaving, Plane
from tests.support.election import StaticElection

PRICE = Price(output_micros=1_000_000)  # one micro-dollar per token
LEADER = "/fairway/v1/leaders/controlplane/0"


async def spend(limiter: MemoryLimiter, request_id: str, tokens: int, *kinds: LimitKind) -> None:
    """Settle a request of the tenant that cost as many micro-dollars."""
    held = await limiter.admit("acme", request_id, ())
    limits = [Limit(kind, 10**12) for kind in kinds]
    held = await limiter.reserve(held, [Claim(limit, tokens) for limit in limits], PRICE)
    await limiter.settle(held, Usage(0, tokens))


async def get(plane: Plane, name: str) -> pb.Budget:
    answer = await plane.call("GetBudget", pb.GetBudgetRequest(name=name))
    assert isinstance(answer, pb.GetBudgetResponse)
    return answer.budget


async def test_a_budget_lives_from_create_to_delete(plane: Plane) -> None:
    await plane.tenant("acme")
    made = await plane.budget("all", day_limit_micros=1_000_000)
    assert (made.limit_micros, made.day_limit_micros, made.currency) == (10_000_000, 1_000_000, "USD")
    assert (made.spent_micros, made.HasField("spent_micros"), made.message) == (0, True, "")
    with pytest.raises(AlreadyExists):
        await plane.budget("all")
    made.limit_micros = 20_000_000
    answer = await plane.call("UpdateBudget", pb.UpdateBudgetRequest(budget=made))
    assert isinstance(answer, pb.UpdateBudgetResponse)
    assert answer.budget.limit_micros == 20_000_000
    with pytest.raises(EtagMismatch):
        await plane.call("UpdateBudget", pb.UpdateBudgetRequest(budget=made))
    listed = await plane.call("ListBudgets", pb.ListBudgetsRequest())
    assert isinstance(listed, pb.ListBudgetsResponse)
    assert list(listed.budgets) == [answer.budget]
    await plane.call("DeleteBudget", pb.DeleteBudgetRequest(name="all"))
    with pytest.raises(NotFound):
        await get(plane, "all")


async def test_a_repeated_request_gets_the_first_answer(plane: Plane) -> None:
    await plane.tenant("acme")
    budget = pb.Budget(metadata=pb.Metadata(name="all"), tenant="acme", limit_micros=5)
    request = pb.CreateBudgetRequest(budget=budget, request_id="r1")
    first = await plane.call("CreateBudget", request)
    assert await plane.call("CreateBudget", request) == first
    request.budget.limit_micros = 6
    with pytest.raises(Conflict):
        await plane.call("CreateBudget", request)
    delete = pb.DeleteBudgetRequest(name="all", request_id="r2")
    await plane.call("DeleteBudget", delete)
    await plane.call("DeleteBudget", delete)


async def test_a_budget_names_a_tenant_and_a_key_of_it(plane: Plane) -> None:
    with pytest.raises(FailedPrecondition, match="no tenant acme"):
        await plane.budget("all")
    await plane.tenant("acme")
    await plane.tenant("other")
    await plane.key("theirs", "other")
    for key in ("nope", "theirs"):
        with pytest.raises(FailedPrecondition, match="has no key"):
            await plane.budget("all", key=key)
    await plane.key("ci", "acme")
    made = await plane.budget("all", key="ci")
    assert made.message == ""
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="ci"))
    assert (await get(plane, "all")).message == "the key ci does not exist any more"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"limit_micros": 0}, "needs a limit"),
        ({"key": "ci", "user": "bob"}, "not of both"),
        ({"day_limit_micros": 10_000_001}, "above the limit per month"),
        ({"currency": "usd"}, "currency"),
    ],
)
async def test_a_budget_makes_sense(plane: Plane, fields: dict[str, object], match: str) -> None:
    await plane.tenant("acme")
    await plane.key("ci", "acme")
    with pytest.raises(InvalidInput, match=match):
        await plane.budget("all", "acme", **fields)


async def test_the_scope_of_a_budget_never_changes(plane: Plane) -> None:
    await plane.tenant("acme")
    budget = await plane.budget("all")
    budget.user = "bob"
    with pytest.raises(InvalidInput, match="never change"):
        await plane.call("UpdateBudget", pb.UpdateBudgetRequest(budget=budget))


async def test_a_tenant_with_budgets_is_not_deleted(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.budget("all")
    with pytest.raises(FailedPrecondition, match="1 budgets, all among them"):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))
    await plane.call("DeleteBudget", pb.DeleteBudgetRequest(name="all"))
    await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme"))


async def test_what_was_spent_is_shown(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.budget("all", day_limit_micros=1_000_000)
    await spend(plane.limiter, "r1", 300, LimitKind.MONTH_MICROS, LimitKind.DAY_MICROS)
    held = await plane.limiter.admit("acme", "r2", ())
    month = Limit(LimitKind.MONTH_MICROS, 10_000_000)
    await plane.limiter.reserve(held, [Claim(month, 50)], PRICE)
    found = await get(plane, "all")
    assert (found.spent_micros, found.reserved_micros, found.day_spent_micros) == (300, 50, 300)
    each = await plane.budget("each", user="*")
    assert not each.HasField("spent_micros")
    assert "each end user" in each.message


async def test_deployments_without_a_price_are_named(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.deployment("free")
    price = pb.Price(input_micros=500_000, cached_micros=50_000, output_micros=1_500_000)
    assert (await plane.deployment("paid", price=price)).price == price
    assert (await plane.budget("all")).message == "no price, so requests cost nothing: free"
    await plane.key("ci", "acme", models=["paid"])
    assert (await plane.budget("of-key", key="ci")).message == ""
    with pytest.raises(InvalidInput, match="cannot cost more"):
        await plane.deployment("odd", price=pb.Price(input_micros=1, cached_micros=2))


async def test_budgets_are_watched(plane: Plane) -> None:
    await plane.tenant("acme")
    request = pb.WatchResourcesRequest(kinds=[pb.RESOURCE_KIND_BUDGET])
    seen: list[pb.ResourceChange] = []
    watch = plane.stub.WatchResources(request, metadata=(("authorization", "Bearer admin"),))
    async with asyncio.timeout(10):
        async for answer in watch:
            if not answer.changes and not answer.snapshot_end:
                continue  # it is a keepalive
            seen += answer.changes
            if answer.snapshot_end:
                await plane.budget("all")
            elif len(seen) == 1:
                await plane.call("DeleteBudget", pb.DeleteBudgetRequest(name="all"))
            elif len(seen) == 2:
                break
    watch.cancel()
    assert (seen[0].budget.limit_micros, seen[0].budget.HasField("spent_micros")) == (10_000_000, True)
    assert (seen[1].deleted, seen[1].budget.metadata.name) == (True, "all")


class Unreachable:
    async def spent(self, tenant_id: str, limits: object) -> tuple[Spent, ...]:
        raise StoreUnavailable("no answer")


async def test_without_the_quota_store_amounts_are_unknown(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.budget("all")
    (view,) = await Budgets(plane.store, plane.clock, Unreachable()).all()
    assert (view.spent_micros, view.message) == (None, "store unavailable: what was spent is unknown")


async def lead(plane: Plane, leader: str, metrics: Metrics | None = None) -> tuple[SpendAlerts, int]:
    await plane.store.commit([Put(LEADER, dump(Leader(leader, "h:1")))])
    entry = await plane.store.get(LEADER)
    assert entry is not None
    budgets = Budgets(plane.store, plane.clock, plane.limiter)
    recorder = EventRecorder(plane.store, plane.clock)
    led, levels = StaticElection(entry.create_revision), AlertTelemetry(metrics)
    alerts = SpendAlerts(plane.store, budgets, led, plane.clock, events=recorder, telemetry=levels)
    return alerts, entry.create_revision


async def alerted(plane: Plane) -> list[str]:
    events = [event_of(entry) for entry in (await plane.store.list(EVENTS)).entries]
    return [event.record.reason for event in events if event is not None]


async def test_each_threshold_is_reported_once_by_any_leader(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.budget("all", limit_micros=1000)
    metrics = Metrics()
    first, epoch = await lead(plane, "a", metrics)
    await first.check(epoch)
    assert await alerted(plane) == []
    await spend(plane.limiter, "r1", 850, LimitKind.MONTH_MICROS)
    await asyncio.gather(first.check(epoch), first.check(epoch))
    assert sorted(await alerted(plane)) == ["BUDGET_SPENT_50", "BUDGET_SPENT_80"]
    await first.check(epoch)
    level = 'fairway_budget_spent_ratio{budget="all",period="month"} 0.85'
    assert level in generate_latest(metrics.registry).decode()
    second, _ = await lead(plane, "b")
    await second.check(epoch)
    assert len(await alerted(plane)) == 2, "the next leader continues from the record"
    await spend(plane.limiter, "r2", 150, LimitKind.MONTH_MICROS)
    await second.check(epoch + 1)
    assert len(await alerted(plane)) == 2, "a deposed leader writes nothing"
    await second.check(epoch)
    assert sorted(await alerted(plane))[0] == "BUDGET_SPENT_100"
    await plane.call("DeleteBudget", pb.DeleteBudgetRequest(name="all"))
    assert (await plane.store.list(BUDGET_ALERTS)).entries == ()


async def test_a_budget_deleted_meanwhile_leaves_no_alert(plane: Plane) -> None:
    store: MemoryStore = (interleaving := Interleaving(plane.clock))
    budgets = Budgets(store, plane.clock, plane.limiter)
    await store.commit([Put(TENANTS + "acme", dump(Tenant(Meta("acme"))))])
    await budgets.create(Budget(Meta("all"), "acme", limit_micros=100))
    await store.commit([Put(LEADER, b"a")])
    leader = await store.get(LEADER)
    assert leader is not None
    await spend(plane.limiter, "r1", 60, LimitKind.MONTH_MICROS)
    recorder = EventRecorder(store, plane.clock)
    led = StaticElection(leader.create_revision)
    alerts = SpendAlerts(store, budgets, led, plane.clock, events=recorder)

    async def delete() -> None:
        await budgets.delete("all")

    interleaving.between = delete  # type: ignore[assignment]
    await alerts.check(leader.create_revision)
    assert (await store.list(BUDGET_ALERTS)).entries == (await store.list(EVENTS)).entries == ()


async def test_limits_of_tenant_key_and_users_are_stored(plane: Plane) -> None:
    limits = pb.Limits(
        requests_per_minute=1,
        max_concurrency=2,
        tokens_per_minute=3,
        input_tokens_per_minute=4,
        output_tokens_per_minute=5,
        max_context_tokens=6,
        max_output_tokens=7,
        max_timeout=Duration(seconds=8, nanos=500_000_000),
    )
    fields = {field.name: value for field, value in limits.ListFields()}
    tenant = await plane.tenant("acme", **fields, user_limits=limits)
    assert {name: getattr(tenant, name) for name in fields} == fields
    assert tenant.user_limits == limits
    assert (await plane.key("ci", "acme", limits=limits)).key.limits == limits
    stored = UsageLimits(1, 2, 3, 4, 5, 6, 7, 8.5)
    entry = await plane.store.get(TENANTS + "acme")
    assert entry is not None
    record = load(entry.value, Tenant)
    assert record.limits == record.user_limits == (await plane.stored_key("ci")).limits == stored
    with pytest.raises(InvalidInput, match="role admin has no limits"):
        await plane.key("ops", limits=limits)


async def test_records_without_the_new_fields_are_read(plane: Plane) -> None:
    await plane.store.commit(
        [
            Put(TENANTS + "old", b'{"meta":{"name":"old"},"requests_per_minute":5}'),
            Put(KEYS + "old", b'{"meta":{"name":"old"},"role":"tenant","secret_hash":"h","tenant":"old"}'),
        ]
    )
    tenant = await plane.call("GetTenant", pb.GetTenantRequest(name="old"))
    assert isinstance(tenant, pb.GetTenantResponse)
    assert tenant.tenant.requests_per_minute == 5
    assert not tenant.tenant.HasField("user_limits")
    assert (await plane.stored_key("old")).limits == UsageLimits()
