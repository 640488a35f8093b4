"""The client against real gateways, one of which is killed: a real installation, a real SIGKILL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from fairway.cli.fleet.options import BUNDLED_CLASSIFIER
from fairway.client import (
    Client,
    ClientOptions,
    DeadlineExceeded,
    FinishReason,
    GenerationStream,
    InvalidRequest,
    Message,
    NotFound,
    Options,
    Session,
    SessionOptions,
    Tokens,
    Unauthenticated,
)
from tests.support.stack import Stack, at_rest, kill
from tests.support.waiting import until

LONG = Options(max_output_tokens=96, temperature=0, ignore_eos=True)
LONGER = Options(max_output_tokens=384, temperature=0, ignore_eos=True)  # not over when a kill comes late


@pytest.fixture
def stack(two_gateways: Stack) -> Stack:
    two_gateways.wait_ready()
    return two_gateways


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    options = ClientOptions(connect_timeout_s=30)
    async with Client(stack.endpoints["gateways"], api_key=stack.api_key, options=options) as opened:
        yield opened


async def read(stream: GenerationStream, begun: asyncio.Semaphore | None = None) -> tuple[list[int], str]:
    """Return ids and text; releases ``begun`` at the first token."""
    ids: list[int] = []
    text = ""
    async for event in stream:
        if isinstance(event, Tokens):
            assert event.offset == len(ids)
            if begun is not None and not ids:
                begun.release()
            ids += event.ids
            text += event.text
    return ids, text


async def test_calls_of_every_kind(stack: Stack, client: Client) -> None:
    models = await client.list_models()
    assert [model.name for model in models] == [stack.model, BUNDLED_CLASSIFIER]
    count = await client.count_tokens(stack.model, "Once upon a time")
    stream = client.generate(stack.model, "Once upon a time", Options(max_output_tokens=12, temperature=0))
    streamed = await stream.collect()
    whole = await client.complete(
        stack.model, "Once upon a time", Options(max_output_tokens=12, temperature=0)
    )
    assert (whole.text, whole.choices[0].ids) == (streamed.text, streamed.choices[0].ids)
    assert whole.usage.prompt_tokens == count.prompt_tokens
    assert whole.choices[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    ordered = [await client.complete(stack.model, "Order", idempotency_key="order-1") for _ in range(2)]
    assert [one.accepted.replayed for one in ordered] == [False, True]
    assert ordered[0].text == ordered[1].text
    answer = await client.chat(stack.model, [Message("user", "Hello")], Options(max_output_tokens=4))
    assert answer.usage.output_tokens >= 1


async def test_what_the_server_refuses_has_its_class(stack: Stack, client: Client) -> None:
    with pytest.raises(NotFound):
        await client.complete("no-such-model", "hi")
    with pytest.raises(InvalidRequest) as caught:
        await client.complete(stack.model, "hi", Options(temperature=9))
    assert "temperature" in caught.value.metadata["field"]
    # An endpoint that is still connecting at the deadline would be NoGateway.
    await until(lambda: all(one.connected for one in client._core().pool._endpoints.values()))
    with pytest.raises(DeadlineExceeded):
        await read(client.generate(stack.model, "hi", LONG, timeout_s=0.02))
    async with Client(stack.endpoints["grpc"], api_key="fw_wrong_key") as other:
        with pytest.raises(Unauthenticated):
            await other.list_models()
        async with other.session() as session:
            with pytest.raises(Unauthenticated):
                await read(session.generate(stack.model, "hi"))


async def test_a_slow_reader_of_a_session_stalls_itself_alone(stack: Stack, client: Client) -> None:
    async with client.session(SessionOptions(window_tokens=16)) as session:
        slow = session.generate(stack.model, "Once upon a time", LONG)
        await anext(slow)
        others = [session.generate(stack.model, f"Tale {number}", LONG) for number in range(2)]
        found = await asyncio.gather(*(read(stream) for stream in others))
        assert [len(ids) for ids, _ in found] == [LONG.max_output_tokens] * 2
        assert slow.finished is None
        assert len((await read(slow))[0]) == LONG.max_output_tokens


@pytest.mark.parametrize("carrier", ["stream", "session"])
async def test_leaving_frees_what_the_server_held(stack: Stack, carrier: str) -> None:
    # With a key, a session withdraws the generation; a stream of its own would leave it for a retry to find.
    options = ClientOptions(idempotency=carrier == "session", connect_timeout_s=30)
    async with Client(stack.endpoints["gateways"], api_key=stack.api_key, options=options) as client:
        session = client.session()
        source: Any = session if carrier == "session" else client
        async with source.generate(stack.model, "Once", LONG) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    break
        await stack.wait_workers(lambda state: at_rest(state, workers=1), timeout_s=60)
        await session.aclose()


@pytest.mark.parametrize("carrier", ["stream", "session"])
async def test_a_killed_gateway_costs_no_token_and_doubles_none(
    stack: Stack, client: Client, carrier: str
) -> None:
    expected = await read(client.generate(stack.model, "Once upon a time", LONGER))
    async with client.session(SessionOptions(window_tokens=16)) as session:
        source: Client | Session = session if carrier == "session" else client
        begun = asyncio.Semaphore(0)
        streams = [source.generate(stack.model, "Once upon a time", LONGER) for _ in range(3)]
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            readers = [group.create_task(read(stream, begun)) for stream in streams]
            for _ in streams:
                await begun.acquire()
            kill(_serving_gateway(stack, client))
        assert [reader.result() for reader in readers] == [expected] * 3
    assert any(stream.attempts > 1 for stream in streams), "the kill hit nobody: the drill showed nothing"


def _serving_gateway(stack: Stack, client: Client) -> int:
    """Return the process of the gateway that most of the client's calls are on."""
    endpoints = client._core().pool._endpoints.values()
    port = int(max(endpoints, key=lambda one: one.in_flight).address.rpartition(":")[2])
    return next(
        pid
        for pid in stack.pids("services", "gateway")
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    )
