"""Sessions of the gRPC face over a real socket: many generations on one stream, each ended once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from fairway.v1 import inference_pb2 as pb
from services.core import errors
from services.core.generation import Principal, TokenLogprobs
from services.core.records import KeyRole
from services.gateway.faces.grpc.session import MAX_MESSAGE_TOKENS, MAX_UNREAD, MuxedSession
from services.rpc.status import from_rpc_error
from tests.support.grpc_gateway import (
    AUTH,
    Gateway,
    generation,
    no_read_ahead,
    received,
    running_gateway,
)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway() as found:
        yield found


async def requests(
    messages: Sequence[pb.SessionRequest], hold: asyncio.Event
) -> AsyncIterator[pb.SessionRequest]:
    for message in messages:
        yield message
    await hold.wait()


def start(stream_id: int, credit: int = 0, **values: Any) -> pb.SessionRequest:
    return pb.SessionRequest(
        start=pb.SessionStart(
            stream_id=stream_id, generation=generation(**values), initial_credit_tokens=credit
        )
    )


async def read(call: Any) -> pb.SessionResponse:
    """Return the next message of a session that must have one."""
    message = await call.read()
    assert isinstance(message, pb.SessionResponse), "the session ended"
    return message


class Heard:
    """What came over a session, by stream."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, pb.SessionFinished] = {}
        self.accepted: list[int] = []

    def add(self, message: pb.SessionResponse) -> None:
        self.accepted += [accepted.stream_id for accepted in message.accepted]
        frame, at = message.tokens, 0
        for handle, offset, count in zip(frame.handles, frame.offsets, frame.counts, strict=True):
            got = self.tokens.setdefault(handle >> 4, [])
            assert (handle >> 4) not in self.finished, "tokens after the terminal event"
            assert offset == len(got)
            got += frame.ids[at : at + count]
            at += count
        for finished in message.finished:
            assert finished.stream_id not in self.finished, "two terminal events"
            self.finished[finished.stream_id] = finished


async def test_a_session_runs_many_and_ends_each_once(gateway: Gateway) -> None:
    hold = asyncio.Event()
    hold.set()
    messages = [start(number, max_output_tokens=10 + number) for number in range(32)]
    heard = Heard()
    async with asyncio.timeout(30):
        async for message in gateway.stub.Session(requests(messages, hold), metadata=AUTH):
            heard.add(message)
    assert sorted(heard.finished) == list(range(32))
    assert all(heard.tokens[number] == list(range(10 + number)) for number in range(32))
    await gateway.at_rest()


async def test_a_bad_generation_ends_alone(gateway: Gateway) -> None:
    hold = asyncio.Event()
    hold.set()
    messages = [start(1, max_output_tokens=3), start(2, model="none"), start(3, choices=99), start(4)]
    heard = Heard()
    async with asyncio.timeout(30):
        async for message in gateway.stub.Session(requests(messages, hold), metadata=AUTH):
            heard.add(message)
    assert heard.finished[2].error.reason == "MODEL_NOT_FOUND"
    assert heard.finished[3].error.reason == "INVALID_INPUT"
    assert heard.finished[3].error.metadata["field"] == "start.generation.choices"
    assert heard.finished[1].HasField("finished")
    assert heard.finished[4].HasField("finished")


async def test_a_window_holds_a_stream_until_credit_comes(gateway: Gateway) -> None:
    hold = asyncio.Event()
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(7, credit=5, max_output_tokens=12))
    await call.write(start(8, max_output_tokens=12))
    heard = Heard()
    async with asyncio.timeout(30):
        while 8 not in heard.finished:
            heard.add(await read(call))
        assert heard.tokens[7] == list(range(5))
        credit = pb.SessionCredit(stream_ids=[7], tokens=[100])
        await call.write(pb.SessionRequest(credit=credit))
        while 7 not in heard.finished:
            heard.add(await read(call))
    assert heard.tokens[7] == list(range(12))
    await call.done_writing()
    hold.set()
    await gateway.at_rest()


async def test_cancelling_one_stream_leaves_the_others(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(1, prompt="x"))
    await call.write(start(2, max_output_tokens=30))
    heard = Heard()
    async with asyncio.timeout(30):
        while not heard.tokens.get(1):
            heard.add(await read(call))
        await call.write(pb.SessionRequest(cancel=pb.SessionCancel(stream_ids=[1, 99])))
        while len(heard.finished) < 2:
            heard.add(await read(call))
    assert heard.finished[1].error.reason == "CANCELLED"
    assert heard.tokens[2] == list(range(30))
    call.cancel()
    await gateway.at_rest()


async def test_a_session_that_breaks_frees_everything(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for number in range(16):
        await call.write(start(number, prompt="x"))
    heard = Heard()
    async with asyncio.timeout(30):
        while len(heard.tokens) < 16:
            heard.add(await read(call))
    assert len(gateway.workers.live) == 16
    call.cancel()
    await gateway.at_rest()


@pytest.mark.parametrize(
    "message",
    [
        pb.SessionRequest(),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1], tokens=[1, 2])),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1], tokens=[2**31])),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1] * 5000, tokens=[1] * 5000)),
    ],
)
async def test_a_senseless_message_ends_the_session_clearly(
    gateway: Gateway, message: pb.SessionRequest
) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(1, prompt="x"))
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await gateway.at_rest()


async def test_a_senseless_message_that_meets_a_write_ends_the_session_clearly(gateway: Gateway) -> None:
    async with no_read_ahead(gateway) as stub:
        call: Any = stub.Session(metadata=AUTH)
        await call.write(start(1, prompt="x"))
        async with asyncio.timeout(30):
            while not gateway.workers.started:
                await asyncio.sleep(0.005)
            await call.write(pb.SessionRequest())  # the first message is on its way, and nobody reads it
            await gateway.at_rest(30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reader_that_never_comes_hears_why_it_was_cut_off(gateway: Gateway) -> None:
    async with no_read_ahead(gateway) as stub:
        call: Any = stub.Session(metadata=AUTH)
        await call.write(start(1, prompt="x"))
        async with asyncio.timeout(30):
            while not gateway.workers.started:
                await asyncio.sleep(0.005)
            await gateway.at_rest(30)  # cut while the first message of all waits for its reader
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()
        assert isinstance(from_rpc_error(caught.value), errors.SlowReader)


async def test_concurrency_is_exact_across_faces(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for number in range(45):
        await call.write(start(number, prompt="x"))
    heard = Heard()
    async with asyncio.timeout(30):
        while len(heard.tokens) < 40 or len(heard.finished) < 5:
            heard.add(await read(call))
    assert {end.error.reason for end in heard.finished.values()} == {"CONCURRENCY_EXCEEDED"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.Complete(pb.CompleteRequest(generation=generation()), metadata=AUTH)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await gateway.at_rest()
    await gateway.stub.Complete(pb.CompleteRequest(generation=generation()), metadata=AUTH)


async def test_a_reader_that_stays_away_is_cut_off(gateway: Gateway) -> None:
    stream: Any = gateway.stub.Generate(pb.GenerateRequest(generation=generation(prompt="xy")), metadata=AUTH)
    await stream.read()
    session = gateway.stub.Session(metadata=AUTH)
    await session.write(start(1, prompt="xy"))
    await read(session)
    assert gateway.service.running == 2
    await gateway.at_rest()
    for call in (stream, session):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()  # one that comes back after all hears why
        assert isinstance(from_rpc_error(caught.value), errors.SlowReader)


async def test_a_client_that_does_not_read_its_session_is_not_read_either(gateway: Gateway) -> None:
    session = MuxedSession(gateway.service, Principal("k", KeyRole.TENANT, "acme"), received)
    for _ in range(MAX_UNREAD):
        session.handle(start(5, choices=99), None)
    blocked = asyncio.ensure_future(session.readable())
    await asyncio.sleep(0.01)
    assert not blocked.done()
    assert len((await session.next_message(1.0)).finished) == MAX_UNREAD
    await blocked


async def test_messages_of_a_session_are_bounded_and_keep_their_order(gateway: Gateway) -> None:
    session = MuxedSession(gateway.service, Principal("k", KeyRole.TENANT, "acme"), received)
    top = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0), ("a", "b"), "a")
    for offset in range(0, 3 * MAX_MESSAGE_TOKENS, 1024):
        session.add_tokens(16, offset, range(offset, offset + 1024), "x", ())
        session.add_tokens(32, offset // 1024, [offset], "y", [top])
    session.finished.append(pb.SessionFinished(stream_id=1))
    heard, messages = Heard(), 0
    while 1 not in heard.finished:
        message = await session.next_message(1.0)
        assert len(message.tokens.ids) <= MAX_MESSAGE_TOKENS
        for found in message.tokens.logprobs:
            assert message.tokens.handles[found.entry] == 32
        heard.add(message)
        messages += 1
    assert messages > 3
    assert heard.tokens[1] == list(range(3 * MAX_MESSAGE_TOKENS))
    assert len(heard.tokens[2]) == 96
    assert session.idle


async def test_a_key_that_is_taken_away_starts_nothing_more_on_an_open_session(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    heard = Heard()
    await call.write(start(1, max_output_tokens=2))
    async with asyncio.timeout(30):
        while 1 not in heard.finished:
            heard.add(await read(call))
        gateway.identity.revoked = True
        await call.write(start(2, max_output_tokens=2))
        while 2 not in heard.finished:
            heard.add(await read(call))
    assert heard.finished[2].error.reason == "UNAUTHENTICATED"
    call.cancel()
