"""Processes: what is theirs, pause, crash, restart, and clocks that differ."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Coroutine
from random import Random
from typing import Any

import pytest

from services.ports.clock import Clock
from simulator.kernel.handles import Owner
from simulator.kernel.loop import Deadlock, VirtualTimeLoop
from simulator.kernel.process import UNIX_START_S, Process, Skew


def simulate(main: Coroutine[Any, Any, Any], loop: VirtualTimeLoop) -> Any:
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


@pytest.fixture
def loop() -> VirtualTimeLoop:
    return VirtualTimeLoop()


def process(loop: VirtualTimeLoop, name: str = "p", **skew: float) -> Process:
    return Process(name, loop, Random(1), skew=Skew(**skew))


async def ticks(clock: Clock, seen: list[float], loop: VirtualTimeLoop) -> None:
    while True:
        await clock.sleep(1.0)
        seen.append(loop.now_s)


def test_a_paused_process_runs_nothing_and_catches_up_in_order(loop: VirtualTimeLoop) -> None:
    one, other = process(loop, "one"), process(loop, "other")
    seen: list[str] = []

    async def main() -> None:
        one.call_later(3.0, seen.append, "third")
        one.call_later(1.0, seen.append, "first")
        one.call_later(2.0, seen.append, "second")
        one.call_later(9.0, seen.append, "in time")
        other.call_later(2.0, seen.append, "neighbour")
        await asyncio.sleep(0.5)
        one.pause()
        assert one.paused
        assert one.alive
        one.call_soon(seen.append, "message")
        await asyncio.sleep(5.0)
        assert seen == ["neighbour"]
        one.resume()
        await asyncio.sleep(0)
        assert seen == ["neighbour", "message", "first", "second", "third"]
        await asyncio.sleep(5.0)
        assert seen[-1] == "in time"

    simulate(main(), loop)


def test_time_goes_on_for_a_paused_process(loop: VirtualTimeLoop) -> None:
    paused = process(loop)
    seen: list[float] = []

    async def main() -> None:
        paused.spawn("ticks", ticks(paused.clock, seen, loop))
        await asyncio.sleep(2.5)
        paused.pause()
        await asyncio.sleep(10.0)
        paused.resume()
        await asyncio.sleep(2.0)
        assert seen == [1.0, 2.0, 12.5, 13.5]

    simulate(main(), loop)


def test_a_crash_ends_everything_without_a_last_word(loop: VirtualTimeLoop) -> None:
    said: list[str] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            said.append("generator")

    async def work() -> None:
        try:
            async with contextlib.aclosing(numbers()) as found:
                async for _ in found:
                    pass
        finally:
            said.append("finally")

    async def main() -> None:
        victim = process(loop)
        victim.spawn("work", work())
        victim.spawn("orphan", work())
        victim.call_later(2.0, said.append, "timer")
        victim.call_soon(said.append, "before")
        await asyncio.sleep(1.0)
        victim.call_soon(said.append, "never")
        victim.crash()
        victim.crash()
        assert not victim.alive
        assert not victim.paused
        victim.supervisor = None  # type: ignore[assignment]  # nobody keeps its tasks
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(1.0)
        assert said == ["before"]

    simulate(main(), loop)


def test_a_paused_process_can_be_killed(loop: VirtualTimeLoop) -> None:
    victim = process(loop)
    seen: list[float] = []

    async def main() -> None:
        victim.spawn("ticks", ticks(victim.clock, seen, loop))
        await asyncio.sleep(1.5)
        victim.pause()
        await asyncio.sleep(1.0)
        victim.crash()
        await asyncio.sleep(3.0)
        assert seen == [1.0]
        with pytest.raises(AssertionError):
            victim.resume()

    simulate(main(), loop)


def test_a_new_life_has_the_name_and_the_clocks_and_nothing_else(loop: VirtualTimeLoop) -> None:
    first = process(loop, rate=1.5, offset_s=100.0, unix_offset_s=7.0)
    seen: list[float] = []

    async def main() -> None:
        await asyncio.sleep(2.0)
        first.jump_unix(-60.0)
        before = first.clock.monotonic_s(), first.clock.unix_s()
        first.spawn("ticks", ticks(first.clock, seen, loop))
        first.crash()
        second = first.restart()
        assert (second.name, second.life) == ("p", 2)
        assert (second.clock.monotonic_s(), second.clock.unix_s()) == before
        assert second.ids.request_id() != first.ids.request_id()
        second.spawn("ticks", ticks(second.clock, seen, loop))
        await asyncio.sleep(1.0)
        assert len(seen) == 1

    simulate(main(), loop)


def test_everything_that_its_code_starts_is_its_own(loop: VirtualTimeLoop) -> None:
    owner = process(loop)
    seen: list[str] = []

    async def inner(name: str) -> None:
        await asyncio.sleep(1.0)
        seen.append(name)

    async def outer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inner("task"))
            asyncio.get_running_loop().call_later(1.0, seen.append, "timer")
            await owner.supervisor.spawn("spawned", inner("spawned"))

    async def main() -> None:
        owner.spawn("outer", outer())
        owner.run(loop.call_later, 1.0, seen.append, "built")
        await asyncio.sleep(0.5)
        owner.crash()
        await asyncio.sleep(5.0)
        assert seen == []

    simulate(main(), loop)


def test_a_process_neither_stops_nor_kills_itself(loop: VirtualTimeLoop) -> None:
    one = process(loop)
    with pytest.raises(AssertionError, match="cannot do that to itself"):
        one.run(one.crash)
    with pytest.raises(AssertionError, match="cannot do that to itself"):
        one.run(one.pause)
    loop.close()


def test_a_fast_clock_shows_more_and_sleeps_shorter(loop: VirtualTimeLoop) -> None:
    fast = process(loop, rate=1.25, offset_s=1000.0)

    async def inside() -> tuple[float, float, float]:
        await fast.clock.sleep(5.0)
        slept = loop.now_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return slept, loop.now_s, asyncio.get_running_loop().time()

    async def main() -> None:
        slept, timed_out, shown = await fast.spawn("inside", inside())
        assert (slept, timed_out, shown) == (4.0, 8.0, 1010.0)
        assert fast.clock.monotonic_s() == 1010.0
        assert fast.clock.unix_s() == UNIX_START_S + 10.0

    simulate(main(), loop)


@pytest.mark.parametrize("rate", [0.7, 1.0, 1.0001, 1 / 3])
def test_a_sleep_never_ends_early_by_the_sleeper_s_own_clock(loop: VirtualTimeLoop, rate: float) -> None:
    skewed = process(loop, rate=rate, offset_s=-12345.678)
    rng = Random(5)

    async def inside() -> None:
        clock = skewed.clock
        for _ in range(2000):
            due_s = clock.monotonic_s() + rng.expovariate(10)
            turns = 0
            while (left_s := due_s - clock.monotonic_s()) > 0:
                ends_s = clock.monotonic_s() + left_s
                await clock.sleep(left_s)
                assert clock.monotonic_s() >= ends_s
                turns += 1
                assert turns < 4, "the clock does not reach what was slept for"

    async def main() -> None:
        await skewed.spawn("inside", inside())

    simulate(main(), loop)


@pytest.mark.parametrize("rate", [0.7, 1.0, 1.0001, 1 / 3])
@pytest.mark.parametrize("offset_s", [0.0, 0.001, -12345.678])
def test_a_timer_is_set_to_the_first_instant_that_is_not_early(rate: float, offset_s: float) -> None:
    owner = Owner("p", offset_s=offset_s, rate=rate)
    rng = Random(3)
    for _ in range(5000):
        local_s = owner.local_s(rng.uniform(0.0, 1e6))
        assert owner.local_s(owner.global_s(local_s)) >= local_s
        later_s = local_s + rng.expovariate(1.0)
        assert 0.0 <= owner.local_s(owner.global_s(later_s)) - later_s < 1e-9


def test_a_deadlock_says_whose_tasks_wait(loop: VirtualTimeLoop) -> None:
    async def main() -> None:
        await process(loop, "worker-3").spawn("reader", asyncio.Event().wait())

    with pytest.raises(Deadlock, match="main, worker-3/reader"):
        simulate(main(), loop)
