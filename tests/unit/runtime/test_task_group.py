"""What follows a group that failed, in the same task."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from fairway.task_group import TaskGroup


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("failed")


async def test_a_timeout_after_a_group_that_failed_is_a_timeout() -> None:
    for _ in range(2):
        with pytest.raises(BaseExceptionGroup):
            async with TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)


async def test_a_cancellation_from_outside_is_not_taken_back() -> None:
    async def run() -> None:
        async with TaskGroup() as group:
            group.create_task(asyncio.sleep(60))

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held:
    """What a request holds."""


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_a_failed_group_held_is_freed_without_the_collector(
    no_collector: None, cancelled: bool
) -> None:
    held: list[weakref.ref[Held]] = []

    async def work() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        async with TaskGroup() as group:
            group.create_task(asyncio.sleep(60) if cancelled else fail())
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    if cancelled:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else BaseExceptionGroup):
        await task
    del task
    await asyncio.sleep(0)
    assert held[0]() is None
