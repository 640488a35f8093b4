"""What the client does when gateways refuse, break, hang or lie: over real sockets, each token once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from fairway.client import (
    Client,
    ClientOptions,
    Closed,
    Completion,
    ConnectionLost,
    DeadlineExceeded,
    FairwayError,
    Finished,
    InvalidRequest,
    KeysUnsupported,
    Message,
    NoGateway,
    Options,
    OverQuota,
    ResultExpired,
    RetryPolicy,
    StreamDiverged,
    Tokens,
    Tool,
    ToolCall,
    Unavailable,
)
from tests.integration.client.scripted import Hang, Other, Refuse, ScriptedGateway, token
from tests.support.waiting import until

Pair = tuple[ScriptedGateway, ScriptedGateway]
BROKEN = Refuse(grpc.StatusCode.UNAVAILABLE)
BUSY = Refuse(grpc.StatusCode.UNAVAILABLE, "NO_WORKER_AVAILABLE")
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.005)


def client(*gateways: ScriptedGateway, retry: RetryPolicy = QUICK, **options: Any) -> Client:
    found = ClientOptions(retry=retry, **{"idempotency": True, **options})
    return Client([gateway.address for gateway in gateways], api_key="secret", options=found)


def ids(events: Sequence[Any]) -> list[int]:
    return [one for event in events if isinstance(event, Tokens) for one in event.ids]


def run_of(seed: int, count: int) -> list[int]:
    return [token(seed, position) for position in range(count)]


async def test_stream_has_typed_events_and_the_key_goes_along(gateways: Pair) -> None:
    async with client(gateways[0]) as opened:
        stream = opened.generate("tiny", "hi", Options(max_output_tokens=5), timeout_s=60)
        events = [event async for event in stream]
        assert [one.in_flight for one in opened._core().pool._endpoints.values()] == [0]
    assert [type(event).__name__ for event in events] == ["Accepted", *["Tokens"] * 5, "Finished"]
    assert ids(events) == run_of(1, 5)
    assert isinstance(events[-1], Finished)
    assert stream.finished is events[-1]
    assert stream.idempotency_key == gateways[0].fleet.bodies[0].idempotency_key != ""
    assert gateways[0].key == "Bearer secret"
    assert gateways[0].time_left_s is not None
    assert 0 < gateways[0].time_left_s <= 61, "gRPC rounds it up"


async def test_text_collect_complete_count_and_list(gateways: Pair) -> None:
    async with client(gateways[0]) as opened:
        pieces = [piece async for piece in opened.generate("tiny", "hi", Options(max_output_tokens=3)).text()]
        whole = await opened.generate("tiny", "hi", Options(max_output_tokens=3)).collect()
        unary = await opened.complete("tiny", "hi", Options(max_output_tokens=3))
        count = await opened.count_tokens("tiny", "one two three")
        models = await opened.list_models()
    assert "".join(pieces) == "1000 1001 1002 "
    assert (whole.text, whole.choices[0].ids) == ("2000 2001 2002 ", tuple(run_of(2, 3)))
    assert (unary.text, unary.usage.output_tokens) == ("3000 3001 3002 ", 3)
    assert (count.prompt_tokens, [model.name for model in models]) == (3, ["tiny"])


async def test_broken_stream_goes_on_at_another_gateway_each_token_once(gateways: Pair) -> None:
    first, second = gateways
    for gateway in gateways:
        gateway.faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=7))
    async with client(first, second) as opened:
        stream = opened.generate("tiny", "hi", Options(max_output_tokens=20))
        events = [event async for event in stream]
    assert ids(events) == run_of(1, 20)
    assert "".join(event.text for event in events if isinstance(event, Tokens)) == "".join(
        f"{one} " for one in run_of(1, 20)
    )
    assert stream.accepted is not None
    assert not stream.accepted.replayed, "its own attempts are no earlier request"
    assert stream.attempts == 3
    assert (first.calls, second.calls) in ((2, 1), (1, 2))
    assert len({body.idempotency_key for body in first.fleet.bodies}) == 1
    assert len({body.SerializeToString() for body in first.fleet.bodies}) == 1, "a retry has the same body"


@pytest.mark.parametrize("carrier", ["stream", "session", "unary"])
async def test_the_answer_to_an_earlier_request_says_so(gateways: Pair, carrier: str) -> None:
    async with client(gateways[0]) as opened, opened.session() as session:

        async def ask() -> Completion:
            if carrier == "unary":
                return await opened.complete("tiny", "hi", idempotency_key="order-7")
            source: Any = session if carrier == "session" else opened
            found: Completion = await source.generate("tiny", "hi", idempotency_key="order-7").collect()
            return found

        first, again = await ask(), await ask()
    assert (first.accepted.replayed, again.accepted.replayed) == (False, True)
    assert first.text == again.text


@pytest.mark.parametrize("carrier", ["stream", "session"])
async def test_the_parts_of_a_broken_stream_are_those_of_a_whole_answer(gateways: Pair, carrier: str) -> None:
    options, chat = Options(max_output_tokens=9, tools=[Tool("f")]), [Message("user", "hi")]
    async with client(*gateways) as opened, opened.session() as session:
        whole = await opened.complete("tiny", chat, options, idempotency_key="k")
        for gateway in gateways:
            gateway.faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=4))
        sender = opened if carrier == "stream" else session
        stream = sender.generate("tiny", chat, options, idempotency_key="k")
        streamed = await stream.collect()
    assert stream.attempts == 3
    assert streamed.choices == whole.choices
    choice = whole.choices[0]
    assert choice.calls == (ToolCall("c0", "f", choice.text.split(" ", 2)[2] + "end"),)
    assert (choice.reasoning, choice.content) == tuple(f"{one} " for one in choice.ids[:2])


async def test_without_a_key_what_was_delivered_is_not_asked_for_again(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=7))
    async with client(gateways[0], idempotency=False) as opened:
        stream = opened.generate("tiny", "hi", Options(max_output_tokens=20))
        with pytest.raises(ConnectionLost) as caught:
            [event async for event in stream]
    assert caught.value.delivered_tokens == 7
    assert "no idempotency key" in caught.value.gave_up
    assert gateways[0].calls == 1


async def test_without_a_key_a_stream_that_delivered_nothing_is_sent_again(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=0))
    async with client(gateways[0], idempotency=False) as opened:
        events = [event async for event in opened.generate("tiny", "hi", Options(max_output_tokens=3))]
    assert ids(events) == run_of(2, 3)


@pytest.mark.parametrize("fault", [Other(seed=99), Other(shift=1)])
async def test_a_replay_that_is_another_run_is_refused(gateways: Pair, fault: Other) -> None:
    gateways[0].faults += [Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=4), fault]
    async with client(gateways[0]) as opened:
        with pytest.raises(StreamDiverged) as caught:
            [event async for event in opened.generate("tiny", "hi")]
    assert caught.value.delivered_tokens == 4


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Refuse(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", field="temperature"), InvalidRequest),
        (
            Refuse(grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_FEATURE", field="idempotency_key"),
            KeysUnsupported,
        ),
        (Refuse(grpc.StatusCode.FAILED_PRECONDITION, "RESULT_EXPIRED"), ResultExpired),
        (Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVER_QUOTA"), OverQuota),
    ],
)
async def test_what_a_retry_cannot_cure_is_raised_at_once(
    gateways: Pair, fault: Refuse, kind: type[FairwayError]
) -> None:
    gateways[0].faults.append(fault)
    async with client(gateways[0]) as opened:
        with pytest.raises(kind) as caught:
            [event async for event in opened.generate("tiny", "hi")]
    assert (caught.value.reason, gateways[0].calls, caught.value.attempts) == (fault.reason, 1, 1)


async def test_retry_info_is_waited_for(gateways: Pair) -> None:
    gateways[0].faults += [
        Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_RATE_EXCEEDED", retry_after_s=0.3),
        Refuse(grpc.StatusCode.UNAVAILABLE, "NO_WORKER_AVAILABLE", retry_after_s=0.2),
    ]
    loop = asyncio.get_running_loop()
    async with client(gateways[0]) as opened:
        began_s = loop.time()
        await opened.complete("tiny", "hi")
    assert loop.time() - began_s >= 0.5
    assert gateways[0].calls == 3


async def test_a_wait_beyond_the_deadline_is_not_begun(gateways: Pair) -> None:
    gateways[0].faults.append(
        Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_RATE_EXCEEDED", retry_after_s=30)
    )
    async with client(gateways[0]) as opened:
        with pytest.raises(OverQuota) as caught:
            await opened.complete("tiny", "hi", timeout_s=20)
    assert (caught.value.retry_after_s, gateways[0].calls) == (30.0, 1)
    assert "deadline" in caught.value.gave_up


@pytest.mark.parametrize("call", ["complete", "generate"])
async def test_the_deadline_holds_for_a_gateway_that_hangs(gateways: Pair, call: str) -> None:
    async with client(gateways[0]) as opened, asyncio.timeout(30):
        await opened.list_models()  # The deadline of the next call must not pass while it connects.
        gateways[0].faults.append(Hang())
        with pytest.raises(DeadlineExceeded):
            if call == "complete":
                await opened.complete("tiny", "hi", timeout_s=1.0)
            else:
                await opened.generate("tiny", "hi", timeout_s=1.0).collect()
        while not gateways[0].cancelled:  # the gateway is told
            await asyncio.sleep(0.01)


async def test_a_silent_stream_is_left_for_another_gateway(gateways: Pair) -> None:
    for gateway in gateways:
        gateway.faults.append(Hang(after_tokens=3))
    async with client(*gateways, silence_timeout_s=1.0) as opened:
        stream = opened.generate("tiny", "hi", Options(max_output_tokens=6))
        assert ids([event async for event in stream]) == run_of(1, 6)
    assert stream.attempts >= 3  # A machine that stalls is silence too.


async def test_the_retry_budget_is_exact(gateways: Pair) -> None:
    """Floor 2, then a tenth of the requests: of 100 calls that all fail, 2 + 10 are sent again."""
    gateway = gateways[0]
    gateway.faults += [BUSY] * 1000
    retry = RetryPolicy(
        max_attempts=2, first_delay_s=0.001, max_delay_s=0.001, budget_floor=2, budget_floor_per_s=0
    )
    async with client(gateway, retry=retry) as opened:
        for _ in range(100):
            with pytest.raises(Unavailable):
                await opened.list_models()
    assert gateway.calls in (111, 112)  # a tenth has no exact binary fraction


async def test_attempts_are_bounded(gateways: Pair) -> None:
    gateways[0].faults += [BUSY] * 100
    async with client(gateways[0]) as opened:
        with pytest.raises(Unavailable) as caught:
            await opened.complete("tiny", "hi")
    assert (gateways[0].calls, caught.value.attempts) == (5, 5)


async def test_a_draining_gateway_is_left_alone_and_taken_again(gateways: Pair) -> None:
    first, second = gateways
    drains = Refuse(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after_s=0.4)
    first.faults += [drains]
    loop, refused_s = asyncio.get_running_loop(), 0.0
    async with client(first, second) as opened:
        while not first.calls:
            refused_s = loop.time()
            await opened.list_models()
        before = second.calls
        for _ in range(10):
            await opened.list_models()
        assert loop.time() - refused_s >= 0.4 or (first.calls, second.calls - before) == (1, 10)
        async with asyncio.timeout(30):
            while first.calls == 1:
                await opened.list_models()


async def test_calls_spread_over_the_gateways(gateways: Pair) -> None:
    async with client(*gateways) as opened:
        await asyncio.gather(*(opened.complete("tiny", "hi") for _ in range(40)))
    assert min(gateways[0].calls, gateways[1].calls) >= 10


async def test_a_gateway_that_is_down_costs_no_retry_and_comes_back(gateways: Pair) -> None:
    first, second = gateways
    nothing = RetryPolicy(max_attempts=1)
    await first.stop()
    async with client(first, second, retry=nothing) as opened:
        for _ in range(20):
            await opened.list_models()
        assert second.calls == 20
        again = ScriptedGateway(first.fleet)
        await again.start(first.port)
        async with asyncio.timeout(30):
            while not again.calls:
                await opened.list_models()
    await again.stop()


async def test_no_gateway_at_all_is_said_within_the_connect_timeout(gateways: Pair) -> None:
    await gateways[0].stop()
    async with client(gateways[0], connect_timeout_s=0.2) as opened, asyncio.timeout(30):
        with pytest.raises(NoGateway, match=gateways[0].address):
            await opened.list_models()


async def test_closing_a_stream_in_the_middle_tells_the_gateway(gateways: Pair) -> None:
    async with client(gateways[0]) as opened, asyncio.timeout(30):
        async with opened.generate("tiny", "hi", Options(max_output_tokens=1_000_000)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    break
        while not gateways[0].cancelled:
            await asyncio.sleep(0.01)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_is_closed_under_its_reader(gateways: Pair) -> None:
    gateways[0].faults.append(Hang(after_tokens=1))
    async with client(gateways[0]) as opened, asyncio.timeout(30):
        stream = opened.generate("tiny", "hi")
        await anext(stream)
        await anext(stream)
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(_closed(stream))
            while not stream._guard.busy:
                await asyncio.sleep(0)
            await stream.aclose()
        assert reader.result() == "the stream was closed while it was read"


async def test_closing_the_client_ends_readers_callers_and_tasks(gateways: Pair) -> None:
    gateways[0].faults += [Hang(), Hang(after_tokens=1)]
    before = asyncio.all_tasks()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        opened = client(gateways[0])
        await opened.__aenter__()
        calling = group.create_task(_call_closed(opened))
        while gateways[0].calls < 1:
            await asyncio.sleep(0.01)
        stream = opened.generate("tiny", "hi")
        await anext(stream)
        await anext(stream)
        reading = group.create_task(_closed(stream))
        await asyncio.sleep(0)
        await opened.aclose()
        assert await calling == await reading == "the client was closed"
        with pytest.raises(Closed):
            await opened.list_models()
        await opened.aclose()
        await gateways[0].stop()
    await until(lambda: len(asyncio.all_tasks()) <= len(before))


async def test_a_cancelled_caller_is_cancelled_not_closed(gateways: Pair) -> None:
    gateways[0].faults.append(Hang())
    async with client(gateways[0]) as opened, asyncio.timeout(30):
        task = asyncio.ensure_future(opened.complete("tiny", "hi"))
        while not gateways[0].calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not gateways[0].cancelled:
            await asyncio.sleep(0.01)


async def test_misuse_is_named(gateways: Pair) -> None:
    unopened = client(gateways[0])
    with pytest.raises(RuntimeError, match="not open"):
        unopened.generate("tiny", "hi")
    with pytest.raises(ValueError, match="api_key"):
        Client("127.0.0.1:1", api_key="")
    async with client(gateways[0]) as opened:
        with pytest.raises(ValueError, match="timeout_s"):
            await opened.list_models(timeout_s=0)
        with pytest.raises(RuntimeError, match="opened before"):
            await opened.__aenter__()
        with pytest.raises(RuntimeError, match="event loop"):
            await asyncio.to_thread(lambda: asyncio.run(_models(opened)))


async def _models(opened: Client) -> None:
    await opened.list_models()


async def _closed(stream: Any) -> str:
    with pytest.raises(Closed) as caught:
        while True:
            await anext(stream)
    return caught.value.message


async def _call_closed(opened: Client) -> str:
    with pytest.raises(Closed) as caught:
        await opened.complete("tiny", "hi")
    return caught.value.message


async def test_each_attempt_says_which_one_it_is(gateways: Pair) -> None:
    """So that a server under pressure can shed retries before first attempts."""
    one = gateways[0]
    async with client(one) as opened:
        one.faults.extend([BUSY, BUSY])
        await opened.complete("tiny", "hi", Options(max_output_tokens=1), timeout_s=60)
        one.faults.extend([BUSY, BUSY])
        async for _ in opened.generate("tiny", "hi", Options(max_output_tokens=1), timeout_s=60):
            pass
        one.faults.extend([BUSY])
        async with opened.session() as session:
            async for _ in session.generate("tiny", "hi", Options(max_output_tokens=1), timeout_s=60):
                pass
    assert one.fleet.attempts == [0, 1, 2, 0, 1, 2, 0, 1]


async def test_overload_is_retried_no_sooner_than_the_server_says(gateways: Pair) -> None:
    one = gateways[0]
    one.faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, "OVERLOADED", retry_after_s=0.2))
    async with client(one) as opened:
        began_s = asyncio.get_running_loop().time()
        await opened.complete("tiny", "hi", Options(max_output_tokens=1), timeout_s=60)
        assert asyncio.get_running_loop().time() - began_s >= 0.2
    assert one.calls == 2
