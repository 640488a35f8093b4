"""Strangers flood ports with TLS before any handshake ends; callers and Prometheus go on beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fairway.cli.authority import Authority
from fairway.tls import ssl_context
from services.rpc.connections import MAX_UNAUTHENTICATED
from services.runtime.telemetry.server import MAX_CONNECTIONS
from tests.support.certificates import authority_in, identity_of
from tests.support.rpc_process import Canary, RpcProcess
from tests.support.waiting import until

CONNECTIONS = 4000
OWN_DESCRIPTORS = 128
SOURCES = 200
SCRAPE_S = 10.0
WORST_S = 30.0
GROWTH_MIB = 96.0
MAX_LOG_BYTES = 2_000_000


def hello() -> bytes:
    """Return the first message of a handshake, as OpenSSL writes it."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="worker.fairway.internal").do_handshake()
    return sent.read()


SENT: dict[str, Callable[[], bytes]] = {
    "nothing": bytes,
    "half a hello": lambda: hello()[:60],
    "a hello": hello,
    "garbage": lambda: os.urandom(20_000),
    "plain HTTP/2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return authority_in(tmp_path / "certs")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[RpcProcess]:
    with RpcProcess.started(tmp_path, authority) as running:
        yield running


@dataclass
class Scrapes:
    """A Prometheus that scrapes on a new connection each time."""

    port: int
    context: ssl.SSLContext
    took_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.asynccontextmanager
    async def beside(cls, port: int, authority: Authority) -> AsyncIterator[Scrapes]:
        identity = identity_of(authority, "monitor")
        scrapes = cls(port, ssl_context(identity, server=False, verify_peer=True))
        running = asyncio.create_task(scrapes._run())
        try:
            yield scrapes
            assert not running.done(), running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(SCRAPE_S):
                    answer = await self._scrape()
            except OSError as error:  # A newer connection displaced it, or its SYN was dropped.
                self.failures.append(repr(error))
            else:
                if answer:
                    assert answer.startswith(b"HTTP/1.1 200 ")
                    self.took_s.append(time.monotonic() - began_s)
                else:
                    self.failures.append("closed before its request arrived")
            await asyncio.sleep(0.1)

    async def _scrape(self) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context)
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            return await reader.read()
        finally:
            writer.transport.abort()

    async def answered(self, count: int) -> None:
        """Return after ``count`` more scrapes. Raises AssertionError with the failures."""
        wanted = len(self.took_s) + count
        try:
            await until(lambda: len(self.took_s) >= wanted, WORST_S)
        except TimeoutError:
            raise AssertionError(self.failures) from None


@contextlib.asynccontextmanager
async def flooded(ports: tuple[int, int], data: bytes) -> AsyncIterator[None]:
    """Connections of many sources that send ``data`` and stay open for as long as the server lets them."""
    opened: list[asyncio.StreamWriter] = []
    try:
        for number in range(CONNECTIONS):
            source = f"127.0.1.{number % SOURCES + 1}"
            # It is refused, ended at once, or not accepted soon: TCP would try again after a second.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(0.2):
                    opening = asyncio.open_connection("127.0.0.1", ports[number % 2], local_addr=(source, 0))
                    opened.append((await opening)[1])
                opened[-1].write(data)
        yield
    finally:
        for writer in opened:
            writer.transport.abort()


@pytest.mark.parametrize("shape", SENT)
async def test_connections_without_a_handshake_keep_nobody_out(
    server: RpcProcess, authority: Authority, shape: str
) -> None:
    async with (
        Canary.beside(server.address, server.credentials) as canary,
        Scrapes.beside(server.metrics_port, authority) as scrapes,
    ):
        await scrapes.answered(1)
        before_mib = server.rss_mib()
        async with flooded((server.port, server.metrics_port), SENT[shape]()):
            await scrapes.answered(3)
            bound = MAX_UNAUTHENTICATED + MAX_CONNECTIONS + OWN_DESCRIPTORS
            await until(lambda: server.process.num_fds() <= bound, timeout_s=60)
            await canary.judge(WORST_S)
    await until(lambda: server.rss_mib() - before_mib <= GROWTH_MIB, timeout_s=60)
    assert server.log.stat().st_size < MAX_LOG_BYTES
