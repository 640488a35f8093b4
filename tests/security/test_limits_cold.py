"""Limits hold from the first request of gateways that just started, and after Redis went away for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis.asyncio

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, RequestRateExceeded
from services.core.limits import Limit
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.support.metered import limits

CLOCK = SystemClock()


def gateway(url: str, gateways: Callable[[], int] = lambda: 2) -> tuple[GatewayLimiter, RedisLimiter]:
    shared = RedisLimiter(url, CLOCK)
    return GatewayLimiter(shared, CLOCK, gateways=gateways), shared


async def busy(seconds: float) -> None:
    """A process that starts: imports and model files hold its loop up."""
    for _ in range(4):
        time.sleep(seconds / 4)
        await asyncio.sleep(0)


@pytest.mark.parametrize("most", [limits(0, 5), limits(5, 0)], ids=["concurrency", "rate"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never connected"])
async def test_two_cold_gateways_let_exactly_the_limit_through(
    own_redis: Any, most: Sequence[Limit], connected: bool
) -> None:
    for attempt in range(5):
        pairs = [gateway(f"redis://{own_redis.address}/0") for _ in range(2)]
        if connected:
            await asyncio.gather(*(shared.connect() for _, shared in pairs))
        outcomes, *_ = await asyncio.gather(
            asyncio.gather(
                *(
                    pairs[number % 2][0].admit(f"t{attempt}", f"r{attempt}-{number}", most)
                    for number in range(60)
                ),
                return_exceptions=True,
            ),
            busy(1.2),
        )
        admitted = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
        assert len(admitted) == 5
        assert not any(reservation.local for reservation in admitted)
        for _, shared in pairs:
            await shared.close()


async def test_gateways_that_never_reached_redis_admit_their_shares() -> None:
    """Nobody listens at that port; two gateways are known."""
    pairs = [gateway("redis://127.0.0.1:1/0") for _ in range(2)]
    for most, refusal in ((limits(0, 5), ConcurrencyExceeded), (limits(5, 0), RequestRateExceeded)):
        outcomes = await asyncio.gather(
            *(pairs[number % 2][0].admit(f"t{refusal.reason}", f"r{number}", most) for number in range(60)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 4
        assert sum(isinstance(outcome, refusal) for outcome in outcomes) == 56
    for _, shared in pairs:
        await shared.close()


@pytest.mark.parametrize(("gateways", "admitted"), [(0, 3), (1, 3), (3, 1), (9, 1)])
async def test_a_share_is_at_least_one_and_at_most_the_limit(gateways: int, admitted: int) -> None:
    limiter, shared = gateway("redis://127.0.0.1:1/0", lambda: gateways)
    outcomes = [limiter.admit("t", f"r{number}", limits(0, 3)) for number in range(5)]
    found = await asyncio.gather(*outcomes, return_exceptions=True)
    assert sum(isinstance(outcome, Reservation) for outcome in found) == admitted
    assert (await limiter.admit("free", "r", limits())).local
    await shared.close()


async def test_a_clock_that_is_set_back_blocks_no_tenant(own_redis: Any) -> None:
    """Redis' clock was an hour ahead when the bucket was filled; a request drains in a tenth of a second."""
    most = limits(600, 0)
    limiter, shared = gateway(f"redis://{own_redis.address}/0")
    async with redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0") as client:
        ahead_us = round((time.time() + 3600) * 1e6)
        await client.hset("fw:{t}:requests", mapping={"used": 600 * 60_000_000, "at": ahead_us})
        await client.pexpire("fw:{t}:requests", 3_661_000)
    with pytest.raises(RequestRateExceeded):
        await limiter.admit("t", "r0", most)
    await asyncio.sleep(0.3)
    await limiter.admit("t", "r1", most)
    await shared.close()
