"""A loop that is stuck is seen from outside; a process that stood still is not blamed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.runtime.clock import SystemClock
from services.runtime.process.health import Check, Health
from services.runtime.telemetry.metrics import Metrics
from services.runtime.telemetry.process_metrics import EXIT_STUCK, LATE_S, TICK_S, LoopWatch, quiet_for
from tests.support.clocks import HandClock


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


# A process whose loop turns, and which says so: it is ended when its loop is stuck for two seconds.
WATCHED = """
import asyncio, sys
from services.runtime.clock import SystemClock
from services.runtime.telemetry.process_metrics import LoopWatch
from services.runtime.telemetry.metrics import Metrics

async def main():
    watch = LoopWatch(Metrics(), SystemClock(), stall_s=1.2, fatal_s=2.0)
    task = asyncio.create_task(watch.run())
    watch.start()
    while True:
        await asyncio.sleep(0.05)
        sys.stdout.write(".")
        sys.stdout.flush()

asyncio.run(main())
"""


def test_time_in_which_nothing_ran_does_not_count() -> None:
    quiet_s = quiet_for(1.0, 0.1, beaten=False)
    assert quiet_s == pytest.approx(1.1)
    assert quiet_for(quiet_s, 8 * 3600.0, beaten=False) < 2.0, "a laptop that slept"
    assert quiet_for(59.0, 0.1, beaten=True) == 0.0


def test_a_process_that_stood_still_goes_on() -> None:
    """Stopped for longer than a stuck loop is given."""
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(4) == b"....", process.communicate()
        os.kill(process.pid, signal.SIGSTOP)
        stopped = psutil.Process(process.pid)
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        time.sleep(3.0)  # what is shown is that this time does not count
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read(30) == b"." * 30
        assert process.poll() is None
    finally:
        process.kill()
        _, errors = process.communicate()
    assert b"loop.stuck" not in errors


class LateClock(HandClock):
    """Its sleeps last longer by these lags; after them, a sleep does not end."""

    def __init__(self, *lags_s: float) -> None:
        super().__init__()
        self.lags_s = list(lags_s)

    async def sleep(self, seconds: float) -> None:
        if not self.lags_s:
            await asyncio.Future[None]()
        await super().sleep(seconds + self.lags_s.pop(0))


async def test_a_loop_that_was_late_once_is_fit_for_work() -> None:
    clock = LateClock(LATE_S + 0.1, 0.0, 0.0, LATE_S + 0.1, 0.0)
    watch = LoopWatch(Metrics(), clock)
    task = asyncio.create_task(watch.run())
    try:
        for _ in range(2 * len(clock.lags_s)):
            await asyncio.sleep(0)
            assert watch.problem() == ""
        assert not clock.lags_s
    finally:
        task.cancel()


async def test_a_loop_that_is_late_time_and_again_is_not_until_it_is_on_time() -> None:
    watch = LoopWatch(Metrics(), SystemClock())
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.01)
        assert watch.problem() == ""
        while not watch.problem():
            time.sleep(TICK_S + LATE_S + 0.1)
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
