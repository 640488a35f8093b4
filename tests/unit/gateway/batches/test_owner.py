"""Which batches a gateway runs: claims, turns of tenants, its lease, and one line at a time beside others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.batches import BATCH_OWNERS, BatchRecord, BatchStatus, batch_key
from services.core.errors import NoWorkerAvailable, StoreUnavailable
from services.core.generation import Principal
from services.core.records import KeyRole, Meta, Tenant, dump
from services.gateway.batches.lines import LineAnswer
from services.gateway.batches.owner import BatchOwner, OwnerLimits
from services.gateway.batches.ports import BatchPorts, BatchTimes
from services.ports.store import Committed, Condition, ConditionFailed, Delete, Entry, Operation, Put
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.supervisor import Supervisor
from tests.support.memory_batches import BatchStack, running_stack
from tests.support.memory_blobs import MemoryBlobs
from tests.support.waiting import until
from tests.unit.gateway.batches.test_execution import URL, FastClock, OnceCalls, lines_of

LIMITS = OwnerLimits(max_batches=1, max_lines=8, busy_lines=1)


class TenantCalls(OnceCalls):
    """Lines of any tenant, which take a moment. Those of the model ``away`` find no worker."""

    async def run(self, principal: Principal, endpoint: str, body: bytes, key: str) -> LineAnswer:
        if self.unavailable in json.loads(body):
            raise NoWorkerAvailable("no worker", retry_after_s=0.1)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await asyncio.sleep(0.005)
        finally:
            self.active -= 1
        self.runs[principal.tenant_id] += 1
        self.answers[key] = LineAnswer(200, body, "req_1")
        return LineAnswer(200, body, "req_1")


async def created(
    stack: BatchStack, tenant: str, lines: int, body: dict[str, Any] | None = None
) -> BatchRecord:
    upload = stack.files.upload(tenant)
    await upload.write(lines_of([body or {} for _ in range(lines)]))
    file = await stack.files.add(upload, "in.jsonl")
    await upload.close()
    return await stack.service.create(Principal("k", KeyRole.TENANT, tenant), file.file_id, URL, "24h", {})


@asynccontextmanager
async def owning(
    stack: BatchStack,
    clock: FastClock,
    calls: TenantCalls,
    limits: OwnerLimits = LIMITS,
    name: str = "g",
    **more: Any,
) -> AsyncIterator[BatchOwner]:
    supervisor = Supervisor(clock)
    ports = BatchPorts(
        stack.store,
        stack.parts,
        calls,
        clock,
        Random(2),
        tenant_of=lambda _: Tenant(Meta("acme")),
        status_of=lambda batch: batch.status,
        count=lambda _: None,
        room_bytes=stack.files.room_bytes,
        retention_s=lambda _: 30 * 86_400.0,
        deployment_of=str,
        max_line_bytes=10_000,
        times=BatchTimes(commit_s=0.0),
    )
    lease = LeaseHolder(stack.etcd, clock, ttl_s=300)
    owner = BatchOwner(
        ports,
        stack.batches,
        stack.owners,
        lease,
        supervisor,
        gateway_id=name,
        limits=limits,
        **{"gateways": lambda: 1} | more,
    )
    supervisor.spawn("batches", owner.run())
    try:
        yield owner
    finally:
        await owner.close()
        await supervisor.close()


async def status(stack: BatchStack, batch: BatchRecord) -> BatchStatus:
    return (await stack.store.batch(batch.tenant, batch.batch_id)).record.status


async def ended(stack: BatchStack, *batches: BatchRecord) -> None:
    async with asyncio.timeout(20):
        for batch in batches:
            while not (await status(stack, batch)).is_over:
                await asyncio.sleep(0.01)


async def test_a_long_batch_yields_to_another_tenant_and_goes_on() -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        long = await created(stack, "a", 1000)
        async with owning(stack, clock, calls) as owner:
            await until(lambda: calls.runs["a"] > 5)
            short = await created(stack, "b", 5)
            await ended(stack, short)
            assert not (await status(stack, long)).is_over
            assert owner.running <= 1
            await ended(stack, long)
        record = (await stack.store.batch("a", long.batch_id)).record
        assert record.completed == 1000


async def test_of_a_tenant_one_batch_runs_at_once() -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        batches = [await created(stack, "a", 20) for _ in range(3)]
        most = 0
        async with owning(stack, clock, calls, replace(LIMITS, max_batches=8)) as owner:
            while not (await status(stack, batches[-1])).is_over:
                most = max(most, owner.running)
                await asyncio.sleep(0.002)
            await ended(stack, *batches)
        assert most == 1


async def test_lines_run_one_at_a_time_beside_other_requests() -> None:
    for serves, bounds in ((True, (1, 1)), (False, (2, 8))):
        clock, calls = FastClock(), TenantCalls()
        async with running_stack(clock) as stack:
            batch = await created(stack, "a", 60)
            async with owning(stack, clock, calls, serves_others=lambda serves=serves: serves):
                await ended(stack, batch)
        assert bounds[0] <= calls.most <= bounds[1]


async def test_a_gateway_that_closes_leaves_its_batch_to_the_next_at_once() -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        batch = await created(stack, "a", 200)
        async with owning(stack, clock, calls):
            await until(lambda: calls.runs["a"] > 5)
        assert not (await status(stack, batch)).is_over
        async with owning(stack, clock, calls):
            await ended(stack, batch)


AWAY = {"away": 1}


@pytest.mark.parametrize("places", [1, 2])
async def test_a_batch_without_progress_holds_up_no_other_of_its_tenant(places: int) -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        stalled, runs = await created(stack, "a", 5, AWAY), await created(stack, "a", 5)
        async with owning(stack, clock, calls, replace(LIMITS, max_batches=places)):
            await ended(stack, runs)
            assert not (await status(stack, stalled)).is_over
            calls.unavailable = "none"
            await ended(stack, stalled)
    assert calls.runs["a"] == 10


async def test_stalled_batches_leave_their_places_to_other_tenants_and_to_each_other() -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        stalled = [await created(stack, "a", 5, AWAY) for _ in range(2)]
        runs = await created(stack, "a", 5)
        async with owning(stack, clock, calls) as owner:  # one place
            await ended(stack, runs)
            long = await created(stack, "b", 1000)
            async with asyncio.timeout(20):
                while (await stack.store.batch("b", long.batch_id)).record.completed < 1000:
                    assert owner.running <= 1
                    await asyncio.sleep(0.01)
            assert not any([(await status(stack, batch)).is_over for batch in stalled])


async def test_a_stalled_batch_goes_on_in_its_place_and_the_newer_one_yields() -> None:
    """On two gateways with one place each."""
    clock, calls = FastClock(), TenantCalls()
    etcd = MemoryStore(clock)
    two: dict[str, Any] = {"gateways": lambda: 2}
    shared: dict[str, Any] = {"etcd": etcd, "blobs": MemoryBlobs(unix_s=clock.unix_s)}
    async with running_stack(clock, **shared) as stack, running_stack(clock, **shared) as other:
        stalled = await created(stack, "a", 100, AWAY)
        async with owning(stack, clock, calls, name="g1", **two) as first:
            await until(lambda: first.running == 1)
            long = await created(stack, "a", 1000)
            async with owning(other, clock, calls, name="g2", **two) as second:
                await until(lambda: calls.runs["a"] > 5)
                assert (first.running, second.running) == (1, 1)
                calls.unavailable = "none"
                await until(lambda: second.running == 0)
                await ended(stack, stalled)
                assert not (await status(stack, long)).is_over
                await ended(stack, long)
    assert calls.most <= 2 * LIMITS.max_lines


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_batch_that_waits_for_its_turn_ends_without_one(places: int, how: str) -> None:
    clock, calls = FastClock(), TenantCalls()
    async with running_stack(clock) as stack:
        long = await created(stack, "a", 2000)
        async with owning(stack, clock, calls, replace(LIMITS, max_batches=places)):
            await until(lambda: calls.runs["a"] > 5)
            waits = await created(stack, "a", 5)
            if how == "cancelled":
                await stack.service.cancel(Principal("k", KeyRole.TENANT, "a"), waits.batch_id)
            else:
                short = replace(waits, expire_unix_s=clock.unix_s() + 5.0)
                await stack.etcd.commit([Put(batch_key("a", waits.batch_id), dump(short))])
            await ended(stack, waits)
            assert await status(stack, waits) == how
            assert not (await status(stack, long)).is_over
            await ended(stack, long)
    # A line without a written result runs again under its key after a turn.
    assert len(calls.answers) == 2000
    assert all(key.startswith(f"{long.batch_id}/") for key in calls.answers)


class LosingOwners:
    """A ``Store`` that fails once around an owner's key, or deletes such keys slowly."""

    def __init__(self, inner: MemoryStore, clock: FastClock, fault: str) -> None:
        self._inner = inner
        self._clock = clock
        self.fault = fault
        self.interrupted = 0
        self._claimed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str) -> Entry | None:
        if self._claimed and self.fault == "read":
            self._fail()
        return await self._inner.get(key)

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        owners = operations[0].key.startswith(BATCH_OWNERS)
        deletes = owners and isinstance(operations[0], Delete)
        if deletes and self.fault == "release":
            self._fail()
        if deletes and self.fault == "slow":
            try:
                await self._clock.sleep(5.0)
            except asyncio.CancelledError:
                self.interrupted += 1
                raise
        outcome = await self._inner.commit(operations, conditions)
        self._claimed = owners and not deletes
        if self._claimed and self.fault == "claim":
            self._fail()
        return outcome

    def _fail(self) -> None:
        self.fault = ""
        raise StoreUnavailable("the answer is lost")


@pytest.mark.parametrize("fault", ["claim", "read", "release"])
async def test_no_batch_stays_owned_in_the_name_of_a_gateway_that_does_not_run_it(fault: str) -> None:
    clock, calls = FastClock(), TenantCalls()
    store = LosingOwners(MemoryStore(clock), clock, fault)
    async with running_stack(clock, etcd=store) as stack, owning(stack, clock, calls):
        batches = [await created(stack, "a", 5) for _ in range(2)]
        await ended(stack, *batches)
    assert not store.fault


async def test_a_turn_that_ends_is_cancelled_once() -> None:
    clock, calls = FastClock(), TenantCalls()
    store = LosingOwners(MemoryStore(clock), clock, "slow")
    async with running_stack(clock, etcd=store) as stack, owning(stack, clock, calls):
        await created(stack, "a", 1000)
        await until(lambda: calls.runs["a"] > 5)
        await ended(stack, await created(stack, "b", 5))
        assert store.interrupted == 0
