"""The spare engine process: kept only after an unload, used once, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker import engine_protocol as wire
from services.worker.slots.engine_process import ENGINE_MODULE, EngineProcess, EngineTimeouts, Stopped
from services.worker.slots.spare_engine import LEAST_FREE_BYTES, SpareEngine
from tests.integration.worker.test_engine_process import ReceivedEvents, alive, submit
from tests.support.updating import CHECKPOINT
from tests.support.waiting import until

CLOCK = SystemClock()
CONFIG = wire.EngineConfig(socket_path="", model_dir=str(CHECKPOINT), threads=1, kv_memory_bytes=8 << 20)
PATIENT = EngineTimeouts(load_s=120.0, load_silence_s=60.0, silence_s=60.0, shutdown_s=30.0)


def spares() -> list[psutil.Process]:
    """Return the spare processes of this one."""
    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[-2:] == ["--config", "-"]:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@asynccontextmanager
async def launching(spare: SpareEngine) -> AsyncIterator[Callable[[], tuple[EngineProcess, ReceivedEvents]]]:
    supervisor = Supervisor(CLOCK)
    made: list[EngineProcess] = []

    def launch() -> tuple[EngineProcess, ReceivedEvents]:
        received = ReceivedEvents()
        engine = EngineProcess(
            CONFIG,
            events=received.events_of(),
            clock=CLOCK,
            supervisor=supervisor,
            timeouts=PATIENT,
            spare=spare,
        )
        made.append(engine)
        return engine, received

    try:
        yield launch
    finally:
        spare.close()
        for engine in made:
            await engine.stop()
        await supervisor.close()
        assert supervisor.healthy, supervisor.failures
    assert spares() == [], "a spare was left behind"
    assert not any(alive(engine.pid) for engine in made)


async def test_what_was_unloaded_is_followed_by_a_spare_that_the_next_load_uses() -> None:
    async with launching(SpareEngine(ENGINE_MODULE)) as launch:
        first, received = launch()
        await first.start()
        await received.ready()
        await asyncio.sleep(0.2)
        assert spares() == [], "nothing was unloaded here yet"
        await first.stop()
        assert isinstance(await received.ended(), Stopped)
        await until(lambda: len(spares()) == 1)
        (waiting,) = spares()
        second, received = launch()
        await second.start()
        assert second.pid == waiting.pid
        await received.ready()
        second.send(submit())
        await until(lambda: len(received.tokens) == 5)
        await until(lambda: len(spares()) == 2)  # the engine that runs in one, and its successor


async def test_a_spare_that_died_is_replaced_by_a_fresh_process() -> None:
    spare = SpareEngine(ENGINE_MODULE)
    spare.want()
    await spare.prepare()
    (waiting,) = spares()
    os.kill(waiting.pid, signal.SIGKILL)
    await until(lambda: not alive(waiting.pid))
    async with launching(spare) as launch:
        engine, received = launch()
        await engine.start()
        assert engine.pid != waiting.pid
        await received.ready()


async def test_without_its_agent_a_spare_ends() -> None:
    spare = SpareEngine(("-c", "import sys; sys.exit(3 if sys.stdin.buffer.readline() else 0)"))
    spare.want()
    await spare.prepare()
    started = spare.take(msgspec.json.encode(CONFIG))
    assert started is not None
    assert started[0].wait(30) == 3, "it received its configuration"
    started[1].close()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *ENGINE_MODULE, "--config", "-", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_none_is_kept_on_little_memory_or_after_the_end() -> None:
    little = SpareEngine(ENGINE_MODULE, free_bytes=lambda: LEAST_FREE_BYTES - 1)
    little.want()
    await little.prepare()
    assert spares() == []
    ended = SpareEngine(ENGINE_MODULE)
    ended.want()
    ended.close()
    await ended.prepare()
    assert spares() == []


@pytest.mark.parametrize("times", [1, 3])
async def test_there_is_one_at_most(times: int) -> None:
    spare = SpareEngine(ENGINE_MODULE)
    spare.want()
    await asyncio.gather(*(spare.prepare() for _ in range(times)))
    try:
        assert len(spares()) == 1
    finally:
        spare.close()
    assert spares() == []
