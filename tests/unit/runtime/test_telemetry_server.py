"""What machines that watch are answered, and what strangers are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.core.errors import FailedPrecondition
from services.runtime.metrics import Metrics
from services.runtime.telemetry_server import MAX_HEAD_BYTES, TelemetryServer


class Rig:
    def __init__(self) -> None:
        self.problems: tuple[str, ...] = ()
        self.metrics = Metrics()
        self.metrics.level("fairway_test_level", "Level", lambda: 3.0)
        self.server = TelemetryServer(self.metrics.registry, "127.0.0.1:0", problems=lambda: self.problems)

    async def say(self, text: bytes) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(text)
            return (await reader.read()).decode()
        finally:
            writer.close()

    async def get(self, path: str) -> tuple[int, str]:
        answer = await self.say(f"GET {path} HTTP/1.1\r\nhost: x\r\naccept: */*\r\n\r\n".encode())
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.server.start()
    yield rig
    await rig.server.stop()


async def test_metrics_and_health_are_served(rig: Rig) -> None:
    status, body = await rig.get("/metrics")
    assert status == 200
    assert "fairway_test_level 3.0" in body
    assert await rig.get("/healthz") == (200, "ok\n")
    assert await rig.get("/readyz?verbose") == (200, "ready\n")
    assert (await rig.get("/else"))[0] == 404


async def test_readiness_says_why_not(rig: Rig) -> None:
    rig.problems = ("engines: silent", "event_loop: late")
    assert await rig.get("/readyz") == (503, "engines: silent\nevent_loop: late\n")
    assert (await rig.get("/healthz"))[0] == 200


async def test_other_methods_are_refused(rig: Rig) -> None:
    assert (await rig.say(b"POST /metrics HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 405")


async def test_a_head_without_end_gets_no_answer(rig: Rig) -> None:
    assert await rig.say(b"GET / HTTP/1.1\r\nx: " + b"a" * (2 * MAX_HEAD_BYTES)) == ""
    assert (await rig.get("/healthz"))[0] == 200


async def test_a_port_that_is_taken_is_named(rig: Rig) -> None:
    other = TelemetryServer(rig.metrics.registry, f"127.0.0.1:{rig.server.port}", problems=tuple)
    with pytest.raises(FailedPrecondition) as caught:
        await other.start()
    assert "FAIRWAY_METRICS_LISTEN" in caught.value.message
