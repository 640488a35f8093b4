"""A key that the client made goes when it is what the server refuses; one of the caller's never does."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairway.client import Client, ClientOptions, FairwayError, Options, OverQuota, RetryPolicy, Unavailable
from tests.integration.client.scripted import Refuse, ScriptedGateway

Pair = tuple[ScriptedGateway, ScriptedGateway]
STORE = Refuse(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", retry_after_s=600)
KEYS = Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "IDEMPOTENCY_KEYS_EXCEEDED", retry_after_s=600)
LOST = Refuse(grpc.StatusCode.UNAVAILABLE)
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.005)
# A retry has to take from a budget in which there is nothing.
NOTHING = RetryPolicy(budget_ratio=0, budget_floor=0, budget_floor_per_s=0)
CARRIERS = pytest.mark.parametrize("carrier", ["complete", "stream", "session"])


def client(*gateways: ScriptedGateway, retry: RetryPolicy = NOTHING) -> Client:
    options = ClientOptions(retry=retry)
    return Client([gateway.address for gateway in gateways], api_key="secret", options=options)


async def ask(opened: Client, carrier: str, **more: Any) -> str:
    options = Options(max_output_tokens=3)
    if carrier == "complete":
        return (await opened.complete("tiny", "hi", options, **more)).text
    source: Any = opened if carrier == "stream" else opened.session()
    answer = await source.generate("tiny", "hi", options, **more).collect()
    return str(answer.text)


def keys(gateways: Pair) -> list[bool]:
    return [bool(body.idempotency_key) for body in gateways[0].fleet.bodies]


@CARRIERS
@pytest.mark.parametrize("refusal", [STORE, KEYS], ids=["store", "keys"])
async def test_it_goes_on_without_a_key_of_its_own(gateways: Pair, carrier: str, refusal: Refuse) -> None:
    gateways[0].faults.append(refusal)
    async with client(gateways[0]) as opened:
        assert await ask(opened, carrier) == "1000 1001 1002 "
    assert keys(gateways) == [True, False]


@CARRIERS
@pytest.mark.parametrize("refusal", [STORE, KEYS], ids=["store", "keys"])
async def test_the_key_of_the_caller_stays(gateways: Pair, carrier: str, refusal: Refuse) -> None:
    gateways[0].faults.append(refusal)
    async with client(gateways[0], retry=QUICK) as opened:
        with pytest.raises((Unavailable, OverQuota)) as caught:
            await ask(opened, carrier, idempotency_key="order-4711")
    assert (caught.value.reason, caught.value.retry_after_s) == (refusal.reason, 600)
    assert "deadline" in caught.value.gave_up
    assert keys(gateways) == [True]


@CARRIERS
async def test_a_key_under_which_something_may_run_stays(gateways: Pair, carrier: str) -> None:
    gateways[0].faults += [LOST, STORE]
    async with client(gateways[0], retry=QUICK) as opened:
        with pytest.raises(FairwayError) as caught:
            await ask(opened, carrier)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert keys(gateways) == [True, True]


@pytest.mark.parametrize("carrier", ["stream", "session"])
async def test_a_key_of_what_was_accepted_stays(gateways: Pair, carrier: str) -> None:
    broken = Refuse(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", after_tokens=0)
    gateways[0].faults.append(broken)
    async with client(gateways[0], retry=QUICK) as opened:
        assert await ask(opened, carrier) == "1000 1001 1002 "
    assert keys(gateways) == [True, True]


@CARRIERS
async def test_without_the_key_it_is_refused_like_any_other(gateways: Pair, carrier: str) -> None:
    gateways[0].faults += [STORE, STORE]
    async with client(gateways[0], retry=QUICK) as opened:
        with pytest.raises(Unavailable) as caught:
            await ask(opened, carrier)
    assert "deadline" in caught.value.gave_up
    assert keys(gateways) == [True, False]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
async def test_a_time_that_is_none_is_refused_at_once(gateways: Pair, wrong: float) -> None:
    async with client(gateways[0]) as opened:
        session = opened.session()
        with pytest.raises(ValueError, match="timeout_s must be above 0 seconds"):
            opened.generate("tiny", "hi", timeout_s=wrong)
        with pytest.raises(ValueError, match="timeout_s must be above 0 seconds"):
            session.generate("tiny", "hi", timeout_s=wrong)
        with pytest.raises(ValueError, match="timeout_s must be above 0 seconds"):
            await opened.complete("tiny", "hi", timeout_s=wrong)
        with pytest.raises(ValueError, match="timeout_s must be above 0 seconds"):
            await opened.list_models(timeout_s=wrong)
    with pytest.raises(ValueError, match="silence_timeout_s must be above 0 seconds"):
        ClientOptions(silence_timeout_s=wrong)
    assert gateways[0].calls == 0
