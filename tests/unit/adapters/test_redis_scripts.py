"""A call of Redis that is cancelled ends cancelled, whatever the client makes of it."""

from __future__ import annotations

import asyncio

import pytest

from services.adapters.redis_scripts import RedisScripts
from tests.support.clocks import HandClock


@pytest.mark.parametrize("error", [None, ConnectionError("while cleaning up")], ids=["answers", "fails"])
async def test_a_cancellation_that_the_client_drops_is_not_lost(error: Exception | None) -> None:
    begun = asyncio.Event()

    async def call() -> str:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return "answer"

    scripts = RedisScripts("redis://127.0.0.1:1", HandClock(), timeout_s=30.0, max_connections=1)
    task = asyncio.create_task(scripts._bounded(call))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scripts.close()
