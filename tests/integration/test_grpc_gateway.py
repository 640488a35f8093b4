"""The gRPC face over a real socket: events in order, one terminal event, nothing left when a client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fairway.v1 import inference_pb2 as pb
from services.core import errors
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.status import from_rpc_error
from tests.support.grpc_gateway import AUTH, Gateway, generation, received, running_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway() as found:
        yield found


async def test_generate_streams_in_order_and_ends_once(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(max_output_tokens=50))
    events = [event async for event in gateway.stub.Generate(request, metadata=AUTH)]
    assert events[0].HasField("accepted")
    assert [e.WhichOneof("event") for e in events].count("finished") == 1
    assert events[-1].HasField("finished")
    assert [i for e in events for i in e.chunk.ids] == list(range(50))
    assert events[-1].finished.usage.output_tokens == 50
    clock = events[-1].finished.clock
    assert clock.decode_us >= 45_000
    await gateway.at_rest()


async def test_a_generation_of_a_session_says_which_attempt_it_is(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for stream_id, attempt in ((1, 0), (2, 4)):
        start = pb.SessionStart(
            stream_id=stream_id, generation=generation(max_output_tokens=1), attempt=attempt
        )
        await call.write(pb.SessionRequest(start=start))
    await call.done_writing()
    async for _ in call:
        pass
    assert sorted(gateway.placement.attempts) == [0, 4]
    await gateway.at_rest()


async def test_complete_returns_the_whole_answer(gateway: Gateway) -> None:
    request = pb.CompleteRequest(generation=generation(max_output_tokens=3, choices=2))
    answer = await gateway.stub.Complete(request, metadata=AUTH)
    assert [choice.text for choice in answer.choices] == ["0 1 2 ", "0 1 2 "]
    assert answer.finished.usage.output_tokens == 6


async def test_an_error_is_a_rich_status(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(model="none"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in gateway.stub.Generate(request, metadata=AUTH)]
    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.ModelNotFound)
    assert error.metadata["model"] == "none"
    assert error.metadata["request_id"].startswith("req_")


async def test_a_client_that_goes_away_frees_everything(gateway: Gateway) -> None:
    call = gateway.stub.Generate(pb.GenerateRequest(generation=generation(prompt="x")), metadata=AUTH)
    async for event in call:
        if event.HasField("chunk"):
            break
    assert len(gateway.workers.live) == 1
    call.cancel()
    await gateway.at_rest()


async def test_a_reader_that_stops_stops_the_worker(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="xy"))
    call: Any = gateway.stub.Generate(request, metadata=AUTH)
    await call.read()
    (running,) = gateway.workers.started
    async with asyncio.timeout(60):
        # Nothing is read: the transport's buffers fill, then no credit is given.
        await running.stalled()
        stopped_at = running.produced
        while running.produced <= stopped_at + 16:
            await call.read()  # a reader that comes back finds everything, and the worker goes on
    call.cancel()
    await gateway.at_rest()


async def test_a_silent_stream_has_heartbeats(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="x"))
    call: Any = gateway.stub.Generate(request, metadata=AUTH)
    await call.read()
    for running in gateway.workers.started:
        running.credits = -(10**9)  # the worker stays silent
    heartbeats = 0
    async with asyncio.timeout(30):
        while heartbeats < 2:
            heartbeats += (await call.read()).HasField("heartbeat")
    call.cancel()


async def test_the_deadline_of_the_rpc_ends_the_request(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="x"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in gateway.stub.Generate(request, metadata=AUTH, timeout=0.2)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await gateway.at_rest()


async def test_fanout_is_checked_before_anything_of_that_size_is_made(gateway: Gateway) -> None:
    with pytest.raises(errors.FairwayError):
        async with asyncio.timeout(30):
            await gateway.service.complete(
                Principal("k", KeyRole.TENANT, "acme"),
                generation(model="none", choices=2**32 - 1),
                received=received(),
            )
