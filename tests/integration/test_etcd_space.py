"""An etcd near its quota: new objects are refused, the fleet's own writes go on, the alarm is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aetcd import rpc

from services.adapters.etcd.channel import EtcdChannel
from services.adapters.etcd.store import EtcdStore
from services.core.errors import StorageFull
from services.core.records import ASSIGNMENTS, LEADERS, TENANTS
from services.ports.store import Committed, Delete, ModRevisionIs, Put
from services.runtime.clock import SystemClock
from tests.support.waiting import until

QUOTA_BYTES = 16 * 1024**2


@pytest_asyncio.fixture
async def store(own_etcd: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([own_etcd.address], SystemClock(), quota_bytes=QUOTA_BYTES)
    watching = asyncio.create_task(store.watch_space())
    yield store
    watching.cancel()
    await store.close()


def new(key: str, size: int = 10) -> tuple[list[Put], list[ModRevisionIs]]:
    return [Put(key, bytes(size))], [ModRevisionIs(key, 0)]


async def test_new_objects_leave_a_reserve_that_the_fleet_may_use(own_etcd: Any, store: EtcdStore) -> None:
    lease = await store.grant_lease(60)
    with pytest.raises(StorageFull, match=r"no room in etcd: .* delete what is not needed"):
        for number in range(100):
            await store.commit(*new(f"{TENANTS}{number}", 500_000))
            await asyncio.sleep(0.2)
    assert store.space.reserve.reached
    assert store.space.problem() == ""
    assert isinstance(await store.commit(*new(f"{ASSIGNMENTS}w/1")), Committed)
    leads = [Put(LEADERS, b"me", lease)], [ModRevisionIs(LEADERS, 0)]
    assert isinstance(await store.commit(*leads), Committed)
    assert isinstance(await store.commit([Put(f"{TENANTS}0", b"smaller")]), Committed)
    await store.keep_alive(lease)
    for number in range(100):
        await store.commit([Delete(f"{TENANTS}{number}")])
    channel = EtcdChannel([own_etcd.address])
    revision = (await store.list(TENANTS)).revision
    await channel.unary(lambda s: s.kv.Compact, rpc.CompactionRequest(revision=revision, physical=True), 10.0)
    await channel.close()
    async with asyncio.timeout(30):
        while store.space.reserve.reached:  # etcd frees pages with a later write
            await store.commit([Put("/fairway/v1/beat", b"")])
            await asyncio.sleep(0.1)
    assert isinstance(await store.commit(*new(f"{TENANTS}again")), Committed)


async def test_the_alarm_is_reported_and_leases_last(own_etcd: Any, store: EtcdStore) -> None:
    lease = await store.grant_lease(60)
    await store.commit(*new(f"{TENANTS}here"))
    channel = EtcdChannel([own_etcd.address])
    status = await channel.unary(lambda s: s.maintenance.Status, rpc.StatusRequest(), 5.0)
    alarm = rpc.AlarmRequest(action=1, memberID=status.header.member_id, alarm=1)
    await channel.unary(lambda s: s.maintenance.Alarm, alarm, 5.0)
    await channel.close()
    await until(lambda: "NOSPACE" in store.space.problem())
    await store.keep_alive(lease)
    with pytest.raises(StorageFull, match="takes no writes"):
        await store.grant_lease(60)
    with pytest.raises(StorageFull):
        await store.commit(*new(f"{TENANTS}more"))
    assert isinstance(await store.commit([Delete(f"{TENANTS}here")]), Committed)
