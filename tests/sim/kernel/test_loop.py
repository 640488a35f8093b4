"""Virtual time: the clock jumps, instants are first in, first out, and nothing outside is touched."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from simulator.kernel.loop import (
    CallbackFailed,
    Deadlock,
    LimitReached,
    Limits,
    OutsideWorld,
    VirtualTimeLoop,
    run,
)


def test_a_day_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert run(main()) == 86_400


def test_callbacks_of_one_instant_run_in_the_order_in_which_they_were_asked_for() -> None:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_at(1.0, ran.append, number)
        await asyncio.sleep(0.5)
        for number in range(100, 200):
            loop.call_later(0.5, ran.append, number)
        await asyncio.sleep(1.0)

    run(main())
    assert ran == list(range(200))


def test_timers_run_by_their_instants_however_they_were_set() -> None:
    ran: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for when_s in (0.3, 0.1, 0.2, 0.1000001, 0.0):
            loop.call_at(when_s, lambda: ran.append(loop.time()))
        await asyncio.sleep(1)

    run(main())
    assert ran == [0.0, 0.1, 0.1000001, 0.2, 0.3]


def test_what_becomes_ready_runs_before_the_clock_moves() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        loop.call_later(0.001, seen.append, "later")
        for _ in range(50):
            await asyncio.sleep(0)
            seen.append("now")
        return seen

    assert "later" not in run(main())


def test_cancelled_timers_neither_run_nor_stay() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for _ in range(50_000):
            loop.call_later(1000, pytest.fail).cancel()
        await asyncio.sleep(2000)
        return len(loop._timers)

    assert run(main()) < 5000


def test_time_limits_work_as_in_asyncio() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await asyncio.Event().wait()
        async with asyncio.timeout(3.0):
            await asyncio.sleep(2.0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 5.0


def test_a_deadlock_names_who_waits() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="reader")
            group.create_task(asyncio.Lock().acquire(), name="lucky")

    with pytest.raises(Deadlock, match=r"at 0\.000000 s: main, reader"):
        run(main())


def test_limits_end_what_does_not_end() -> None:
    async def beats() -> None:
        while True:
            await asyncio.sleep(1.0)

    async def spins() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LimitReached, match="passed 60 s"):
        run(beats(), limits=Limits(virtual_s=60))
    with pytest.raises(LimitReached, match="ran 1001 callbacks"):
        run(beats(), limits=Limits(callbacks=1000))
    with pytest.raises(LimitReached, match="clock does not move: main"):
        run(spins(), limits=Limits(instant_callbacks=1000))


def test_the_hook_sees_every_instant_and_what_it_raises_ends_the_run() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        instants: list[float] = []
        loop.after_instant = lambda: instants.append(loop.now_s)
        await asyncio.gather(asyncio.sleep(1), asyncio.sleep(1), asyncio.sleep(2))
        assert instants == [0.0, 1.0]

        def broken() -> None:
            raise AssertionError("tokens were lost")

        loop.after_instant = broken
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="tokens were lost"):
        run(main())


def test_what_a_callback_raises_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: [][0])
        await asyncio.sleep(2)

    with pytest.raises(CallbackFailed, match=r"at 1\.000000 s: IndexError"):
        run(main())


def test_an_exception_that_nobody_takes_ends_the_run() -> None:
    async def fails() -> None:
        raise ValueError("nobody looks")

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(fails())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)
        await asyncio.sleep(1)

    with pytest.raises(CallbackFailed, match="nobody looks"):
        run(main())


def test_executors_run_inline_and_no_thread_starts() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            name = await loop.run_in_executor(pool, lambda: threading.current_thread().name)
            with pytest.raises(KeyError):
                await asyncio.to_thread(dict[str, int]().__getitem__, "a")
        return name

    assert run(main()) == threading.current_thread().name


async def test_the_outside_is_not_there() -> None:
    loop = VirtualTimeLoop()
    refusals: tuple[Callable[[], object], ...] = (
        lambda: loop.add_reader(0, print),
        lambda: loop.create_connection(asyncio.Protocol, "localhost", 1),
        lambda: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda: loop.add_signal_handler(2, print),
    )
    for refused in refusals:
        with pytest.raises(OutsideWorld):
            refused()
    loop.close()


def test_sets_of_tasks_and_futures_iterate_by_their_numbers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        tasks = {loop.create_task(asyncio.sleep(1), name=str(n)) for n in range(64)}
        futures = {loop.create_future() for _ in range(64)}
        assert sorted(map(hash, tasks)) == sorted(task.number for task in loop.tasks())[1:]
        first = min(map(hash, futures))
        assert sorted(map(hash, futures)) == list(range(first, first + 64))
        done, _ = await asyncio.wait(tasks)
        assert done == tasks

    run(main())


def test_what_still_waits_at_the_end_does_not_run() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")
            await asyncio.sleep(1)
            ended.append("ran")

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(forever())
        assert not task.done()
        loop.call_later(1, ended.append, "timer")
        generator = numbers()
        await anext(generator)
        await asyncio.sleep(0)

    run(main())
    gc.collect()
    assert "ran" not in ended
    assert "timer" not in ended
    assert "generator" not in ended


def test_garbage_is_collected_at_counted_callbacks() -> None:
    collected: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 3:
            collected.append(loop.callbacks)

    async def main() -> None:
        for _ in range(1000):
            waste = [[number] for number in range(2000)]  # more than any threshold of the collector
            assert waste
            await asyncio.sleep(0.001)

    loop = VirtualTimeLoop(Limits(young_callbacks=500))
    gc.callbacks.append(look)
    try:
        loop.run_until_complete(main())
    finally:
        gc.callbacks.remove(look)
        loop.close()
    assert gc.isenabled()
    inside = [count for count in collected if count > 0]
    assert len(inside) == pytest.approx(2000 / 500, abs=1.0)
    assert all(later - earlier >= 500 for earlier, later in pairwise(inside))


def test_a_loop_runs_once_at_a_time_and_not_after_its_end() -> None:
    loop = VirtualTimeLoop()
    loop.run_until_complete(asyncio.sleep(1))
    loop.run_until_complete(asyncio.sleep(1))
    assert loop.now_s == 2.0
    loop.close()
    late = asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(late)
    late.close()
