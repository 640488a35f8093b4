"""One tenant's storm of starts, with a healthy Redis: limits stay exact, others wait for nothing, no usage is
lost and the store does not count as away.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.quotas.hot_tenants import SliceSettings
from services.adapters.redis.limiter import MAX_ADMITTING, RedisLimiter
from services.core.errors import ConcurrencyExceeded, OverQuota, RequestRateExceeded
from services.core.generation import Usage
from services.core.limits import Limit
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.support.metered import MeteredLimiter, charged, limits

STARTS = 20_000
CLOCK = SystemClock()
NEVER_HOT = SliceSettings(hot_per_s=math.inf)  # the store decides on every request


class Rig:
    """A gateway's limiter."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.shared = RedisLimiter(url, CLOCK, timeout_s=timeout_s)
        self.limiter = GatewayLimiter(MeteredLimiter(self.shared), CLOCK, slices=NEVER_HOT)
        self.outcomes: Counter[str] = Counter()
        self.held: list[Reservation] = []

    async def start(self, tenant: str, number: int, most: Sequence[Limit]) -> None:
        try:
            reservation = await self.limiter.admit(tenant, f"{tenant}-{number}", most)
        except OverQuota as error:
            self.outcomes[error.reason if error.retry_after_s else "no time to retry"] += 1
        else:
            self.outcomes["local" if reservation.local else "shared"] += 1
            self.held.append(reservation)


@contextlib.asynccontextmanager
async def rigged(redis: Any, timeout_s: float) -> AsyncIterator[Rig]:
    rig = Rig(f"redis://{redis.address}/0", timeout_s)
    await rig.shared.connect()
    yield rig
    await rig.shared.close()


@pytest_asyncio.fixture
async def rig(own_redis: Any) -> AsyncIterator[Rig]:
    """Its Redis may stand still for seconds."""
    async with rigged(own_redis, 5.0) as rig:
        yield rig


def tenant() -> str:
    return f"t-{uuid.uuid4().hex}"


@pytest.mark.parametrize("most", [limits(0, 5), limits(30, 0)], ids=["concurrency", "rate"])
async def test_a_storm_of_starts_gets_exactly_its_limit(rig: Rig, most: Sequence[Limit]) -> None:
    flood = tenant()
    await asyncio.gather(*(rig.start(flood, number, most) for number in range(STARTS)))
    assert rig.outcomes["shared"] == max(limit.limit for limit in most)
    assert rig.outcomes["local"] == 0
    assert sum(rig.outcomes.values()) == STARTS
    assert not rig.shared.breaker_open
    assert rig.limiter.unsettled == 0


async def test_starts_that_are_cancelled_poison_nothing(rig: Rig) -> None:
    flood, rng = tenant(), random.Random(1)
    tasks: list[asyncio.Task[None]] = []
    for number in range(STARTS):
        tasks.append(asyncio.create_task(rig.start(flood, number, limits(0, 5))))
        if rng.random() < 0.05:
            await asyncio.sleep(0)
        tasks[rng.randrange(max(0, len(tasks) - 200), len(tasks))].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert rig.outcomes["local"] == 0
    assert not rig.shared.breaker_open
    other = tenant()
    for number in range(5):
        held = await rig.limiter.admit(other, f"r{number}", limits(slots=1))
        assert not held.local
        assert await rig.shared.concurrency(other) == 1
        await rig.limiter.settle(held, Usage(1, 1))
    assert await charged(rig.shared, other) == Usage(5, 5)


async def test_others_are_admitted_and_settled_beside_a_storm(rig: Rig) -> None:
    """The canary's calls take turns with those of the storm, which has more of them at any time.

    The loop is never idle meanwhile: its processor time is the wait on a machine that does nothing else.
    """
    flood, canary = tenant(), tenant()
    waits_s: list[float] = []
    over = asyncio.Event()

    async def storm(part: int) -> None:
        while not over.is_set():
            await asyncio.sleep(0)
            for _ in range(10):
                await rig.start(flood, part, limits(0, 5))

    storms = [asyncio.create_task(storm(part)) for part in range(400)]
    await asyncio.sleep(0.2)
    settled = 0
    for number in range(40):
        began_s = time.process_time()
        held = await rig.limiter.admit(canary, f"c{number}", limits(1000, 1))
        waits_s.append(time.process_time() - began_s)
        assert not held.local
        await rig.limiter.settle(held, Usage(3, 2))
        settled += 1
        await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*storms)
    assert max(waits_s) < 1.0
    assert await charged(rig.shared, canary) == Usage(3 * settled, 2 * settled)
    assert rig.outcomes["local"] == 0
    assert len(rig.held) == 5 or {held.request_id for held in rig.held} <= {
        f"{flood}-{n}" for n in range(400)
    }
    assert await rig.shared.concurrency(flood) == 5


async def test_a_tenant_has_a_bounded_number_of_admissions_under_way(rig: Rig) -> None:
    flood = tenant()
    starts = [asyncio.create_task(rig.start(flood, number, limits())) for number in range(MAX_ADMITTING + 50)]
    await asyncio.gather(*starts)
    assert rig.outcomes == {"shared": MAX_ADMITTING, RequestRateExceeded.reason: 50}


async def test_refills_of_a_hot_tenants_slices_are_bounded_too(rig: Rig) -> None:
    """The first answers fill its slice, so that only those that came before them wait."""
    rig.limiter, flood = GatewayLimiter(rig.shared, CLOCK, slices=SliceSettings(hot_per_s=0)), tenant()
    starts = [rig.start(flood, number, limits(1_000_000)) for number in range(MAX_ADMITTING + 50)]
    await asyncio.gather(*starts)
    assert rig.outcomes == {"shared": MAX_ADMITTING, RequestRateExceeded.reason: 50}
    await rig.limiter.admit(flood, "later", limits(1_000_000))


async def test_a_gateway_whose_loop_stands_still_does_not_blame_redis(own_redis: Any) -> None:
    """Each stall is longer than the time that a call of Redis may take."""
    flood = tenant()

    async def stall() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
            time.sleep(1.2)

    async with rigged(own_redis, 1.0) as rig:
        starts = (rig.start(flood, number, limits(0, 5)) for number in range(2000))
        await asyncio.gather(stall(), *starts)
        assert (rig.outcomes["shared"], rig.outcomes["local"]) == (5, 0)
        assert not rig.shared.breaker_open


async def test_a_connection_that_is_cut_is_not_an_outage(rig: Rig, own_redis: Any) -> None:
    """Redis closes idle and slow clients, and so do boxes on the way."""
    async with redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0") as client:
        for number in range(20):
            starts = asyncio.gather(*(rig.start(f"t{number}", n, limits(0, 5)) for n in range(100)))
            await asyncio.sleep(0)
            await client.client_kill_filter(_type="normal", skipme=True)
            await starts
    assert (rig.outcomes["shared"], rig.outcomes["local"]) == (100, 0)
    assert rig.outcomes[ConcurrencyExceeded.reason] == 1900
    assert not rig.shared.breaker_open
