"""A loop that is stuck is seen from outside; a process that stood still is not blamed."""

from __future__ import annotations

import asyncio
import threading
import time

from services.runtime.clock import SystemClock
from services.runtime.health import Check, Health
from services.runtime.loop_watch import EXIT_STUCK, LoopWatch
from services.runtime.metrics import Metrics


async def test_a_stuck_loop_ends_the_process() -> None:
    ended: list[int] = []
    happened = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        happened.set()

    watch = LoopWatch(Metrics(), SystemClock(), stall_s=0.2, fatal_s=0.6, end=end)
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.3)
        watch.start()
        assert not ended
        deadline_s = time.monotonic() + 30
        while not happened.is_set() and time.monotonic() < deadline_s:
            time.sleep(0.01)  # the loop is stuck here
        assert ended == [EXIT_STUCK]
    finally:
        watch.stop()
        task.cancel()


async def test_a_late_loop_is_not_fit_for_work_until_it_is_on_time() -> None:
    watch = LoopWatch(Metrics(), SystemClock())
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.01)
        assert watch.problem() == ""
        time.sleep(1.3)
        while not watch.problem():
            await asyncio.sleep(0.01)
        while watch.problem():
            await asyncio.sleep(0.01)
    finally:
        task.cancel()


def test_health_is_closed_until_opened_and_says_what_objects() -> None:
    health = Health(Metrics())
    wrong = [""]
    health.add([Check("engines", lambda: wrong[0]), Check("fine", lambda: "")])
    assert health.problems() == ("starting",)
    health.open()
    assert health.problems() == ()
    wrong[0] = "silent"
    assert health.problems() == ("engines: silent",)
    health.close("shutting down")
    assert health.problems() == ("shutting down",)
