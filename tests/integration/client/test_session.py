"""One stream for many generations: windows, cancellation, and what happens when its gateway goes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fairway.client import (
    Client,
    ClientOptions,
    Closed,
    ConnectionLost,
    DeadlineExceeded,
    GenerationStream,
    InvalidRequest,
    NoGateway,
    Options,
    RetryPolicy,
    SessionOptions,
    Tokens,
    Unauthenticated,
)
from tests.integration.client.scripted import Fleet, Hang, Refuse, ScriptedGateway, token
from tests.support.waiting import until

Pair = tuple[ScriptedGateway, ScriptedGateway]
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.005)


def client(*gateways: ScriptedGateway, **options: Any) -> Client:
    found = ClientOptions(retry=QUICK, **{"idempotency": True, **options})
    return Client([gateway.address for gateway in gateways], api_key="secret", options=found)


def run_of(seed: int, count: int) -> list[int]:
    return [token(seed, position) for position in range(count)]


async def ids(stream: GenerationStream) -> list[int]:
    return [one async for event in stream if isinstance(event, Tokens) for one in event.ids]


async def test_generations_share_one_stream(gateways: Pair) -> None:
    async with client(*gateways) as opened, opened.session(SessionOptions(window_tokens=8)) as session:
        streams = [session.generate("tiny", "hi", Options(max_output_tokens=50)) for _ in range(20)]
        found = await asyncio.gather(*(ids(stream) for stream in streams))
        late = session.generate("tiny", "hi", Options(max_output_tokens=1))
        assert (len(await ids(late)), late.attempts) == (1, 1)
    seeds = [stream.accepted.seed for stream in streams if stream.accepted]
    assert sorted(seeds) == list(range(1, 21))
    assert found == [run_of(seed, 50) for seed in seeds]
    assert gateways[0].sessions + gateways[1].sessions == 1
    assert {stream.attempts for stream in streams} == {1}


async def test_a_slow_reader_holds_up_itself_alone(gateways: Pair) -> None:
    gateway = gateways[0]
    async with client(gateway) as opened, opened.session(SessionOptions(window_tokens=8)) as session:
        slow = session.generate("tiny", "hi", Options(max_output_tokens=1000))
        await anext(slow)
        for _ in range(8):
            other = session.generate("tiny", "hi", Options(max_output_tokens=300))
            assert len(await ids(other)) == 300
        assert gateway.unread[1] == 8, "the window is what it may run ahead"
        for _ in range(6):
            await anext(slow)
        await ids(session.generate("tiny", "hi", Options(max_output_tokens=300)))
        assert 6 < gateway.unread[1] <= 6 + 8
        assert await ids(slow) == run_of(1, 1000)[6:]


async def test_credit_follows_the_reader(gateways: Pair) -> None:
    gateway = gateways[0]
    async with client(gateway) as opened, opened.session(SessionOptions(window_tokens=8)) as session:
        stream = session.generate("tiny", "hi", Options(max_output_tokens=200))
        taken = 0
        async for event in stream:
            if isinstance(event, Tokens):
                taken += len(event.ids)
                assert gateway.unread[1] <= taken + 8


async def test_leaving_a_stream_cancels_it_at_the_gateway(gateways: Pair) -> None:
    gateway = gateways[0]
    async with client(gateway) as opened, opened.session() as session:
        async with session.generate("tiny", "hi", Options(max_output_tokens=1_000_000)) as stream:
            await anext(stream)
        await until(lambda: gateway.session_cancels == [1] and not gateway.running)
        assert len(await ids(session.generate("tiny", "hi"))) == 8, "the session goes on"


async def test_concurrency_is_bounded_and_waiting_keeps_the_deadline(gateways: Pair) -> None:
    gateway = gateways[0]
    async with (
        client(gateway) as opened,
        opened.session(SessionOptions(max_concurrency=2, window_tokens=4)) as session,
    ):
        held = [session.generate("tiny", "hi", Options(max_output_tokens=100)) for _ in range(2)]
        for stream in held:
            await anext(stream)
        with pytest.raises(DeadlineExceeded):
            await anext(session.generate("tiny", "hi", timeout_s=0.1))
        for stream in held:
            await stream.aclose()
        await until(lambda: not gateway.running)
        await asyncio.gather(*(ids(session.generate("tiny", "hi")) for _ in range(12)))
    assert gateway.most_running == 2


async def test_a_broken_session_goes_on_at_another_gateway_each_token_once(gateways: Pair) -> None:
    first, second = gateways
    for gateway in gateways:
        gateway.faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=40))
    async with client(*gateways) as opened, opened.session(SessionOptions(window_tokens=16)) as session:
        streams = [session.generate("tiny", "hi", Options(max_output_tokens=120)) for _ in range(10)]
        found = await asyncio.gather(*(ids(stream) for stream in streams))
    assert found == [run_of(stream.accepted.seed, 120) for stream in streams if stream.accepted]
    assert first.sessions + second.sessions == 3
    assert len({body.idempotency_key for body in first.fleet.bodies}) == 10


async def test_a_silent_session_is_left_for_another_gateway(gateways: Pair) -> None:
    for gateway in gateways:
        gateway.faults.append(Hang(after_tokens=3))
    async with (
        client(*gateways, silence_timeout_s=1.0) as opened,
        opened.session() as session,
        asyncio.timeout(60),
    ):
        stream = session.generate("tiny", "hi", Options(max_output_tokens=6))
        assert await ids(stream) == run_of(1, 6)
    assert stream.attempts >= 3  # A machine that stalls is silence too.


async def test_the_deadline_of_a_generation_holds_within_a_session(gateways: Pair) -> None:
    gateway = gateways[0]
    async with client(gateway) as opened, opened.session() as session, asyncio.timeout(30):
        await ids(session.generate("tiny", "hi"))  # The next deadline must not pass while it connects.
        gateway.faults.append(Hang(after_tokens=2))
        with pytest.raises(DeadlineExceeded) as caught:
            await ids(session.generate("tiny", "hi", timeout_s=1.5))
        assert caught.value.delivered_tokens == 2
        await until(lambda: gateway.session_cancels == [2] and not gateway.running)
        assert len(await ids(session.generate("tiny", "hi"))) == 8, "the session goes on"
    assert gateway.sessions == 1


async def test_a_broken_session_without_keys_says_what_was_delivered(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=5))
    async with (
        client(gateways[0], idempotency=False) as opened,
        opened.session(SessionOptions(window_tokens=16)) as session,
    ):
        with pytest.raises(ConnectionLost) as caught:
            await ids(session.generate("tiny", "hi", Options(max_output_tokens=50)))
        assert caught.value.delivered_tokens == 5
        assert len(await ids(session.generate("tiny", "hi"))) == 8, "the session connects again"


async def test_an_error_of_one_generation_is_its_own(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"))
    async with client(gateways[0]) as opened, opened.session() as session:
        with pytest.raises(InvalidRequest, match="PROMPT_TOO_LONG"):
            await ids(session.generate("tiny", "hi"))
        assert len(await ids(session.generate("tiny", "hi"))) == 8
    assert gateways[0].sessions == 1


async def test_a_draining_gateway_keeps_what_runs_and_gets_nothing_new(gateways: Pair) -> None:
    async with client(*gateways) as opened, opened.session(SessionOptions(window_tokens=4)) as session:
        old = session.generate("tiny", "hi", Options(max_output_tokens=5))  # the last one waits for credit
        await anext(old)
        draining, other = gateways if gateways[0].sessions else gateways[::-1]
        draining.faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after_s=60))
        new = session.generate("tiny", "hi", Options(max_output_tokens=100))
        assert len(await ids(new)) == 100
        assert (draining.calls, other.calls) == (2, 1)
        assert len(await ids(old)) == 5
        await until(lambda: len(session._tasks) == 1)  # the old stream ended with its last generation


async def test_the_only_gateway_is_asked_again_on_the_same_stream(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after_s=0.1))
    async with client(gateways[0]) as opened, opened.session() as session:
        assert len(await ids(session.generate("tiny", "hi"))) == 8
    assert (gateways[0].sessions, gateways[0].calls) == (1, 2)


async def test_closing_the_session_ends_readers_and_tasks(gateways: Pair) -> None:
    before = asyncio.all_tasks()
    async with client(gateways[0]) as opened:
        session = opened.session(SessionOptions(window_tokens=4))
        stream = session.generate("tiny", "hi", Options(max_output_tokens=100))
        await anext(stream)
        await session.aclose()
        assert not session._tasks
        with pytest.raises(Closed, match="the session was closed"):
            await anext(stream)
        with pytest.raises(Closed):
            session.generate("tiny", "hi")
        await until(lambda: not gateways[0].running)
    await gateways[0].stop()
    await until(lambda: len(asyncio.all_tasks()) <= len(before))


async def test_a_generation_that_cannot_be_sent_leaves_its_slot(gateways: Pair) -> None:
    await gateways[0].stop()
    async with (
        client(gateways[0], connect_timeout_s=0.1) as opened,
        opened.session(SessionOptions(max_concurrency=1)) as session,
    ):
        for _ in range(2):
            with pytest.raises(NoGateway):
                await ids(session.generate("tiny", "hi", timeout_s=5))


async def test_a_refused_session_is_the_error_of_each_generation() -> None:
    class Refusing(ScriptedGateway):
        async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")

        async def ListModels(self, request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")

    gateway = Refusing(Fleet())
    await gateway.start()
    async with client(gateway) as opened, opened.session() as session:
        answers = await asyncio.gather(
            *(ids(session.generate("tiny", "hi")) for _ in range(3)), return_exceptions=True
        )
    await gateway.stop()
    assert [type(answer) for answer in answers] == [Unauthenticated] * 3
    assert len({id(answer) for answer in answers}) == 3
