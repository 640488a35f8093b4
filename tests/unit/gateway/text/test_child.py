"""A text process whose start is cancelled: nothing is left of it, and nothing waits for it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import uvloop

from services.gateway.text.child import Cause, ProcessEnded, TextProcess
from services.gateway.text.pool import TextProcesses
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.waiting import until

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


@LOOPS
@pytest.mark.parametrize("turns", range(5))
def test_a_cancelled_connection_closes_its_descriptor_once(new_loop: NewLoop, turns: int) -> None:
    async def cancel() -> None:
        process = TextProcess(SystemClock(), nice=False)
        process.start()
        ending = asyncio.create_task(process.wait())
        connecting = asyncio.create_task(process.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait({connecting})
        process.kill(Cause.STOPPED)
        assert await ending is Cause.STOPPED
        await asyncio.sleep(0.01)  # transports close in a later turn of the loop

    async def run() -> None:
        await cancel()
        before = descriptors()
        await cancel()
        assert descriptors() <= before
        pipes = [descriptor for _ in range(8) for descriptor in os.pipe()]  # they take the numbers
        gc.collect()
        for descriptor in pipes:
            os.close(descriptor)  # raises OSError where something else closed it

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@LOOPS
def test_a_process_that_ends_before_it_is_connected_takes_no_order(new_loop: NewLoop) -> None:
    async def run() -> None:
        process = TextProcess(SystemClock(), nice=False)
        process.start()
        process.kill(Cause.HUNG)
        with pytest.raises(ProcessEnded):
            await process.connect()
        assert await process.wait() is Cause.HUNG

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@LOOPS
@pytest.mark.parametrize("turns", [1, 3, 5, 50])
def test_a_load_that_is_cancelled_waits_for_no_process(new_loop: NewLoop, turns: int, tmp_path: Path) -> None:
    """The process is killed and is reaped later: to wait for its end here would block the loop."""

    async def run() -> None:
        before = set(psutil.Process().children())  # servers of other tests
        supervisor = Supervisor(SystemClock())
        processes = TextProcesses(SystemClock(), supervisor, Metrics())
        loading = asyncio.create_task(processes.load("sha256:" + "0" * 64, lambda: nullcontext(tmp_path)))
        for _ in range(turns):
            await asyncio.sleep(0)
        (child,) = set(psutil.Process().children()) - before
        loading.cancel()
        while not loading.done():
            await asyncio.sleep(0)
        assert loading.cancelled()
        assert child.is_running(), "it was waited for"
        await until(lambda: not child.is_running())
        assert supervisor.healthy, supervisor.failures
        await supervisor.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@LOOPS
@pytest.mark.parametrize("turns", range(8))
def test_a_shutdown_leaves_no_process(new_loop: NewLoop, turns: int, tmp_path: Path) -> None:
    async def run() -> None:
        before = set(psutil.Process().children())  # servers of other tests
        supervisor = Supervisor(SystemClock())
        processes = TextProcesses(SystemClock(), supervisor, Metrics())
        supervisor.spawn("load", processes.load("sha256:" + "0" * 64, lambda: nullcontext(tmp_path)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await supervisor.close()
        assert set(psutil.Process().children()) == before

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def descriptors() -> int:
    return int(psutil.Process().num_fds())
