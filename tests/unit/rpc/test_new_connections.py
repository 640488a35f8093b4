"""New connections are events: a check follows them, and none is made at rest."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.rpc import connections as rpc_connections
from services.rpc.connections import PERIOD_S, Connections, NewConnections, listening
from services.runtime.clock import SystemClock
from tests.support.waiting import until

PATIENCE_S = 10.0


class Port:
    """A server that accepts, and the clients that connected."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.number: int = self.server.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._accepted: list[socket.socket] = []
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        # Without a reader: a loop has one for a socket, and grpc accepts in a thread of its own.
        while True:
            with contextlib.suppress(BlockingIOError):
                self._accepted.append(self.server.accept()[0])
            await asyncio.sleep(0.005)

    def connect(self) -> None:
        self._clients.append(socket.create_connection(("127.0.0.1", self.number)))

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        for each in (*self._clients, *self._accepted, self.server):
            each.close()


@pytest_asyncio.fixture
async def port() -> AsyncIterator[Port]:
    opened = Port()
    yield opened
    await opened.close()


async def test_the_sockets_that_listen_on_a_port_are_found(port: Port) -> None:
    port.connect()
    await asyncio.sleep(0.05)
    assert listening(port.number) == [port.server.fileno()], "no accepted connection, no client"
    assert listening(1) == []


async def test_a_flood_is_one_call_per_period() -> None:
    # A socket that nobody accepts from: the connections stay pending, which is the most that can happen.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as held:
        number = held.getsockname()[1]
        calls: list[float] = []
        arrivals = NewConnections(lambda: calls.append(asyncio.get_running_loop().time()))
        assert arrivals.watch(number, 0.1)
        await asyncio.sleep(0.3)
        assert calls == [], "called without a connection"
        with contextlib.ExitStack() as clients:
            for _ in range(30):
                clients.enter_context(socket.create_connection(("127.0.0.1", number)))
            await asyncio.sleep(0.55)
            assert 1 <= len(calls) <= 6
            assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(calls))
            arrivals.stop()
            seen = len(calls)
            await asyncio.sleep(0.3)
            assert len(calls) == seen, "called after the stop"


async def test_connections_are_reported_though_they_are_accepted_soon(port: Port) -> None:
    calls = 0

    def arrived() -> None:
        nonlocal calls
        calls += 1

    arrivals = NewConnections(arrived)
    assert arrivals.watch(port.number, 0.05)
    for expected in (1, 2, 3):
        async with asyncio.timeout(PATIENCE_S):
            while calls < expected:
                # Another one each time: one that is accepted before the loop polls goes unnoticed.
                port.connect()
                await asyncio.sleep(0.06)
        await asyncio.sleep(0.15)
    arrivals.stop()


class CountedChecks(Connections):
    checks = 0

    async def _check(self, port: int) -> None:
        self.checks += 1
        await super()._check(port)


async def test_connections_are_checked_when_one_arrives_and_not_at_rest(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_connections, "_CALM_PERIOD_S", 3600.0)
    # Descriptors that earlier tests left in this process are no reason for a second check.
    monkeypatch.setattr(rpc_connections, "_FEW_OTHERS", 100_000)
    connections = CountedChecks(max_connections=100_000_000)
    guarding = asyncio.create_task(connections.guard(SystemClock(), lambda: port.number))
    try:
        await until(lambda: connections.checks == 1)  # the first one, which no connection starts
        await asyncio.sleep(5 * PERIOD_S)
        assert connections.checks == 1, "checked at rest"
        async with asyncio.timeout(PATIENCE_S):
            while connections.checks == 1:
                port.connect()
                await asyncio.sleep(0.06)
        await asyncio.sleep(3 * PERIOD_S)  # the last connections are still checked
        connections.close_soon("ipv4:127.0.0.1:1")
        checked = connections.checks
        async with asyncio.timeout(PATIENCE_S):
            while connections.checks == checked:
                await asyncio.sleep(0.01)
    finally:
        guarding.cancel()
        await asyncio.wait({guarding})


async def test_without_a_listening_socket_the_checks_are_periodic() -> None:
    connections = CountedChecks()
    guarding = asyncio.create_task(connections.guard(SystemClock(), lambda: 1))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while connections.checks < 3:
                await asyncio.sleep(0.01)
    finally:
        guarding.cancel()
        await asyncio.wait({guarding})
