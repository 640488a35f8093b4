"""A gateway without requests has no periodic work."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.gateway.idempotency.records import KeyedRecords
from services.gateway.service_types import RequestCapacity
from services.gateway.text.pool import TextProcesses
from services.ports.idempotency import RecordKey
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.text_versions import write_version
from tests.support.waiting import until
from tests.unit.gateway.idempotency.test_ownership import PORTS


class CountingClock(SystemClock):
    def __init__(self) -> None:
        self.sleeps = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds)


class Sink:
    """Ignores every event."""

    def __getattr__(self, name: str) -> Any:
        return lambda *event: None


def crash(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this request cannot run")


async def settled(clock: CountingClock) -> int:
    """Return the number of sleeps once it stays the same."""
    async with asyncio.timeout(10.0):
        while True:
            before = clock.sleeps
            await asyncio.sleep(0.3)
            if clock.sleeps == before:
                return before


async def test_idempotency_loops_sleep_without_runs() -> None:
    clock = CountingClock()
    supervisor = Supervisor(clock)
    runs = KeyedRecords(replace(PORTS, clock=clock), supervisor, RequestCapacity(4, 4), crash)
    flushing = supervisor.spawn("flush", runs.flush_forever())
    await asyncio.sleep(0.25)
    before = clock.sleeps
    assert before == 0
    runs.attach(
        RecordKey("acme", "1" * 32), "f", Sink(), crash, timeout_s=5.0, client_window=None, delivered=None
    )
    await until(lambda: clock.sleeps > before)
    await until(lambda: not runs.busy)
    await asyncio.sleep(0.25)
    assert clock.sleeps == 1, "the interval of the only run is the last one"
    assert not flushing.done()
    await supervisor.close()


async def test_text_processes_are_not_checked_while_idle(tmp_path: Path) -> None:
    clock = CountingClock()
    supervisor = Supervisor(clock)
    processes = TextProcesses(clock, supervisor, Metrics())
    checking = supervisor.spawn("text processes", processes.run())
    folder = write_version(tmp_path / "version")
    model = await processes.load("sha256:one", lambda: nullcontext(folder))
    before = await settled(clock)
    tokens = await processes.read(model, "acme", "a prompt", size_bytes=8)
    assert tokens.count
    await until(lambda: clock.sleeps > before)
    await settled(clock)
    assert not checking.done()
    await supervisor.close()
