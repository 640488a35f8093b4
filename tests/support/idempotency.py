"""Both stores of idempotency records for the tests, with a way to let time pass for their leases."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import redis.asyncio

from services.adapters.record_cipher import OVERHEAD_BYTES, EncryptedRecords
from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.limiter import RedisLimiter
from services.ports.idempotency import IdempotencyStore, RecordKey, RecordLimits
from services.runtime.clock import SystemClock
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.tenant_keys import record_cipher


class StillCalendar(HandClock):
    """Its date does not change, so that all charges are of one month."""

    def unix_s(self) -> float:
        return 1e9


@dataclass(frozen=True, slots=True)
class Bench:
    """A store, the limiter that its settlements count in, and a tenant of its own."""

    store: IdempotencyStore
    limiter: MemoryLimiter | RedisLimiter
    limits: RecordLimits
    tenant: str
    lapse_leases: Callable[[], Awaitable[None]]
    lapse_bodies: Callable[[], Awaitable[None]]
    # By how much a stored chunk is longer than the chunk.
    overhead: int = 0

    def key(self, name: str = "k") -> RecordKey:
        return RecordKey(self.tenant, name)


def encrypted(bench: Bench) -> Bench:
    """Return the bench with records that are encrypted."""
    return replace(bench, store=EncryptedRecords(bench.store, record_cipher()), overhead=OVERHEAD_BYTES)


@asynccontextmanager
async def memory_bench(limits: RecordLimits) -> AsyncIterator[Bench]:
    clock = StillCalendar()
    limiter = MemoryLimiter(clock, lease_s=1e12)

    async def leases() -> None:
        clock.now_s += limits.lease_s

    async def bodies() -> None:
        clock.now_s += limits.body_s

    store = MemoryIdempotency(clock, limiter, limits)
    yield Bench(store, limiter, limits, f"acme-{uuid.uuid4().hex}", leases, bodies)


@asynccontextmanager
async def redis_bench(url: str, limits: RecordLimits) -> AsyncIterator[Bench]:
    tenant = f"acme-{uuid.uuid4().hex}"
    clock, raw = SystemClock(), redis.asyncio.Redis.from_url(url)

    async def heads() -> list[bytes]:
        names = [name async for name in raw.scan_iter(match=f"fw:{{{tenant}}}:idem:*")]
        return [name for name in names if not name.endswith(b":log")]

    async def leases() -> None:
        for name in await heads():
            if await raw.hexists(name, "l"):
                await raw.hset(name, "l", 0)

    async def bodies() -> None:
        await leases()
        for name in await heads():
            await raw.delete(name + b":log")

    store = RedisIdempotency(url, clock, limits, timeout_s=5.0)
    limiter = RedisLimiter(url, clock, timeout_s=5.0)
    try:
        yield Bench(store, limiter, limits, tenant, leases, bodies)
    finally:
        await store.close()
        await limiter.close()
        await raw.aclose()
