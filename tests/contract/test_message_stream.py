"""What every transport of message streams does, over gRPC and over the simulated network: order, the end and
its reason, bounded waits, and a writer that waits for its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from fairway.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.core.errors import InvalidInput, NoLeader
from services.ports.streams import ClientStream, MessageStream, StreamClient, StreamLost
from services.rpc.bounded_writes import send_headers
from services.rpc.methods import EXECUTE
from services.rpc.server import GrpcServerStream, RpcServer, RpcService
from simulator.kernel.links.streams import SimStreams, serve_stream
from tests.support.simulated import Check, World, checks_of, simulate
from tests.support.waiting import until

TOKEN = "t" * 40
Client: TypeAlias = ClientStream[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]
Server: TypeAlias = MessageStream[worker_pb2.ExecuteResponse, worker_pb2.ExecuteRequest]
Handler: TypeAlias = Callable[[Server], Coroutine[Any, Any, None]]


@dataclass
class Rig:
    """``ended`` is how each handler ended: "returned" or the name of its exception's type."""

    streams: StreamClient
    address: str = ""
    handler: Handler | None = None
    ended: list[str] = field(default_factory=list)
    opened: list[Client] = field(default_factory=list)

    async def open(self, handler: Handler, address: str | None = None) -> Client:
        self.handler = handler
        stream = await self.streams.open(address or self.address, EXECUTE, timeout_s=5.0)
        self.opened.append(stream)
        return stream

    async def serve(self, stream: Server) -> None:
        assert self.handler is not None
        try:
            await self.handler(stream)
        except BaseException as error:
            self.ended.append(type(error).__name__)
            if not isinstance(error, StreamLost):
                raise
        else:
            self.ended.append("returned")

    async def close(self) -> None:
        for stream in self.opened:
            await stream.close()
        await until(lambda: len(self.ended) == len(self.opened) or not self.address)


class Scripted(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def Execute(  # type: ignore[override]  # the stubs type generators only
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> None:
        await send_headers(context)
        await self._rig.serve(GrpcServerStream(request_iterator, context))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(GrpcStreams(TOKEN))
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        worker_pb2_grpc.add_WorkerServiceServicer_to_server,
        Scripted(rig),  # type: ignore[abstract]  # the rig calls Execute only
    )
    server = RpcServer([service], listen="127.0.0.1:0", internal_token=TOKEN, new_incident=lambda: "inc_1")
    await server.start()
    rig.address = f"127.0.0.1:{server.port}"
    yield rig
    await rig.close()
    await server.stop(0.0)


@asynccontextmanager
async def simulated(world: World) -> AsyncIterator[Rig]:
    rig = Rig(SimStreams(world.process("client"), world.network), "server:1")
    serve_stream(world.process("server"), world.network, "server:1", EXECUTE, rig.serve)
    yield rig
    await rig.close()


def request(number: int) -> worker_pb2.ExecuteRequest:
    return worker_pb2.ExecuteRequest(cancels=[number])


def response(number: int, text: str = "") -> worker_pb2.ExecuteResponse:
    tokens = common_pb2.TokenFrame(handles=[number], offsets=[0], counts=[1], ids=[7], texts=[text])
    return worker_pb2.ExecuteResponse(tokens=tokens)


def number_of(message: worker_pb2.ExecuteResponse) -> int:
    return message.tokens.handles[0]


async def wait(stream: Server) -> None:
    await stream.read_each(lambda _: None)


async def test_messages_arrive_in_order_and_answers_too(rig: Rig) -> None:
    async def echo(stream: Server) -> None:
        while True:
            message = await stream.read(5.0)
            await stream.write(response(message.cancels[0]))

    stream = await rig.open(echo)
    for number in range(50):
        await stream.write(request(number))
    assert [number_of(await stream.read(5.0)) for _ in range(50)] == list(range(50))


async def test_each_message_is_passed_on_once_at_both_ends(rig: Rig) -> None:
    received: list[int] = []
    answers: list[int] = []

    async def collect(stream: Server) -> None:
        await stream.write(response(1))
        await stream.read_each(lambda message: received.append(message.cancels[0]))

    stream = await rig.open(collect)
    reading = asyncio.ensure_future(stream.read_each(lambda message: answers.append(number_of(message))))
    for number in range(20):
        await stream.write(request(number))
    await until(lambda: len(received) == 20 and answers)
    await stream.close()
    with pytest.raises(StreamLost):
        await reading
    assert (received, answers) == (list(range(20)), [1])


async def test_what_was_received_before_the_reader_came_is_not_lost(rig: Rig) -> None:
    received: list[int] = []

    async def write_and_end(stream: Server) -> None:
        await stream.read(5.0)  # a client that still writes to an ended stream fails there
        for number in range(5):
            await stream.write(response(number))

    stream = await rig.open(write_and_end)
    await stream.write(request(1))
    await until(lambda: rig.ended)
    await asyncio.sleep(0.1)
    with pytest.raises(StreamLost):
        await stream.read_each(lambda message: received.append(number_of(message)))
    assert received == [0, 1, 2, 3, 4]


async def test_an_error_of_the_server_ends_the_stream_with_its_reason(rig: Rig) -> None:
    async def fail(stream: Server) -> None:
        await stream.read(5.0)
        raise NoLeader("another one leads", retry_after_s=2.0)

    for reads_each in (False, True):
        stream = await rig.open(fail)
        await stream.write(request(1))
        with pytest.raises(NoLeader, match="another one leads") as caught:
            await (stream.read_each(lambda _: None) if reads_each else stream.read(5.0))
        assert caught.value.retry_after_s == 2.0


async def test_a_message_that_is_rejected_ends_the_stream_for_both(rig: Rig) -> None:
    def reject(message: worker_pb2.ExecuteRequest) -> None:
        raise InvalidInput("no such handle", field="cancels")

    async def check(stream: Server) -> None:
        await stream.read_each(reject)

    stream = await rig.open(check)
    await stream.write(request(1))
    with pytest.raises(InvalidInput, match="no such handle") as caught:
        await stream.read(5.0)
    assert caught.value.metadata["field"] == "cancels"
    assert rig.ended == ["InvalidInput"]


async def test_a_reader_may_reject_a_message_of_the_server(rig: Rig) -> None:
    def reject(message: worker_pb2.ExecuteResponse) -> None:
        raise InvalidInput("the columns differ", field="tokens")

    async def write(stream: Server) -> None:
        await stream.write(response(1))
        await wait(stream)

    stream = await rig.open(write)
    await stream.write(request(1))
    with pytest.raises(InvalidInput, match="the columns differ"):
        await stream.read_each(reject)


async def test_a_handler_that_returns_ends_the_stream(rig: Rig) -> None:
    async def end(stream: Server) -> None:
        await stream.read(5.0)

    stream = await rig.open(end)
    await stream.write(request(1))
    with pytest.raises(StreamLost):
        await stream.read(5.0)


async def test_a_silent_peer_is_lost_in_time(rig: Rig) -> None:
    stream = await rig.open(wait)
    await stream.write(request(1))
    with pytest.raises(StreamLost, match=r"silent for 0\.2 s"):
        async with asyncio.timeout(30):
            await stream.read(0.2)


async def test_a_client_that_sends_nothing_is_lost_in_time(rig: Rig) -> None:
    async def ask(stream: Server) -> None:
        await stream.read(0.2)

    stream = await rig.open(ask)
    with pytest.raises(StreamLost):
        await stream.read(5.0)
    assert rig.ended == ["StreamLost"]


@pytest.mark.parametrize("reads_each", [False, True])
async def test_closing_ends_the_reader_and_the_handler(rig: Rig, reads_each: bool) -> None:
    stream = await rig.open(wait)
    await stream.write(request(1))
    reading = asyncio.ensure_future(stream.read_each(lambda _: None) if reads_each else stream.read(60.0))
    await asyncio.sleep(0.1)
    await stream.close()
    await stream.close()
    with pytest.raises(StreamLost):
        await reading
    await until(lambda: rig.ended)
    with pytest.raises((StreamLost, Exception)):
        await stream.write(request(2))


@pytest.mark.parametrize("reads_each", [False, True])
async def test_a_reader_that_is_cancelled_is_cancelled(rig: Rig, reads_each: bool) -> None:
    stream = await rig.open(wait)
    await stream.write(request(1))
    reading = asyncio.ensure_future(stream.read_each(lambda _: None) if reads_each else stream.read(60.0))
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()


async def test_an_address_without_a_server_is_lost_in_time(rig: Rig) -> None:
    async with asyncio.timeout(10.0):
        with pytest.raises(StreamLost):
            stream = await rig.streams.open("127.0.0.1:1", EXECUTE, timeout_s=5.0)
            try:
                await stream.write(request(1))
                await stream.read(5.0)
            finally:
                await stream.close()


async def test_a_writer_waits_for_its_reader(rig: Rig) -> None:
    written = 0
    count, text = 400, "x" * 100_000

    async def pour(stream: Server) -> None:
        nonlocal written
        for number in range(count):
            await stream.write(response(number, text))
            written += 1
        await wait(stream)

    stream = await rig.open(pour)
    await stream.write(request(1))
    await asyncio.sleep(1.0)
    assert 0 < written < count
    assert [number_of(await stream.read(10.0)) for _ in range(count)] == list(range(count))
    assert written == count


@pytest.mark.parametrize("check", checks_of(globals()))
def test_over_the_simulated_network(check: Check) -> None:
    simulate(check, simulated)
