"""Strangers flood ports with TLS before any handshake ends; callers and Prometheus go on beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
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


@contextlib.asynccontextmanager
async def scraped(port: int, authority: Authority) -> AsyncIterator[list[float]]:
    """A Prometheus that scrapes on a new connection each time; yields how long each scrape took."""
    context = ssl_context(identity_of(authority, "monitor"), server=False, verify_peer=True)
    took_s: list[float] = []

    async def scrape() -> None:
        while True:
            began_s = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
                async with asyncio.timeout(WORST_S):
                    answer = await reader.read()
            finally:
                writer.transport.abort()
            assert answer.startswith(b"HTTP/1.1 200 ")
            took_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)

    scraping = asyncio.create_task(scrape())
    try:
        yield took_s
        await asyncio.sleep(0.5)
        assert not scraping.done(), scraping.result()
    finally:
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)


@pytest.mark.parametrize("shape", SENT)
async def test_connections_without_a_handshake_keep_nobody_out(
    server: RpcProcess, authority: Authority, shape: str
) -> None:
    data, opened = SENT[shape](), list[asyncio.StreamWriter]()
    async with (
        Canary.beside(server.address, server.credentials) as canary,
        scraped(server.metrics_port, authority) as scrapes,
    ):
        await asyncio.sleep(0.3)
        before_mib = server.rss_mib()
        for number in range(CONNECTIONS):
            source, port = f"127.0.1.{number % SOURCES + 1}", (server.port, server.metrics_port)[number % 2]
            # It is refused, ended at once, or not accepted soon: TCP would try again after a second.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(0.2):
                    _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
                writer.write(data)
                opened.append(writer)
        counted = len(scrapes)
        await asyncio.sleep(1.0)
        await until(lambda: len(scrapes) > counted, timeout_s=WORST_S)
        bound = MAX_UNAUTHENTICATED + MAX_CONNECTIONS + OWN_DESCRIPTORS
        await until(lambda: server.process.num_fds() <= bound, timeout_s=60)
        await canary.judge(WORST_S)
    for writer in opened:
        writer.transport.abort()
    await until(lambda: server.rss_mib() - before_mib <= GROWTH_MIB, timeout_s=60)
    assert max(scrapes) < WORST_S
    assert server.log.stat().st_size < MAX_LOG_BYTES
