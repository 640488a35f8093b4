"""Limits of keys and end users, bounds of one request, budgets, and the ticket that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from services.core.errors import (
    BudgetExceeded,
    ConcurrencyExceeded,
    InvalidInput,
    PromptTooLong,
    RequestRateExceeded,
    TokenRateExceeded,
    UsageUnrecorded,
)
from services.core.generation import Principal
from services.core.limits import LimitKind, Price, UsageLimits
from services.core.records import (
    BUDGETS,
    DEPLOYMENTS,
    EACH_USER,
    KEYS,
    TENANTS,
    ApiKey,
    Budget,
    KeyRole,
    Meta,
    Tenant,
)
from services.gateway.service_types import GatewayLimits
from tests.support.waiting import until
from tests.unit.gateway.requests.test_admission import CLOCK, Gateway
from tests.unit.gateway.requests.test_request import emit, ended

PRICE = Price(input_micros=1_000_000, cached_micros=0, output_micros=2_000_000)  # 1 and 2 a token


class Metered(Gateway):
    """One tenant with a key ``key-acme``, whose limits a test sets."""

    def __init__(self, fleet: Any) -> None:
        super().__init__(fleet, GatewayLimits())
        self._fleet = fleet

    def limit(self, *, key: UsageLimits | None = None, **tenant: Any) -> None:
        self._fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), **tenant))
        record = ApiKey(Meta("key-acme"), KeyRole.TENANT, "h", "acme", limits=key or UsageLimits())
        self._fleet.keys.put(KEYS + "key-acme", record)

    def price(self, price: Price) -> None:
        held = self._fleet.deployments.view[DEPLOYMENTS + "chat-small"].record
        self._fleet.deployments.put(DEPLOYMENTS + "chat-small", replace(held, price=price))

    def budget(self, name: str, **fields: Any) -> None:
        self.budgets.put(BUDGETS + name, Budget(Meta(name), "acme", **fields))


@pytest.fixture
async def gateway(fleet: Any) -> AsyncIterator[Metered]:
    gateway = Metered(fleet)
    gateway.limit()
    yield gateway
    assert gateway.supervisor.healthy, gateway.supervisor.failures
    assert await gateway.limiter.concurrency("acme") == 0
    await gateway.supervisor.close()


async def test_a_keys_rate_is_its_own(gateway: Metered) -> None:
    gateway.limit(key=UsageLimits(requests_per_minute=1))
    await gateway.ask()
    with pytest.raises(RequestRateExceeded, match="key") as caught:
        await gateway.ask()
    assert caught.value.metadata["scope"] == "key"
    assert caught.value.retry_after_s == pytest.approx(60, abs=5)


async def test_each_end_user_has_limits_of_its_own(gateway: Metered) -> None:
    gateway.limit(user_limits=UsageLimits(requests_per_minute=1))
    await gateway.ask(user="ann")
    with pytest.raises(RequestRateExceeded, match="user"):
        await gateway.ask(user="ann")
    await gateway.ask(user="bob")
    for _ in range(3):
        await gateway.ask()


async def test_the_end_user_of_a_token_is_its_owner(gateway: Metered) -> None:
    gateway.limit(user_limits=UsageLimits(requests_per_minute=1))

    def owner(name: str) -> Principal:
        return Principal(
            f"token:{name}", KeyRole.TENANT, "acme", subject=name, issuer="https://id.example.com"
        )

    await gateway.ask(caller=owner("ann"))
    for user in ("", "ann", "bob"):  # another name in the request is no way around
        with pytest.raises(RequestRateExceeded, match="user"):
            await gateway.ask(caller=owner("ann"), user=user)
    await gateway.ask(caller=owner("bob"), user="ann")


async def test_slots_of_an_end_user_are_its_own(gateway: Metered) -> None:
    gateway.limit(user_limits=UsageLimits(max_concurrency=1))
    gateway.gate.clear()
    running = asyncio.create_task(gateway.ask("a", user="ann"))
    await until(lambda: gateway.encoded == 1)
    with pytest.raises(ConcurrencyExceeded):
        await gateway.ask("b", user="ann")
    gateway.gate.set()
    await running
    await gateway.ask("c", user="ann")


async def test_input_and_output_rates_are_apart(gateway: Metered) -> None:
    gateway.limit(input_tokens_per_minute=4)
    with pytest.raises(TokenRateExceeded, match="input tokens"):
        await gateway.ask("a b c d e f g h")
    gateway.limit(output_tokens_per_minute=30)
    await gateway.ask(max_output_tokens=30)
    answer = await gateway.ask(max_output_tokens=20)
    assert answer.accepted.token_rate.limit == 30


async def test_the_headers_state_the_scope_with_the_least_room(gateway: Metered) -> None:
    gateway.limit(key=UsageLimits(requests_per_minute=10), requests_per_minute=100, tokens_per_minute=1000)
    accepted = (await gateway.ask(max_output_tokens=5)).accepted
    assert (accepted.request_rate.limit, accepted.request_rate.remaining) == (10, 9)
    assert accepted.token_rate.limit == 1000


async def test_a_rejection_states_the_rates_of_its_caller(gateway: Metered) -> None:
    gateway.limit(key=UsageLimits(requests_per_minute=10), requests_per_minute=100, tokens_per_minute=100)
    with pytest.raises(TokenRateExceeded) as caught:
        for _ in range(10):
            await gateway.ask(" ".join("x" * 60))
    rate, tokens = caught.value.request_rate, caught.value.token_rate
    assert rate is not None
    assert tokens is not None
    assert (rate.limit, rate.remaining) == (10, 8), "a rejected request counts"
    assert (tokens.limit, tokens.remaining < 60) == (100, True)


async def test_an_output_above_the_limit_is_rejected_and_an_absent_one_capped(gateway: Metered) -> None:
    gateway.limit(key=UsageLimits(max_output_tokens=10), max_output_tokens=20)
    with pytest.raises(InvalidInput, match="max_output_tokens of the key, 10") as caught:
        await gateway.ask(max_output_tokens=11)
    assert caught.value.metadata["field"] == "max_output_tokens"
    await gateway.ask(max_output_tokens=None)
    assert gateway.tickets[-1].reserved_tokens == 3 + 10


async def test_a_context_above_the_limit_is_rejected_and_names_it(gateway: Metered) -> None:
    gateway.limit(user_limits=UsageLimits(max_context_tokens=20))
    with pytest.raises(PromptTooLong, match="max_context_tokens of the user of 20"):
        await gateway.ask(max_output_tokens=18, user="ann")
    await gateway.ask(max_output_tokens=None, user="ann")
    assert gateway.tickets[-1].reserved_tokens == 20
    await gateway.ask(max_output_tokens=18)


async def test_a_timeout_above_the_limit_is_rejected_and_an_absent_one_capped(gateway: Metered) -> None:
    gateway.limit(max_timeout_s=2.5)
    with pytest.raises(InvalidInput, match=r"max_timeout of the tenant, 2\.5 s") as caught:
        await gateway.ask(timeout=Duration(seconds=3))
    assert caught.value.metadata["field"] == "timeout"
    await gateway.ask(timeout=Duration(seconds=2))
    await gateway.ask()
    assert gateway.tickets[-1].expire_unix_s <= CLOCK.unix_s() + 2.5 + 1


async def test_the_ticket_carries_what_was_reserved(gateway: Metered) -> None:
    await gateway.ask(max_output_tokens=7, choices=3)
    ticket = gateway.tickets[-1]
    assert (ticket.tenant_id, ticket.reserved_tokens, ticket.choices) == ("acme", 3 + 7, 3)


async def test_a_budget_is_claimed_by_the_worst_case_and_charged_by_use(gateway: Metered) -> None:
    gateway.price(PRICE)
    gateway.budget("all", limit_micros=23)
    answer = await gateway.ask(max_output_tokens=10)
    usage = answer.finished.usage
    (state,) = await gateway.limiter.spent("acme", Budget(Meta("all"), "acme", limit_micros=23).limits())
    assert state.settled_micros == PRICE.cost_micros(usage) == 5
    assert state.reserved_micros == 0
    with pytest.raises(BudgetExceeded) as caught:
        await gateway.ask(max_output_tokens=8)
    assert (caught.value.metadata["scope"], caught.value.metadata["kind"]) == (
        "tenant",
        LimitKind.MONTH_MICROS,
    )
    gateway.budget("all", limit_micros=24)
    await gateway.ask(max_output_tokens=8)


async def test_budgets_of_day_key_and_user_hold_together(gateway: Metered) -> None:
    gateway.price(PRICE)
    gateway.budget("day", day_limit_micros=100)
    gateway.budget("key", key="key-acme", limit_micros=100)
    gateway.budget("users", user=EACH_USER, limit_micros=12)
    gateway.budget("eve", user="eve", limit_micros=1)
    await gateway.ask(max_output_tokens=4, user="ann")
    with pytest.raises(BudgetExceeded, match="user"):
        await gateway.ask(max_output_tokens=4, user="ann")
    await gateway.ask(max_output_tokens=4, user="bob")
    with pytest.raises(BudgetExceeded):
        await gateway.ask(max_output_tokens=1, user="eve")
    gateway.budget("day", day_limit_micros=10)
    with pytest.raises(BudgetExceeded, match="day"):
        await gateway.ask(max_output_tokens=1)
    gateway.price(Price())
    await gateway.ask(max_output_tokens=1)


async def test_a_tenant_with_budgets_is_not_served_while_its_use_cannot_be_recorded(gateway: Metered) -> None:
    gateway.price(PRICE)
    gateway.unrecorded = "the outbox is full"
    await gateway.ask()
    assert [event.budgeted for event in gateway.reported] == [False]
    gateway.budget("all", limit_micros=1000)
    encoded = gateway.encoded
    with pytest.raises(UsageUnrecorded, match="the outbox is full") as caught:
        await gateway.ask()
    assert caught.value.retry_after_s
    assert gateway.encoded == encoded, "rejected before it costs anything"
    assert len(gateway.reported) == 1
    gateway.unrecorded = ""
    await gateway.ask()
    assert [event.budgeted for event in gateway.reported] == [False, True]


@pytest.mark.parametrize("leaves", [False, True])
async def test_use_is_reported_once_it_is_settled(
    gateway: Metered, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """The ledger would have what the limiter never charged if the gateway died between them."""
    settle, settling, answers = gateway.limiter.settle, asyncio.Event(), asyncio.Event()

    async def slow(*what: Any, **how: Any) -> None:
        settling.set()
        await answers.wait()
        assert gateway.reported == [] or leaves
        await settle(*what, **how)

    monkeypatch.setattr(gateway.limiter, "settle", slow)
    gateway.price(PRICE)
    asking = asyncio.create_task(gateway.ask())
    await settling.wait()
    assert gateway.reported == []
    if leaves:
        asking.cancel()
        await asyncio.wait({asking})
    answers.set()
    await until(lambda: len(gateway.reported) == 1)
    await asyncio.wait({asking})
    assert asking.cancelled() == leaves


async def test_use_above_the_prediction_is_reserved_while_the_request_runs(gateway: Metered) -> None:
    gateway.limit(output_tokens_per_minute=1000)
    for _ in range(40):
        await gateway.ask()  # a token each: so the prediction is short
    gateway.workers.scripts[:] = [emit(70, None), *[emit(1, ended(1))] * 2]
    running = asyncio.create_task(gateway.ask(max_output_tokens=80))
    await until(lambda: gateway.service.buffered_tokens == 0 and len(gateway.workers.credits) > 0)
    before = (await gateway.ask(max_output_tokens=1)).accepted.token_rate.remaining
    await gateway.service.flush()
    after = (await gateway.ask(max_output_tokens=1)).accepted.token_rate.remaining
    assert 60 <= before - after <= 70, "what it used so far, above the prediction"
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_the_prediction_follows_the_outputs_of_the_tenant(gateway: Metered) -> None:
    gateway.limit(output_tokens_per_minute=1000)
    for _ in range(40):
        await gateway.ask(max_output_tokens=80)
    before = (await gateway.ask(max_output_tokens=80)).accepted.token_rate.remaining
    assert before > 1000 - 41 * 2 - 10, "a token each, not eighty"


async def test_a_prompt_known_without_text_work_is_admitted_with_its_tokens(gateway: Metered) -> None:
    gateway.limit(tokens_per_minute=1000, requests_per_minute=6)

    async def claimed(prompt: str = "a b") -> list[LimitKind]:
        await gateway.ask(prompt)
        return [claim.limit.kind for claim in gateway.limiter.admitted[-1].claims]

    assert await claimed() == [], "a text is read after its request is admitted"
    assert await claimed() == [LimitKind.TOKENS]
    digest = gateway.workers.started[0].generation.version_digest
    await gateway.quarantine.add(digest, "of another input", model="chat-small", deaths=2)
    assert await claimed() == [], "what may be refused reserves nothing"
    gateway.quarantine.drop(digest, "of another input")
    gateway.limit(tokens_per_minute=3, requests_per_minute=6)
    counted = len(gateway.limiter.admitted)
    with pytest.raises(TokenRateExceeded) as caught:
        await claimed("a b c d e f")
    with pytest.raises(TokenRateExceeded) as again:
        await claimed("a b c d e f")
    rates = [error.value.request_rate for error in (caught, again)]
    assert [rate.remaining for rate in rates if rate] == [2, 1], "a rejected request counts once"
    assert len(gateway.limiter.admitted) == counted + 2
