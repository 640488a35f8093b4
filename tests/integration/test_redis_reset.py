"""Connections to Redis that are reset between two calls: an outage like any other, also under uvloop."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import uvloop

from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import StoreUnavailable
from services.runtime.clock import SystemClock
from tests.chaos.proxy import Proxy, Rule
from tests.support.local_servers import free_port
from tests.support.metered import limits

CALLERS = 16
CUTS = 3
TIMEOUT_S = 30.0


async def _ask_all_the_time(limiter: RedisLimiter, name: str, refused: list[str]) -> None:
    """Ask until cancelled; any other error than the port's is raised."""
    for number in itertools.count():
        try:
            await limiter.admit("t", f"{name}-{number}", limits())
        except StoreUnavailable:
            refused.append(name)
        await asyncio.sleep(0)


async def _reset_under_load(server_port: int) -> None:
    """A busy machine may make no call during a cut: cut until some call meets one."""
    proxy, port = Proxy(), free_port()
    listener = await proxy.listen("redis", port, server_port)
    limiter = RedisLimiter(f"redis://127.0.0.1:{port}/0", SystemClock(), timeout_s=5.0)
    refused: list[str] = []
    try:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            asking = [group.create_task(_ask_all_the_time(limiter, f"c{n}", refused)) for n in range(CALLERS)]
            cuts = 0
            while cuts < CUTS or not refused:
                cuts += 1
                await asyncio.sleep(0.02)
                proxy.apply([Rule("*", "redis", "cut")])
                await asyncio.sleep(0.05)  # longer than another connection takes
                proxy.apply([])
                await _answers(limiter)
            for task in asking:
                task.cancel()
    finally:
        await limiter.close()
        listener.close()
        proxy.apply([Rule("*", "*", "cut")])


async def _answers(limiter: RedisLimiter) -> None:
    """Return once Redis is asked again and answers."""
    while True:
        try:
            await limiter.concurrency("t")
            return
        except StoreUnavailable:
            await asyncio.sleep(0.05)


def test_connections_reset_under_load_are_an_outage(own_redis: Any) -> None:
    uvloop.run(_reset_under_load(own_redis.port))
