"""The limiter and the records of keys on a Redis with Sentinels, through a failover, and on a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.limiter import RedisLimiter
from services.adapters.redis.topologies import credentials_of, node_url, nodes_of
from services.core.errors import BudgetExceeded, FailedPrecondition, StoreUnavailable
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price
from services.ports.idempotency import Ended, Owned, RecordKey
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.support.redis_topologies import HOST, Servers, cluster, sentinel_group, servers

CLOCK = SystemClock()
MONTH = Limit(LimitKind.MONTH_MICROS, 1000)
PRICE = Price(10**6, 10**6, 10**6)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Servers]:
    with servers(tmp_path) as found:
        yield found


async def reserved(limiter: RedisLimiter, tenant: str, request_id: str, micros: int) -> Reservation:
    slot = await limiter.admit(tenant, request_id, [Limit(LimitKind.CONCURRENCY, 1000)])
    return await limiter.reserve(slot, [Claim(MONTH, micros)], PRICE)


async def test_a_failover_of_sentinels_is_followed(running: Servers) -> None:
    url, master, _ = await asyncio.to_thread(sentinel_group, running, down_after_ms=4000)
    limiter = RedisLimiter(url, CLOCK, timeout_s=1.0)
    try:
        await limiter.connect()
        held = await reserved(limiter, "t", "r1", 900)
        with running.client(master) as client:
            assert client.wait(1, 5000) == 1, "the replica has the reservation"
        await asyncio.to_thread(running.kill, master)
        began_s = time.monotonic()
        async with asyncio.timeout(90):  # Sentinels that stood still for 2 s do nothing for 30 s.
            while True:
                try:
                    await limiter.concurrency("t")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        print(f"after {time.monotonic() - began_s:.1f} s the new master answers")
        with pytest.raises(BudgetExceeded):
            await reserved(limiter, "t", "r2", 101)
        await limiter.settle(held, Usage(100, 100))
        (spent,) = await limiter.spent("t", [MONTH])
        assert (spent.settled_micros, spent.reserved_micros) == (200, 0)
    finally:
        await limiter.close()


async def test_a_master_that_was_demoted_is_left(running: Servers) -> None:
    """It still answers, as a replica that refuses writes."""
    url, master, replica = await asyncio.to_thread(sentinel_group, running, down_after_ms=4000)
    limiter = RedisLimiter(url, CLOCK, timeout_s=1.0)
    try:
        await reserved(limiter, "t", "r1", 900)
        with running.client(int(nodes_of(url)[0][1])) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", "quotas")

        async with asyncio.timeout(30):
            while True:
                with running.client(replica) as client:
                    if client.info("replication")["role"] == "master":
                        break
                await asyncio.sleep(0.05)
            number = 2
            while True:
                try:
                    await reserved(limiter, "t", f"r{number}", 1)
                    with running.client(master) as client:
                        if client.info("replication")["role"] == "slave":
                            break
                except StoreUnavailable:
                    pass
                number += 1
                await asyncio.sleep(0.4)  # each reserves a hundredth of what the budget has left
        assert not limiter.breaker_open
        with running.client(replica) as client:
            assert client.exists(f"fw:{{t}}:request:r{number}")
    finally:
        await limiter.close()


async def test_tenants_are_spread_over_a_cluster(running: Servers) -> None:
    url, ports = await asyncio.to_thread(cluster, running)
    limiter, records = RedisLimiter(url, CLOCK, timeout_s=2.0), RedisIdempotency(url, CLOCK, timeout_s=2.0)
    try:
        await limiter.connect()
        await records.connect()
        tenants = [f"tenant-{number}" for number in range(30)]
        held = await asyncio.gather(*(reserved(limiter, tenant, "r", 600) for tenant in tenants))
        for each in held:
            with pytest.raises(BudgetExceeded):
                await reserved(limiter, each.tenant_id, "more", 401)
            owned = await records.claim(RecordKey(each.tenant_id, "k"), "f", "a")
            assert isinstance(owned, Owned)
            await records.finish(owned.hold, b"end", each, Usage(10, 20))
            assert isinstance(await records.claim(RecordKey(each.tenant_id, "k"), "f", "b"), Ended)
        for each in held:
            (spent,) = await limiter.spent(each.tenant_id, [MONTH])
            assert (spent.settled_micros, spent.reserved_micros) == (30, 0)
        for port in ports:
            with running.client(port) as client:
                assert client.dbsize() > 0, "every master has some"
    finally:
        await limiter.close()
        await records.close()


async def test_a_slot_that_moves_is_followed(running: Servers) -> None:
    """And a master that fails leaves the tenants of the others alone."""
    url, ports = await asyncio.to_thread(cluster, running)
    limiter = RedisLimiter(url, CLOCK, timeout_s=1.0)
    try:
        await reserved(limiter, "t", "r1", 600)
        with running.client(ports[0]) as client:
            slot = int(client.execute_command("CLUSTER", "KEYSLOT", "fw:{t}:slots"))
        source = next(port for port in ports if _has_keys(running, port))
        target = next(port for port in ports if port != source)
        _move(running, slot, source, target, ports)
        with pytest.raises(BudgetExceeded):
            await reserved(limiter, "t", "r2", 401)
        await reserved(limiter, "t", "r3", 400)
        assert not _has_keys(running, source)
        third = next(port for port in ports if port not in (source, target))
        await asyncio.to_thread(running.kill, third)
        assert await limiter.concurrency("t") == 3
    finally:
        await limiter.close()


def _has_keys(running: Servers, port: int) -> bool:
    with running.client(port) as client:
        return bool(client.dbsize())


def _move(running: Servers, slot: int, source: int, target: int, ports: list[int]) -> None:
    with running.client(source) as old, running.client(target) as new:
        source_id, target_id = (str(each.execute_command("CLUSTER", "MYID")) for each in (old, new))
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        old.execute_command("MIGRATE", HOST, target, "", 0, 5000, "KEYS", *keys)
        for port in (target, source, *ports):
            with running.client(port) as each:
                each.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def test_urls_name_nodes_and_credentials() -> None:
    url = "rediss+sentinel://user:p%40ss@[::1]:26380,sentinel-b/service"
    assert nodes_of(url) == (("::1", 26380), ("sentinel-b", 26379))
    assert credentials_of(url, "other") == {"username": "user", "password": "p@ss", "ssl": True}
    assert node_url("rediss+cluster://u:p@a:1,b:2", ("::1", 7)) == "rediss://u:p@[::1]:7"
    assert node_url("redis+cluster://a:1", ("b", 7)) == "redis://b:7"
    assert credentials_of("redis+cluster://a:1,b:2", "file") == {"password": "file"}
    with pytest.raises(FailedPrecondition, match="not HOST:PORT"):
        nodes_of("redis+cluster://a:1,:x")
    with pytest.raises(FailedPrecondition, match="names no service"):
        RedisLimiter("redis+sentinel://a:1", CLOCK)
