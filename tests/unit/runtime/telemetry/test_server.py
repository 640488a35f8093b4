"""What machines that watch are answered, and what strangers are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from services.core.errors import FailedPrecondition
from services.runtime.telemetry.metrics import Metrics
from services.runtime.telemetry.server import (
    HEAD_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_PER_SOURCE,
    TIMEOUT_S,
    TelemetryServer,
)

BIG = 60_000  # label values: their text is more than the sockets between hold


class Rig:
    def __init__(self, timeout_s: float = TIMEOUT_S, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        self.problems: tuple[str, ...] = ()
        self.notices: tuple[str, ...] = ()
        self.metrics = Metrics()
        self.metrics.level("fairway_test_level", "Level", lambda: 3.0)
        self.server = TelemetryServer(
            self.metrics.registry,
            "127.0.0.1:0",
            problems=lambda: self.problems,
            notices=lambda: self.notices,
            timeout_s=timeout_s,
            head_timeout_s=head_timeout_s,
        )

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


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    await rig.server.start()
    yield rig
    await rig.server.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as found:
        yield found


@pytest.fixture
async def hasty() -> AsyncIterator[Rig]:
    """One whose clients have a second for each part."""
    async with running(Rig(timeout_s=1.0, head_timeout_s=1.0)) as found:
        yield found


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


async def test_what_keeps_it_from_nothing_is_listed_below(rig: Rig) -> None:
    rig.notices = ("store: another one",)
    assert await rig.get("/readyz") == (200, "ready\nstore: another one\n")
    rig.problems = ("engines: silent",)
    assert await rig.get("/readyz") == (503, "engines: silent\nstore: another one\n")


async def test_other_methods_are_refused(rig: Rig) -> None:
    assert (await rig.say(b"POST /metrics HTTP/1.1\r\nhost: x\r\n\r\n")).startswith("HTTP/1.1 405")


@pytest.mark.parametrize(
    ("head", "status", "named"),
    [
        (b"GET /healthz HTTP/1.0", 200, "ok"),
        (b"GET /healthz HTTP/1.0\r\nHost: x:80", 200, "ok"),
        (b"GET /healthz HTTP/1.1", 400, "0 Host headers"),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\nHost: x", 400, "2 Host headers"),
        (b"GET /healthz HTTP/1.1\r\nhost: x/y", 400, "no host"),
        (b"GET /healthz HTTP/1.2\r\nhost: x", 400, "HTTP/1.2"),
        (b"GET /healthz HTTP/9.9\r\nhost: x", 400, "HTTP/9.9"),
        (b"GET /healthz HTTP/2.0\r\nhost: x", 400, "HTTP/2.0"),
        (b"GET /healthz HTTP/\xb2\r\nhost: x", 400, "no version"),
        (b"GET /healthz RTSP/1.0\r\nhost: x", 400, "no HTTP version"),
        (b"GET /healthz x HTTP/1.1\r\nhost: x", 400, "no HTTP version"),
        (b"GET /healthz\r\nhost: x", 400, "no HTTP version"),
        (b"GET %2Fhealthz HTTP/1.1\r\nhost: x", 404, "/healthz"),
    ],
)
async def test_the_head_of_a_request_is_one_of_http_1(rig: Rig, head: bytes, status: int, named: str) -> None:
    answer = await rig.say(head + b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert named in answer


async def test_a_head_without_end_gets_no_answer(rig: Rig) -> None:
    assert await rig.say(b"GET / HTTP/1.1\r\nx: " + b"a" * (2 * MAX_HEAD_BYTES)) == ""
    assert (await rig.get("/healthz"))[0] == 200


async def test_what_a_slow_client_does_not_take_is_not_kept_for_it(hasty: Rig) -> None:
    hasty.metrics.gauge(
        "fairway_test_big",
        "Big",
        lambda: [((f"{number:0200d}",), 1.0) for number in range(BIG)],
        ("name",),
    )
    with socket.create_connection(("127.0.0.1", hasty.server.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            for wanted in (1, 0):
                while hasty.server.connections != wanted:
                    await asyncio.sleep(0.01)
        got = await asyncio.to_thread(_all_of, slow)
    assert got < BIG * 200, "the rest was sent after its time"
    assert (await hasty.get("/healthz"))[0] == 200


async def test_a_new_connection_takes_the_place_of_the_oldest_silent_one() -> None:
    async with running(Rig(head_timeout_s=60.0)) as rig:
        address = "127.0.0.1", rig.server.port
        with contextlib.ExitStack() as silent:
            for number in range(2 * MAX_CONNECTIONS):
                source = f"127.0.0.{2 + number // MAX_PER_SOURCE}"
                silent.enter_context(socket.create_connection(address, 30, (source, 0)))
                await asyncio.sleep(0)
            assert (await rig.get("/healthz"))[0] == 200
            assert MAX_PER_SOURCE <= rig.server.connections <= MAX_CONNECTIONS


async def test_a_source_has_a_share_of_the_connections(rig: Rig) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(80):
            silent.enter_context(socket.create_connection(("127.0.0.1", rig.server.port)))
        assert (await rig.get("/healthz"))[0] == 200
        assert rig.server.connections <= MAX_PER_SOURCE


async def test_silent_connections_end(hasty: Rig) -> None:
    with socket.create_connection(("127.0.0.1", hasty.server.port)) as silent:
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(_all_of, silent) == 0
            while hasty.server.connections:
                await asyncio.sleep(0.01)


async def test_scrapes_that_wait_share_a_text(rig: Rig) -> None:
    made = []

    def read() -> list[tuple[tuple[str, ...], float]]:
        made.append(1)
        time.sleep(0.05)
        return [((), float(len(made)))]

    rig.metrics.gauge("fairway_test_made", "Made", read)
    answers = await asyncio.gather(*[rig.get("/metrics") for _ in range(MAX_PER_SOURCE)])
    assert {status for status, _ in answers} == {200}
    assert len(made) <= MAX_PER_SOURCE // 2
    before = len(made)
    assert f"fairway_test_made {before + 1}.0" in (await rig.get("/metrics"))[1], "an old text was sent"


@pytest.mark.parametrize("version", ["x", "9" * 5000, "1.0.1;escaping=\x01"])
async def test_parameters_of_the_accept_header_are_not_read(rig: Rig, version: str) -> None:
    accept = f"accept: application/openmetrics-text; version={version}\r\n"
    answer = await rig.say(f"GET /metrics HTTP/1.1\r\nhost: x\r\n{accept}\r\n".encode())
    assert answer.startswith("HTTP/1.1 200 OK\r\ncontent-type: application/openmetrics-text; version=1.0.0;")


def _all_of(connection: socket.socket) -> int:
    """Return how many bytes come before the connection ends, in whatever way."""
    got = 0
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            got += len(piece)
    return got


async def test_a_port_that_is_taken_is_named(rig: Rig) -> None:
    other = TelemetryServer(rig.metrics.registry, f"127.0.0.1:{rig.server.port}", problems=tuple)
    with pytest.raises(FailedPrecondition) as caught:
        await other.start()
    assert "FAIRWAY_METRICS_LISTEN" in caught.value.message
