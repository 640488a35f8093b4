"""What the limiters do when Redis is frozen, gone, back, restarted or out of memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, RequestRateExceeded, StoreUnavailable
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.support.metered import PRICE, admit_metered, charged, limits
from tests.support.waiting import until

TIMEOUT_S = 0.25
MARGIN_S = 5.0  # for a busy machine; one after the other, the calls would take 25 s
PAUSE_S = 1.1  # after which an open breaker lets one call through
NONE = limits()


@pytest_asyncio.fixture
async def limiter(own_redis: Any) -> AsyncIterator[RedisLimiter]:
    limiter = RedisLimiter(f"redis://{own_redis.address}/0", SystemClock(), timeout_s=TIMEOUT_S)
    yield limiter
    await limiter.close()


@pytest_asyncio.fixture
async def patient(own_redis: Any) -> AsyncIterator[RedisLimiter]:
    """For tests that stop no Redis: it may wait for its disk."""
    limiter = RedisLimiter(f"redis://{own_redis.address}/0", SystemClock(), timeout_s=MARGIN_S)
    yield limiter
    await limiter.close()


async def seconds_until_refused(limiter: RedisLimiter, request_id: str) -> float:
    start_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await limiter.admit("t", request_id, NONE)
    return time.monotonic() - start_s


async def back_within(limiter: RedisLimiter, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await limiter.concurrency("t")
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_a_frozen_redis_costs_one_timeout_then_nothing(own_redis: Any, limiter: RedisLimiter) -> None:
    await limiter.admit("t", "before", NONE)
    own_redis.freeze()
    try:
        waits_s = await asyncio.gather(*(seconds_until_refused(limiter, f"r{n}") for n in range(100)))
        assert max(waits_s) < TIMEOUT_S + MARGIN_S
        start_s = time.monotonic()
        for number in range(100):
            await seconds_until_refused(limiter, f"s{number}")
        assert time.monotonic() - start_s < 100 * TIMEOUT_S / 4, "an open breaker asks no more"
        await asyncio.sleep(PAUSE_S)
        waits_s = await asyncio.gather(*(seconds_until_refused(limiter, f"t{n}") for n in range(20)))
        assert 1 <= sum(wait_s > TIMEOUT_S / 2 for wait_s in waits_s) < 10, (
            "one call tries, the others do not wait"
        )
    finally:
        own_redis.thaw()
    await back_within(limiter, 30.0)
    await limiter.admit("t", "after", NONE)


async def test_a_redis_that_is_gone_is_refused_at_once_and_found_again(
    own_redis: Any, limiter: RedisLimiter
) -> None:
    held = await admit_metered(limiter, "t", "r1", limits(2, 2))
    await limiter.settle(held, Usage(5, 5))
    await limiter.admit("t", "r2", limits(2, 2))
    own_redis.kill()
    assert await seconds_until_refused(limiter, "r3") < TIMEOUT_S + MARGIN_S
    await asyncio.to_thread(own_redis.start)
    await back_within(limiter, 30.0)
    assert await charged(limiter, "t") == Usage(5, 5), "what was acknowledged is on disk"
    assert await limiter.concurrency("t") == 1
    with pytest.raises(RequestRateExceeded):
        await limiter.admit("t", "r3", limits(2, 2))


async def test_scripts_that_redis_forgot_are_sent_again(own_redis: Any, patient: RedisLimiter) -> None:
    held = await patient.admit("t", "r1", NONE)
    client = redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0")
    await client.script_flush()
    await client.aclose()
    await patient.settle(held, Usage(1, 1))
    assert await patient.concurrency("t") == 0


async def test_a_flushed_redis_counts_from_zero_and_nothing_is_stuck(
    own_redis: Any, patient: RedisLimiter
) -> None:
    most = limits(4, 2)
    held = [await patient.admit("t", f"r{number}", most) for number in range(2)]
    with pytest.raises(ConcurrencyExceeded):
        await patient.admit("t", "r2", most)
    client = redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0")
    await client.flushall()
    await client.aclose()
    assert await patient.concurrency("t") == 0
    anew = [await patient.admit("t", f"n{number}", most) for number in range(2)]
    for each in (*held, *anew):
        await patient.settle(each, Usage(1, 1))
    assert await patient.concurrency("t") == 0, "what ended twice as often as it began is not below zero"
    for number in range(2):
        await patient.settle(await patient.admit("t", f"m{number}", most), Usage(1, 1))
    with pytest.raises(RequestRateExceeded):
        await patient.admit("t", "late", most)


async def test_a_redis_without_memory_is_unavailable(own_redis: Any, patient: RedisLimiter) -> None:
    await patient.admit("t", "r1", NONE)
    client = redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0")
    await client.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable):
        await patient.admit("t", "r2", NONE)
    await client.config_set("maxmemory", "0")
    await client.aclose()
    await patient.admit("t", "r2", NONE)


async def test_every_key_expires_and_carries_the_tenants_tag(own_redis: Any, patient: RedisLimiter) -> None:
    for tenant in ("t1", "t2"):
        held = await admit_metered(patient, tenant, "r1", limits(10, 10))
        await patient.reserve(held, [Claim(Limit(LimitKind.TOKENS, 100), 10)], PRICE)
        running = await patient.admit(tenant, "r2", limits(10, 10))
        await patient.settle(held, Usage(1, 1))
        await patient.renew([(running, Usage(1, 0))])
    client = redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0", decode_responses=True)
    keys = sorted([key async for key in client.scan_iter()])
    kinds = ("month_micros", "request:r1", "request:r2", "requests", "slots", "tokens")
    assert keys == [f"fw:{{{tenant}}}:{kind}" for tenant in ("t1", "t2") for kind in kinds]
    for key in keys:
        assert 0 < await client.pttl(key) <= 63 * 86400 * 1000, key
    await client.aclose()


async def test_a_bucket_outlives_its_key_exactly(own_redis: Any, patient: RedisLimiter) -> None:
    """The rate's key is gone only when the bucket is empty anyway."""
    began_s = time.monotonic()
    for number in range(600):
        await patient.admit("t", f"r{number}", limits(600))
    client = redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0")
    remaining_ms = await client.pttl("fw:{t}:requests")
    leaked_ms = 1000 * (time.monotonic() - began_s)  # since the first, at most
    await client.aclose()
    assert 60_000 - leaked_ms < remaining_ms <= 61_001


async def test_cancelled_calls_leave_usable_connections(own_redis: Any, patient: RedisLimiter) -> None:
    for step in range(60):
        task = asyncio.create_task(patient.admit("t", f"r{step}", NONE))
        for _ in range(step % 6):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    for number in range(5):
        held = await admit_metered(patient, "u", f"r{number}", limits(slots=1))
        assert await patient.concurrency("u") == 1
        await patient.settle(held, Usage(1, 1))
    assert (await charged(patient, "u")).prompt_tokens == 5


async def test_two_gateways_share_one_limit(own_redis: Any) -> None:
    gateways = [
        RedisLimiter(f"redis://{own_redis.address}/0", SystemClock(), timeout_s=5.0) for _ in range(2)
    ]
    outcomes = await asyncio.gather(
        *(gateways[n % 2].admit("t", f"r{n}", limits(slots=5)) for n in range(30)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 5
    for gateway in gateways:
        await gateway.close()


async def test_what_waits_is_settled_soon_after_the_store_is_back(
    own_redis: Any, limiter: RedisLimiter
) -> None:
    clock = SystemClock()
    gateway = GatewayLimiter(limiter, clock)
    held = await admit_metered(gateway, "t", "r", limits(slots=1))
    settling = asyncio.create_task(gateway.settle_forever())
    try:
        for round_ in range(2):  # the second outage comes while nothing renews either
            own_redis.freeze()
            await gateway.settle(held, Usage(1, 1))
            assert gateway.unsettled == 1
            own_redis.thaw()
            await until(lambda: not gateway.unsettled, timeout_s=10)
            assert await limiter.concurrency("t") == 0
            assert await charged(limiter, "t") == Usage(round_ + 1, round_ + 1)
            held = await admit_metered(gateway, "t", f"r{round_}", limits(slots=1))
    finally:
        settling.cancel()
        await asyncio.wait({settling})


async def test_an_outage_fails_open_to_the_local_cap_and_settles_afterwards(
    own_redis: Any, limiter: RedisLimiter
) -> None:
    clock = SystemClock()
    gateway = GatewayLimiter(limiter, clock)
    most = limits(4, 2)
    before = await admit_metered(gateway, "t", "before", most)
    assert not before.local
    own_redis.freeze()
    try:
        during = [await gateway.admit("t", f"d{n}", most) for n in range(2)]
        assert all(reservation.local for reservation in during)
        with pytest.raises(ConcurrencyExceeded):
            await gateway.admit("t", "d2", most)
        await gateway.settle(before, Usage(10, 1))
        await gateway.settle(before, Usage(10, 1))
        for reservation in during:
            await gateway.settle(reservation, Usage(100, 1))
        await gateway.renew([(before, Usage(1, 1))])
        for number in range(2):
            await gateway.settle(await gateway.admit("t", f"e{number}", most), Usage(1000, 1))
        with pytest.raises(RequestRateExceeded):
            await gateway.admit("t", "f", most)
        assert gateway.unsettled == 5
    finally:
        own_redis.thaw()
    await back_within(limiter, 30.0)
    await gateway.renew([])
    assert gateway.unsettled == 0
    assert await charged(limiter, "t") == Usage(10, 1), "nothing is metered without the store"
    assert await limiter.concurrency("t") == 0
    after = await gateway.admit("t", "after", most)
    assert not after.local


async def test_slots_of_requests_that_ended_in_an_outage_are_free_right_after_it(
    own_redis: Any, limiter: RedisLimiter
) -> None:
    clock = SystemClock()
    gateway = GatewayLimiter(limiter, clock)
    most = limits(slots=2)
    held = [await gateway.admit("t", f"r{number}", most) for number in range(2)]
    own_redis.freeze()
    try:
        for reservation in held:
            await gateway.settle(reservation, Usage(1, 1))
    finally:
        own_redis.thaw()
    await back_within(limiter, 30.0)
    for number in range(2):
        assert not (await gateway.admit("t", f"s{number}", most)).local
    with pytest.raises(ConcurrencyExceeded):
        await gateway.admit("t", "s2", most)
