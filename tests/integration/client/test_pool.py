"""Which gateway is used next, who is left alone, and what a retry costs: over real channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest

from fairway.client import Client, ClientOptions, Closed, FairwayError, Options, RetryPolicy, Tokens
from fairway.client.endpoints import Endpoint, EndpointPool, open_endpoints
from tests.integration.client.scripted import Refuse, ScriptedGateway, token
from tests.support.waiting import until

Pair = tuple[ScriptedGateway, ScriptedGateway]
LOST = Refuse(grpc.StatusCode.UNAVAILABLE)
# A retry needs a token of the budget, and there are none: what is sent again all the same was free.
NOTHING = RetryPolicy(
    first_delay_s=0.001, max_delay_s=0.005, budget_ratio=0, budget_floor=0, budget_floor_per_s=0
)
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.005)


class Rig:
    """A pool whose clock the test moves."""

    def __init__(self, gateways: Pair) -> None:
        self.now_s = 100.0
        addresses = [one.address for one in gateways]
        self.first, self.second = open_endpoints(addresses, None, 1 << 20, now=lambda: self.now_s)
        self.pool = EndpointPool([self.first, self.second], now=lambda: self.now_s, rng=Random(3))

    def fail(self, reason: str, retry_after_s: float | None = None) -> None:
        self.pool.failed(self.first, FairwayError("x", reason=reason, retry_after_s=retry_after_s))


@pytest.fixture
async def rig(gateways: Pair) -> AsyncIterator[Rig]:
    rig = Rig(gateways)
    yield rig
    await rig.pool.close()


async def until_down(endpoint: Endpoint, *, down: bool) -> None:
    await until(lambda: endpoint.down is down and endpoint.connected is not down)


@pytest.mark.parametrize(
    ("reason", "avoided"),
    [
        ("CONNECTION_LOST", True),
        ("DRAINING", True),
        ("QUEUE_FULL", False),
        ("NO_WORKER_AVAILABLE", False),
        ("OVER_QUOTA", False),
        ("DEADLINE_EXCEEDED", False),
    ],
)
async def test_a_gateway_is_left_alone_for_its_own_faults_only(rig: Rig, reason: str, avoided: bool) -> None:
    rig.fail(reason)
    assert rig.pool.is_avoided(rig.first) is avoided
    assert not rig.pool.is_avoided(rig.second)


async def test_an_answer_of_any_kind_readmits_and_a_deadline_is_none(rig: Rig) -> None:
    rig.fail("CONNECTION_LOST")
    rig.now_s += 10
    rig.fail("DEADLINE_EXCEEDED")
    assert rig.first.failures.count == 1, "silence until the deadline proves nothing"
    rig.fail("NOT_FOUND")
    assert rig.first.failures.count == 0


async def test_the_other_gateway_counts_while_it_is_there_and_not_avoided(rig: Rig, gateways: Pair) -> None:
    await until_down(rig.second, down=False)
    assert rig.pool.has_other(rig.first)
    rig.fail("DRAINING", retry_after_s=5)
    assert rig.pool.has_other(rig.first)
    assert not rig.pool.has_other(rig.second), "the only other one drains"
    await gateways[1].stop()
    await until_down(rig.second, down=True)
    assert not rig.pool.has_other(rig.first), "the only other one is down"


async def test_a_gateway_that_is_down_is_passed_over_however_idle_it_is(rig: Rig, gateways: Pair) -> None:
    await gateways[0].stop()
    await until_down(rig.first, down=True)
    await until_down(rig.second, down=False)
    taken = [await rig.pool.take(1.0) for _ in range(20)]
    assert taken == [rig.second] * 20
    assert (rig.first.in_flight, rig.second.in_flight) == (0, 20)
    for endpoint in taken:
        rig.pool.release(endpoint)
    assert rig.second.in_flight == 0


def client(*gateways: ScriptedGateway, retry: RetryPolicy) -> Client:
    options = ClientOptions(retry=retry, idempotency=True)
    return Client([gateway.address for gateway in gateways], api_key="secret", options=options)


async def test_a_call_that_a_full_gateway_refused_goes_to_another(gateways: Pair) -> None:
    first, second = gateways
    async with client(*gateways, retry=QUICK) as opened:
        for endpoint in opened._core().pool._endpoints.values():
            await until_down(endpoint, down=False)
        for _ in range(10):
            first.faults = second.faults = type(first.faults)(
                [Refuse(grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL")]
            )
            before = (first.calls, second.calls)
            await opened.complete("tiny", "hi")
            assert (first.calls - before[0], second.calls - before[1]) == (1, 1)


def source_of(opened: Client, carrier: str) -> Any:
    return opened.session() if carrier == "session" else opened


@pytest.mark.parametrize("carrier", ["stream", "session"])
async def test_attaching_to_what_runs_takes_no_budget(gateways: Pair, carrier: str) -> None:
    gateways[0].faults += [Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=count) for count in (0, 2, 4)]
    async with client(gateways[0], retry=NOTHING) as opened:
        stream = source_of(opened, carrier).generate("tiny", "hi", Options(max_output_tokens=6))
        events = [event async for event in stream]
    ids = [one for event in events if isinstance(event, Tokens) for one in event.ids]
    assert ids == [token(1, position) for position in range(6)]
    assert stream.attempts == 4


@pytest.mark.parametrize("carrier", ["stream", "session"])
@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (Refuse(grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL"), "mine"),  # nothing runs there
        (Refuse(grpc.StatusCode.UNAVAILABLE, after_tokens=0), ""),  # nothing to attach to it by
    ],
)
async def test_what_starts_anew_takes_of_the_budget(
    gateways: Pair, carrier: str, fault: Refuse, key: str
) -> None:
    gateways[0].faults.append(fault)
    async with client(gateways[0], retry=NOTHING) as opened:
        stream = source_of(opened, carrier).generate("tiny", "hi", idempotency_key=key)
        with pytest.raises(FairwayError) as caught:
            [event async for event in stream]
    assert "budget" in caught.value.gave_up
    assert gateways[0].calls == 1


async def test_a_connection_that_broke_before_anything_was_accepted_takes_of_the_budget(
    gateways: Pair,
) -> None:
    gateways[0].faults.append(LOST)
    async with client(gateways[0], retry=NOTHING) as opened:
        with pytest.raises(FairwayError) as caught:
            await opened.generate("tiny", "hi").collect()
    assert "budget" in caught.value.gave_up
    assert gateways[0].calls == 1


async def test_a_refusal_of_what_had_run_takes_of_the_budget(gateways: Pair) -> None:
    gateways[0].faults.append(Refuse(grpc.StatusCode.UNAVAILABLE, "STREAM_BROKEN", after_tokens=2))
    async with client(gateways[0], retry=NOTHING) as opened:
        with pytest.raises(FairwayError) as caught:
            await opened.generate("tiny", "hi").collect()
    assert "budget" in caught.value.gave_up
    assert caught.value.delivered_tokens == 2


async def test_closing_the_client_closes_channels_and_the_sessions_that_were_left_open(
    gateways: Pair,
) -> None:
    before = asyncio.all_tasks()
    async with client(gateways[0], retry=QUICK) as opened:
        session = opened.session()
        await session.generate("tiny", "hi").collect()
        assert session._tasks
        (endpoint,) = opened._core().pool._endpoints.values()
    assert not session._tasks
    with pytest.raises(Closed):
        session.generate("tiny", "hi")
    assert endpoint.in_flight == 0
    assert endpoint.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await gateways[0].stop()
    await until(lambda: len(asyncio.all_tasks()) <= len(before))


@pytest.mark.parametrize("carrier", ["stream", "session", "unary"])
async def test_an_answer_readmits_the_gateway(gateways: Pair, carrier: str) -> None:
    gateways[0].faults.append(LOST)
    async with client(gateways[0], retry=RetryPolicy(max_attempts=1)) as opened:
        (endpoint,) = opened._core().pool._endpoints.values()
        with pytest.raises(FairwayError):
            await opened.list_models()
        assert endpoint.failures.count == 1
        await until(lambda: not opened._core().pool.is_avoided(endpoint))
        if carrier == "unary":
            await opened.complete("tiny", "hi")
        else:
            await source_of(opened, carrier).generate("tiny", "hi").collect()
        assert endpoint.failures.count == 0
