"""The proxy passes, cuts, holds back and delays, by the name of who connects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import CLIENT, HOST, NAME_VARIABLE, Proxy, Rule, rule_for
from tests.support.local_servers import free_port

TIMEOUT_S = 20.0
ECHO = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10);"
    "s.sendall(b'x\\n'); print(s.makefile().readline().strip())"
)


class Bench:
    def __init__(self, proxy: Proxy, port: int) -> None:
        self.proxy = proxy
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)

    async def served(self) -> bool:
        """Whether a new connection carries anything."""
        try:
            reader, writer = await self.connect()
            try:
                return await self.echo(reader, writer, b"new") == b"new"
            finally:
                writer.close()
        except ConnectionResetError:
            return False

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> bytes:
        writer.write(text + b"\n")
        async with asyncio.timeout(TIMEOUT_S):
            return (await reader.readline()).strip()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A server that echoes lines, behind a proxy that calls it "server"."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    port = free_port()
    proxy = Proxy()
    listener = await proxy.listen("server", port, server.sockets[0].getsockname()[1])
    try:
        yield Bench(proxy, port)
    finally:
        proxy.apply([Rule("*", "*", "cut")])
        for each in (listener, server):
            each.close()
        async with asyncio.timeout(TIMEOUT_S):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)


async def test_bytes_pass_both_ways_and_an_end_too(bench: Bench) -> None:
    reader, writer = await bench.connect()
    assert await bench.echo(reader, writer, b"hello") == b"hello"
    writer.write_eof()
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader.read() == b""
    writer.close()


async def test_a_cut_resets_what_is_open_and_what_comes(bench: Bench) -> None:
    reader, writer = await bench.connect()
    await bench.echo(reader, writer, b"hello")
    assert bench.proxy.apply([Rule(CLIENT, "server", "cut")]) == [(CLIENT, "server")]
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readexactly(1)
    writer.close()
    assert not await bench.served()
    bench.proxy.apply([])
    assert await bench.served()


async def test_a_hole_holds_back_and_tells_nobody(bench: Bench) -> None:
    reader, writer = await bench.connect()
    await bench.echo(reader, writer, b"hello")
    bench.proxy.apply([Rule(CLIENT, "*", "hole")])
    writer.write(b"late\n")
    fresh_reader, fresh_writer = await bench.connect()
    fresh_writer.write(b"fresh\n")
    lines = [asyncio.create_task(each.readline()) for each in (reader, fresh_reader)]
    done, _ = await asyncio.wait(lines, timeout=0.3)
    assert not done
    bench.proxy.apply([])
    async with asyncio.timeout(TIMEOUT_S):
        assert await asyncio.gather(*lines) == [b"late\n", b"fresh\n"]
    for each in (writer, fresh_writer):
        each.close()


async def test_a_delay_delays(bench: Bench) -> None:
    bench.proxy.apply([Rule("*", "*", "delay", 0.2)])
    reader, writer = await bench.connect()
    began_s = time.monotonic()
    assert await bench.echo(reader, writer, b"hello") == b"hello"
    assert time.monotonic() - began_s >= 0.4
    writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="names come from the kernel's tables")
async def test_rules_are_for_the_process_that_connects(bench: Bench) -> None:
    async def run(name: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ECHO, str(bench.port),
            env={**os.environ, NAME_VARIABLE: name},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        return out.decode().strip()

    bench.proxy.apply([Rule("worker-*", "server", "cut")])
    assert await run("gateway") == "x"
    assert await run("worker-1") == ""


def test_the_first_rule_that_fits_counts() -> None:
    rules = [Rule("gateway*", "etcd", "cut"), Rule("*", "etcd", "hole")]
    assert rule_for(rules, "gateway-1", "etcd").mode == "cut"
    assert rule_for(rules, "worker-0", "etcd").mode == "hole"
    assert rule_for(rules, "worker-0", "redis").mode == "pass"
