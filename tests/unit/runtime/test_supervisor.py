"""A crash is remembered, an end is not, and nothing is left running."""

from __future__ import annotations

import asyncio

import pytest

from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor


async def _fail() -> None:
    raise KeyError("x")


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_crash_makes_the_process_unhealthy_and_is_named() -> None:
    supervisor = Supervisor(SystemClock())
    task = supervisor.spawn("reader", _fail())
    with pytest.raises(KeyError):
        await task
    assert not supervisor.healthy
    assert supervisor.failures == ("reader",)
    assert supervisor.running == 0


async def test_an_end_and_a_cancellation_are_no_crash() -> None:
    supervisor = Supervisor(SystemClock())
    assert await supervisor.spawn("short", asyncio.sleep(0, "done")) == "done"
    task = supervisor.spawn("long", _for_ever())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert supervisor.healthy
    assert supervisor.running == 0


async def test_closing_ends_every_task_and_takes_no_more() -> None:
    supervisor = Supervisor(SystemClock())
    tasks = [supervisor.spawn(f"task {number}", _for_ever()) for number in range(3)]
    await supervisor.close(grace_s=1.0)
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(RuntimeError, match="shutting down"):
        supervisor.spawn("late", _for_ever())
    assert supervisor.healthy


async def test_a_task_that_does_not_end_is_not_waited_for_for_ever() -> None:
    supervisor = Supervisor(SystemClock())
    release = asyncio.Event()

    async def stubborn() -> None:
        try:
            await release.wait()
        finally:
            await release.wait()

    task = supervisor.spawn("stubborn", stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(4):  # its default is 5 s
        await supervisor.close(grace_s=0.05)
    assert not task.done()
    release.set()
    await asyncio.wait({task})
