"""What every clock does: the machine's, those that tests turn, and a simulated process's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.ports.clock import Clock
from services.runtime.clock import SystemClock
from tests.support.clocks import HandClock
from tests.support.simulated import Check, World, checks_of, simulate
from tests.unit.gateway.conftest import FakeClock as GatewayClock
from tests.unit.runtime.conftest import LoopClock


@pytest.fixture(params=[SystemClock, LoopClock, GatewayClock, HandClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Clock]:
    yield world.process("p").clock


async def test_monotonic_time_never_goes_back(clock: Clock) -> None:
    seen = [clock.monotonic_s() for _ in range(1000)]
    assert seen == sorted(seen)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.03])
async def test_a_sleep_lasts_at_least_as_long_as_asked(clock: Clock, seconds: float) -> None:
    # The event loop rounds to its resolution, which may wake a sleeper that much early.
    resolution_s = 0.001
    started_s = clock.monotonic_s()
    await clock.sleep(seconds)
    assert clock.monotonic_s() - started_s >= seconds - resolution_s


async def test_a_sleep_of_zero_lets_others_run(clock: Clock) -> None:
    ran: list[str] = []

    async def other() -> None:
        ran.append("other")

    task = asyncio.ensure_future(other())
    await clock.sleep(0)
    ran.append("sleeper")
    await task
    assert ran == ["other", "sleeper"]


async def test_wall_time_is_in_seconds(clock: Clock) -> None:
    before_s = clock.unix_s()
    await clock.sleep(0.01)
    assert 0 <= clock.unix_s() - before_s < 60


async def test_a_cancelled_sleep_ends(clock: Clock) -> None:
    sleeping = asyncio.ensure_future(clock.sleep(3600))
    await asyncio.sleep(0)
    if not sleeping.done():  # a clock that is turned has slept the hour by then
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping


@pytest.mark.parametrize("check", checks_of(globals(), "clock"))
def test_of_a_simulated_process(check: Check) -> None:
    simulate(check, simulated)
