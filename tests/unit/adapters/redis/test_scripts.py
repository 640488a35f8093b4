"""Callers, lanes and time: what becomes of calls whose callers leave, and of a loop that stands still."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from services.adapters.redis.scripts import BATCH_CALLS, Call, CallQueue, LoopTimeout, RedisScripts
from services.core.errors import StoreUnavailable
from services.runtime.clock import SystemClock


def call(tenant: str, size_bytes: int = 1) -> Call:
    return Call(tenant, b"x" * size_bytes, asyncio.get_running_loop().create_future())


async def test_tenants_are_served_in_turns() -> None:
    queue = CallQueue()
    for _ in range(1000):
        queue.put(call("flood"))
    queue.put(call("canary"))
    batch = queue.take()
    assert len(batch) == BATCH_CALLS
    assert [each.tenant_id for each in batch[:3]] == ["flood", "canary", "flood"]


async def test_a_batch_is_bounded_in_bytes_and_leaves_out_calls_that_nobody_waits_for() -> None:
    queue = CallQueue()
    calls = [call(f"t{number}", 600_000) for number in range(4)]
    for each in calls:
        queue.put(each)
    calls[0].answer.cancel()
    assert [queue.take() for _ in range(4)] == [[calls[1]], [calls[2]], [calls[3]], []]
    assert not queue


async def test_a_cancelled_call_ends_cancelled() -> None:
    scripts = RedisScripts("redis://127.0.0.1:1", SystemClock(), timeout_s=30.0)
    task = asyncio.create_task(scripts.connect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scripts.close()


async def test_a_refused_connection_opens_the_breaker_and_fails_all_that_wait() -> None:
    scripts = RedisScripts("redis://127.0.0.1:1", SystemClock(), timeout_s=5.0)
    outcomes = await asyncio.gather(*(scripts.connect() for _ in range(500)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert len({id(outcome) for outcome in outcomes}) == 500, "errors are not shared: callers add to them"
    assert scripts.breaker_open
    await scripts.close()


async def test_a_timeout_passes_in_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with LoopTimeout(0.2):
            await asyncio.sleep(60)
    assert 0.19 < time.monotonic() - began_s < 50


async def test_a_loop_that_stands_still_is_not_the_others_slowness(own_redis: Any) -> None:
    """The answer lies in the socket when the loop goes on, long after the time of the call."""
    scripts = RedisScripts(f"redis://{own_redis.address}/0", SystemClock(), timeout_s=0.5)
    await scripts.connect()
    for _ in range(3):
        calls = [asyncio.create_task(scripts.connect()) for _ in range(200)]
        await asyncio.sleep(0)
        time.sleep(0.8)
        await asyncio.gather(*calls)
    assert not scripts.breaker_open
    await scripts.close()
