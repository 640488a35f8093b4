"""Callers without a credential flood a server; probes on new connections and a known caller go on beside it.

The frames are written by hand: no client library sends them. The bounds on time have room for a machine that
runs other tests meanwhile; what they guard against takes many times as long, or never ends.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import inference_pb2, inference_pb2_grpc
from services.rpc.connections import (
    MAX_IDLE_OF_CALLER,
    MAX_OF_SOURCE,
    MAX_REFUSALS_PER_S,
    MAX_UNAUTHENTICATED,
    PERIOD_S,
)
from services.rpc.interceptors.messages import MAX_WAITING_UNAUTHENTICATED
from tests.support.http2 import (
    CHECK,
    DATA,
    PING,
    REFLECTION,
    WATCH,
    Attacker,
    call,
    calls,
    close_all,
    frame,
    message,
)
from tests.support.rpc_process import KEY, Canary, RpcProcess
from tests.support.waiting import until

COMPLETE = "/fairway.v1.InferenceService/Complete"
COUNT = "/fairway.v1.InferenceService/CountTokens"
LIST = "/fairway.v1.InferenceService/ListModels"
UNKNOWN = "/no.such.Service/Method"
LARGEST = 16 * 1024 * 1024 - 64
PINGS = frame(PING, 0, 0, bytes(8)) * 200_000
WORST_S = 30.0
GROWTH_MIB = 64.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RpcProcess]:
    with RpcProcess.started(tmp_path) as running:
        yield running


@asynccontextmanager
async def attacked(
    server: RpcProcess, *, connections: int = 4, source: Callable[[int], str] = lambda _: "127.0.0.1"
) -> AsyncIterator[list[Attacker]]:
    """Connections that read and answer pings. What others observed meanwhile is judged at the end."""
    attackers: list[Attacker] = []
    async with Canary.beside(server.address) as canary:
        await asyncio.sleep(0.3)
        before_mib = server.rss_mib()
        for number in range(connections):
            attackers.append(await Attacker.connect(server.port, source=source(number)))
        reading = [asyncio.create_task(attacker.answer_pings()) for attacker in attackers]
        try:
            yield attackers
            # The attackers are still connected: others are answered beside the attack, not after it.
            await canary.answered(WORST_S)
            await asyncio.sleep(1.0)
        finally:
            close_all(attackers)
            await asyncio.gather(*reading)
        await canary.judge(WORST_S)
        await until(lambda: server.rss_mib() - before_mib <= GROWTH_MIB, timeout_s=60)


async def test_half_open_checks(server: RpcProcess) -> None:
    async with attacked(server) as attackers:
        await asyncio.gather(*(attacker.send(calls(CHECK, 4000)) for attacker in attackers))


@pytest.mark.parametrize("path", [COMPLETE, UNKNOWN])
async def test_half_open_calls_of_methods_that_answer_no_stranger(server: RpcProcess, path: str) -> None:
    async with attacked(server) as attackers:
        await asyncio.gather(*(attacker.send(calls(path, 4000)) for attacker in attackers))


@pytest.mark.parametrize("path", [b"/\xff\xfe/x", b"/fairway.v1.InferenceService/\xc3\x28", b"\x80"])
async def test_a_method_name_that_is_no_text_ends_its_call_only(server: RpcProcess, path: bytes) -> None:
    async with attacked(server, connections=1) as (attacker,):
        await attacker.send(call(1, path) + message(1, b""), calls(CHECK, 1, first=3))
    for line in server.log.read_text().splitlines():
        assert line.startswith("{")


@pytest.mark.parametrize("reads", [True, False])
async def test_pings_take_little_time_of_the_processor(server: RpcProcess, reads: bool) -> None:
    async with attacked(server, connections=2 if reads else 0) as attackers:
        before_s = server.cpu_s()
        silent = [await Attacker.connect(server.port) for _ in range(0 if reads else 2)]
        sending = [asyncio.create_task(attacker.send(PINGS)) for attacker in attackers + silent]
        await asyncio.sleep(3.0)
        assert server.cpu_s() - before_s < 2.0
        close_all(silent)
        await asyncio.wait(sending)


@pytest.mark.parametrize("path", [WATCH, REFLECTION])
async def test_streams_that_stay_open(server: RpcProcess, path: str) -> None:
    async with attacked(server, connections=16) as attackers:
        for attacker in attackers:
            opened = (call(stream, path) + message(stream, b"", end=False) for stream in range(1, 513, 2))
            await attacker.send(b"".join(opened))


async def test_watchers_that_read_nothing_do_not_hold_up_the_health_status(server: RpcProcess) -> None:
    """A window of 0: nothing can be written to these streams, and the role's own change of status goes on."""
    closed = [await Attacker.connect(server.port, initial_window=0) for _ in range(2)]
    for attacker in closed:
        await attacker.send(
            b"".join(call(stream, WATCH) + message(stream, b"") for stream in range(1, 33, 2))
        )
    await asyncio.sleep(0.5)
    async with attacked(server, connections=1):
        await asyncio.sleep(0.5)
    close_all(closed)


async def test_a_message_without_a_credential_is_not_read(server: RpcProcess) -> None:
    """16 MiB of empty submessages: decoding them takes a second and a gigabyte."""
    async with attacked(server, connections=0), server.channel() as channel:
        for method in (COUNT, "/fairway.v1.InferenceService/Infer"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(bomb())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert server.peak_mib() < server.rss_mib() + GROWTH_MIB


async def test_large_messages_for_the_health_service(server: RpcProcess) -> None:
    """Each is read but for its last byte. Few are read at a time, so that others' end."""
    data = struct.pack(">BI", 0, LARGEST) + bytes(LARGEST - 1)
    before_mib = server.rss_mib()
    async with attacked(server, connections=24) as attackers:
        sending = []
        for attacker in attackers:
            await attacker.send(call(1, CHECK))
            sending.append(asyncio.create_task(attacker.send_body(1, data)))
        await asyncio.wait(sending, timeout=5)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    assert server.peak_mib() - before_mib < (MAX_WAITING_UNAUTHENTICATED + 4) * 16


async def test_a_tenants_message_of_empty_submessages_is_counted_before_it_is_decoded(
    server: RpcProcess,
) -> None:
    before_mib = server.rss_mib()
    async with Canary.beside(server.address) as canary, server.channel() as channel:
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(COUNT)(bomb(), metadata=KEY)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "more than" in str(caught.value.details())
        await canary.judge(WORST_S)
    assert (
        server.rss_mib() - before_mib < 3 * GROWTH_MIB
    )  # the message itself is 16 MiB, and read as it comes


async def test_malformed_messages_have_one_text_and_leave_no_traceback(server: RpcProcess) -> None:
    began_s = time.monotonic()
    async with server.channel() as channel:
        texts = set()
        for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x7f", b"\x0b", b"\x0a\x05\xff\xfe", b"\xff" * 50_000):
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(COMPLETE)(raw, metadata=KEY)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                texts.add(caught.value.details())
        assert texts == {"the request is not a valid message of this method"}
        stream = channel.stream_stream("/fairway.v1.InferenceService/Session")(iter([b"\xff"]), metadata=KEY)
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    lines = server.log.read_text().splitlines()
    assert all(line.startswith("{") for line in lines)
    # 101 were refused, and twenty lines a second are written about it. The others are those of the start.
    assert len(lines) < 30 + 20 * (time.monotonic() - began_s)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "nonsense", ""])
async def test_a_message_that_claims_to_be_compressed_is_refused(server: RpcProcess, encoding: str) -> None:
    metadata = [("authorization", "Bearer tenant-key"), *([("grpc-encoding", encoding)] if encoding else [])]
    async with attacked(server, connections=1) as (attacker,):
        head = call(1, COMPLETE, *metadata)
        await attacker.send(head, message(1, b"\x1f\x8b" + b"\0" * 100, compressed=1))
    for line in server.log.read_text().splitlines():
        assert line.startswith("{")


async def test_idle_connections_of_one_source_and_of_many(server: RpcProcess) -> None:
    """The surplus is shut, the oldest first; callers on other connections of the same source go on."""
    idle: list[asyncio.StreamWriter] = []
    async with Canary.beside(server.address) as canary:
        for number in range(6000):
            source = "127.0.0.1" if number % 2 else f"127.0.1.{number % 200 + 1}"
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(source, 0))
            idle.append(writer)
            assert number % 500 or server.process.num_fds() < 5500
        async with asyncio.timeout(20):
            while server.process.num_fds() > MAX_UNAUTHENTICATED + MAX_OF_SOURCE:
                await asyncio.sleep(PERIOD_S)
        await canary.judge(WORST_S)
    for writer in idle:
        writer.transport.abort()


async def test_a_tenant_that_calls_once_on_each_of_many_connections(server: RpcProcess) -> None:
    """Its idle connections beyond a few are a stranger's; from many sources too."""
    attackers: list[Attacker] = []
    try:
        for number in range(2000):
            attacker = await Attacker.connect(server.port, source=f"127.0.2.{number % 200 + 1}")
            attackers.append(attacker)
            await attacker.send(call(1, LIST, *KEY) + message(1, b""))
        async with asyncio.timeout(80):
            while server.process.num_fds() > MAX_UNAUTHENTICATED + MAX_IDLE_OF_CALLER + MAX_OF_SOURCE:
                await asyncio.sleep(PERIOD_S)
    finally:
        close_all(attackers)


@pytest.mark.parametrize("path", [COMPLETE, UNKNOWN])
async def test_who_is_refused_again_and_again_is_disconnected(server: RpcProcess, path: str) -> None:
    attacker = await Attacker.connect(server.port)
    await attacker.send(calls(path, 3 * MAX_REFUSALS_PER_S))
    async with asyncio.timeout(60):
        await attacker.answer_pings()  # until the server closes the connection
    attacker.close()


async def test_a_half_open_call_ends_and_a_slow_message_with_it(server: RpcProcess) -> None:
    """Also of a caller with a key: the deadline of a message is not the deadline of the call."""
    key = (("authorization", "Bearer tenant-key"),)
    async with asyncio.timeout(25), server.channel() as channel:
        pending = [
            channel.stream_unary(CHECK)(_never()),
            channel.stream_unary(COMPLETE)(_never(), metadata=key),
        ]
        for each in pending:
            assert await each.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no request message came within" in str(await each.details())
    slow = await Attacker.connect(server.port)
    await slow.send(call(1, COMPLETE, *key), frame(DATA, 0, 1, struct.pack(">BI", 0, 1000) + b"x"))
    slow.close()


async def test_unread_answers_end_their_connection(server: RpcProcess) -> None:
    """With a window of 0 an answer can never be written, and each holds a call."""
    attacker = await Attacker.connect(server.port, initial_window=0)
    await attacker.send(b"".join(call(stream, CHECK) + message(stream, b"") for stream in range(1, 41, 2)))
    async with asyncio.timeout(25):
        await attacker.answer_pings()
    attacker.close()


async def test_health_lists_and_what_is_not_there_is_unimplemented(server: RpcProcess) -> None:
    async with server.channel() as channel:
        answer = await channel.unary_unary("/grpc.health.v1.Health/List")(b"")
        assert b"fairway.v1.InferenceService" in answer
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(inference_pb2.EmbedRequest(model="m", inputs=["x"]), metadata=KEY)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(UNKNOWN)(b"", metadata=KEY)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def bomb() -> bytes:
    """Return a chat of eight million empty messages."""
    messages = b"\x0a\x00" * (LARGEST // 2 - 8)
    return b"\x1a" + _varint(len(messages)) + messages


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def _varint(value: int) -> bytes:
    found = b""
    while value >= 128:
        found, value = found + bytes((value & 127 | 128,)), value >> 7
    return found + bytes((value,))
