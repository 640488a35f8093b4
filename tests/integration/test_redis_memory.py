"""A Redis that evicts nothing, and tenants that fill it: a share for each, and a reserve for the limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.limiter import RedisLimiter
from services.adapters.redis.memory import RedisMemory
from services.core.errors import IdempotencyKeysExceeded, StorageFull, StoreUnavailable
from services.core.generation import Usage
from services.ports.idempotency import Addition, Ended, Expired, Owned, RecordKey, RecordLimits, Written
from services.runtime.clock import SystemClock
from services.runtime.reserve import RESERVE_RATIO, Reserve
from tests.support.metered import limits

CLOCK = SystemClock()
ROOM_BYTES = 12 * 1024**2
CHUNK = b"x" * 100_000
NONE = Usage(0, 0)


@dataclass(slots=True)
class Bench:
    memory: RedisMemory
    records: RedisIdempotency
    stored: RedisIdempotency
    limiter: RedisLimiter
    raw: Any
    max_bytes: int

    async def used_bytes(self) -> int:
        return int((await self.raw.info("memory"))["used_memory"])

    async def refused_writes(self) -> int:
        return int((await self.raw.info("errorstats")).get("errorstat_OOM", {"count": 0})["count"])


@pytest_asyncio.fixture
async def bench(own_redis: Any) -> AsyncIterator[Bench]:
    url = f"redis://{own_redis.address}/0"
    raw = redis.asyncio.Redis.from_url(url)
    max_bytes = int((await raw.info("memory"))["used_memory"]) + ROOM_BYTES
    await raw.config_set("maxmemory", max_bytes)
    memory = RedisMemory(url, CLOCK, Reserve("Redis", "wait", CLOCK), timeout_s=5.0)
    records = RedisIdempotency(url, CLOCK, timeout_s=5.0, memory=memory)
    stored = RedisIdempotency(url, CLOCK, RecordLimits(open_s=3600.0), timeout_s=5.0, memory=memory)
    limiter = RedisLimiter(url, CLOCK, timeout_s=5.0)
    measuring = asyncio.create_task(memory.run())
    await memory.measure()
    yield Bench(memory, records, stored, limiter, raw, max_bytes)
    measuring.cancel()
    for each in (memory, records, stored, limiter, raw):
        await (each.aclose() if each is raw else each.close())


async def answered(store: RedisIdempotency, tenant: str, number: int, chunk: bytes = CHUNK) -> Written:
    """Run one request with a key to its end."""
    claim = await store.claim(RecordKey(tenant, f"{number:032x}"), "same", "gateway")
    assert isinstance(claim, Owned)
    await store.append([Addition(claim.hold, chunk)])
    return await store.finish(claim.hold, b"end", None, NONE)


async def test_one_tenant_that_fills_redis_harms_no_other(bench: Bench) -> None:
    other = [await answered(bench.records, "other", number, b"answer") for number in range(20)]
    for number in range(2 * bench.max_bytes // len(CHUNK)):
        await answered(bench.records, "hoarder", number)
        await bench.limiter.admit("other", f"r{number}", limits(requests=10**6))
    for number in range(2 * bench.max_bytes // len(CHUNK)):
        await answered(bench.stored, "hoarder/responses", number)
    assert set(other) == {Written.KEPT}
    assert await bench.used_bytes() < bench.max_bytes * (1 - RESERVE_RATIO)
    assert await bench.refused_writes() == 0
    assert not bench.memory.reserve.reached
    assert await answered(bench.records, "other", 1000, b"answer") is Written.KEPT
    found = [
        await bench.records.claim(RecordKey("other", f"{number:032x}"), "same", "g") for number in range(20)
    ]
    assert found == [Ended()] * 20
    assert await bench.records.claim(RecordKey("hoarder", f"{0:032x}"), "same", "g") == Expired()


async def test_keys_without_answers_are_bounded_by_a_share_as_well(bench: Bench) -> None:
    async def claims(tenant: str, first: int) -> list[object]:
        keys = [RecordKey(tenant, f"{number:032x}") for number in range(first, first + 200)]
        return await asyncio.gather(
            *(bench.records.claim(key, "same", "g") for key in keys), return_exceptions=True
        )

    outcomes: list[object] = []
    for first in range(0, 32_000, 200):
        await bench.memory.measure()  # what is known then is the fill and not an estimate, on any machine
        outcomes += await claims("hoarder", first)
    assert {type(each) for each in outcomes} == {Owned, IdempotencyKeysExceeded}
    assert await bench.used_bytes() < 0.6 * bench.max_bytes
    assert await bench.refused_writes() == 0
    assert {type(each) for each in await claims("other", 0)} == {Owned}
    await bench.limiter.admit("other", "r", limits(requests=10))


async def test_at_the_reserve_what_runs_ends_and_limits_go_on(bench: Bench) -> None:
    """Many tenants fill it together, which no share prevents."""
    running = await bench.records.claim(RecordKey("early", "a" * 32), "same", "g")
    opened = await bench.stored.claim(RecordKey("early", "b" * 32), "same", "g")
    assert isinstance(running, Owned)
    assert isinstance(opened, Owned)
    assert await bench.stored.release(opened.hold, b"begun", None, NONE) is Written.KEPT
    with pytest.raises(StorageFull, match=r"no room in Redis: .*; wait"):
        for number in range(4 * bench.max_bytes // len(CHUNK)):
            await answered(bench.records, f"tenant-{number}", 0)
    assert bench.memory.reserve.reached
    assert await bench.refused_writes() == 0
    for number in range(200):
        await bench.limiter.admit("other", f"r{number}", limits(requests=10**6))
    assert await bench.records.append([Addition(running.hold, b"token")]) == (Written.KEPT,)
    assert await bench.records.finish(running.hold, b"end", None, NONE) is Written.KEPT
    again = await bench.stored.claim(RecordKey("early", "b" * 32), "same", "g")
    assert isinstance(again, Owned)
    assert await bench.stored.finish(again.hold, b"answer", None, NONE) is Written.KEPT
    assert isinstance(await bench.records.claim(RecordKey("early", "a" * 32), "same", "g"), Ended)
    await bench.raw.config_set("maxmemory", 10 * bench.max_bytes)
    await bench.memory.measure()
    assert await answered(bench.records, "late", 0) is Written.KEPT


async def test_a_bound_that_is_taken_away_ends_the_reserve(bench: Bench) -> None:
    await bench.raw.config_set("maxmemory", await bench.used_bytes() * 10 // 9)
    await bench.memory.measure()
    assert bench.memory.reserve.reached
    await bench.raw.config_set("maxmemory", 0)
    await bench.memory.measure()
    assert not bench.memory.reserve.reached


async def test_a_redis_that_takes_no_writes_is_reported(bench: Bench) -> None:
    assert bench.limiter.problem == ""
    await bench.raw.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable):
        await bench.limiter.admit("t", "r", limits(requests=10))
    assert bench.limiter.problem == "Redis refuses writes: its memory is full"
