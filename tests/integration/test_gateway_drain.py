"""A gateway that drains after an outage of Redis leaves nothing behind there."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import StoreUnavailable
from services.core.generation import Usage
from services.gateway.catalog import ModelCatalog
from services.gateway.requests.validate import Validator
from services.gateway.service import GatewayService, drain
from services.gateway.service_types import GatewayLimits, Ports
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.metered import admit_metered, charged

CLOCK = SystemClock()


def _service(limiter: GatewayLimiter) -> GatewayService:
    nobody: Any = None
    ports = Ports(
        limiter=limiter,
        placement=nobody,
        workers=nobody,
        clock=CLOCK,
        supervisor=Supervisor(CLOCK),
        rng=Random(0),
        sign_ticket=lambda ticket: b"t",
        new_incident=lambda: "inc_1",
        error_of=by_reason,
    )
    catalog = ModelCatalog(
        nobody, nobody, nobody, CLOCK, texts=nobody, splits=nobody, scaled=nobody, sized=nobody
    )
    return GatewayService(
        validator=Validator(catalog, nobody, Random(0)),
        identity=nobody,
        catalog=catalog,
        ports=ports,
        limits=GatewayLimits(),
    )


async def _back(limiter: RedisLimiter) -> None:
    while True:
        try:
            await limiter.connect()
            return
        except StoreUnavailable:
            await asyncio.sleep(0.05)


async def test_a_drain_delivers_settlements_that_were_kept(own_redis: Any) -> None:
    shared = RedisLimiter(f"redis://{own_redis.address}/0", CLOCK, timeout_s=2.0)
    limiter = GatewayLimiter(shared, CLOCK)
    try:
        reservation = await admit_metered(limiter, "t", "r")
        own_redis.kill()
        await limiter.settle(reservation, Usage(prompt_tokens=3, output_tokens=4))
        own_redis.start()
        assert limiter.unsettled == 1
        async with asyncio.timeout(30):
            await _back(shared)
            assert await shared.concurrency("t") == 1, "the slot is held until it is settled"
        await drain(_service(limiter), CLOCK, 0.0)
        assert limiter.unsettled == 0
        assert await shared.concurrency("t") == 0
        assert (await charged(shared, "t")).output_tokens == 4
    finally:
        await shared.close()
