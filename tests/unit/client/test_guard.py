from __future__ import annotations

import asyncio

import pytest

from fairway.client.errors import Closed
from fairway.client.guard import Guard


async def test_close_ends_what_waits_and_what_comes_later() -> None:
    guard = Guard()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(caught(guard))
        while not guard.busy:
            await asyncio.sleep(0)
        guard.close("first")
        guard.close("second")
        await guard.idle()
        assert (await waiting).message == "first"
        with pytest.raises(Closed):
            guard.check()
    assert guard.closed


async def test_a_cancellation_stays_one_even_beside_a_close() -> None:
    guard = Guard()
    task = asyncio.ensure_future(guard.run(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    guard.close("closed")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not guard.busy


async def test_a_task_that_was_cut_off_is_not_cancelled_afterwards() -> None:
    guard = Guard()

    async def work() -> int:
        await caught(guard)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    guard.close("closed")
    assert await task == 0


async def caught(guard: Guard) -> Closed:
    with pytest.raises(Closed) as found:
        await guard.run(asyncio.Event().wait())
    return found.value
