"""Hot tenants are decided on slices; all gateways together admit no more than their rates."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.quotas.hot_tenants import SliceSettings, TenantSlices
from services.core.errors import OverQuota, RequestRateExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.ports.limiter import NO_PRICE, Reservation
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock

RATE = Limit(LimitKind.REQUESTS, 600_000)
TOKENS = Limit(LimitKind.TOKENS, 6_000_000)
SLOTS = Limit(LimitKind.CONCURRENCY, 1000)


class CountedStore(MemoryLimiter):
    """Counts the calls that a shared store would get."""

    calls = 0

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        self.calls += 1
        await super().take(tenant_id, claims)

    async def admit(self, tenant_id: str, request_id: str, *rest: Any, **named: Any) -> Reservation:
        self.calls += 1
        return await super().admit(tenant_id, request_id, *rest, **named)


class NeverAtOnce(GatewayLimiter):
    """Decides on the way of what has to wait for the store."""

    def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Awaitable[Reservation]:
        return self._admit(tenant_id, request_id, limits, claims, price)

    def reserve(
        self, reservation: Reservation, claims: Sequence[Claim], price: Price
    ) -> Awaitable[Reservation]:
        return self._reserve(reservation, claims, price)


async def run_request(
    limiter: GatewayLimiter, number: int, *, rate: Limit = RATE, tokens: int = 0, used: int = 0
) -> bool:
    """Return whether the request was admitted."""
    try:
        reservation = await limiter.admit("t", f"r{number}", [rate])
        if tokens:
            reservation = await limiter.reserve(reservation, [Claim(TOKENS, tokens)], Price())
    except OverQuota:
        return False
    await limiter.settle(reservation, Usage(used, 0))
    return True


async def test_the_store_sees_one_decision_in_a_hundred_of_a_hot_tenant() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    for number in range(10_000):  # 5,000 a second
        assert await run_request(limiter, number)
        clock.now_s += 0.0002
    warm = store.calls
    for number in range(10_000, 30_000):
        assert await run_request(limiter, number)
        clock.now_s += 0.0002
    assert store.calls - warm <= 200


async def test_a_quiet_tenant_is_decided_in_the_store() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    for number in range(100):
        assert await run_request(limiter, number)
        clock.now_s += 0.1
    assert store.calls == 100


async def test_a_rejection_that_is_repeated_without_the_store_states_the_rate_of_its_time() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    rate = Limit(LimitKind.REQUESTS, 600)
    while await run_request(limiter, store.calls, rate=rate):
        pass
    with pytest.raises(RequestRateExceeded) as first:
        await limiter.admit("t", "first", [rate])
    calls = store.calls
    clock.now_s += 0.04
    with pytest.raises(RequestRateExceeded) as second:
        await limiter.admit("t", "second", [rate])
    assert store.calls == calls
    before, after = first.value.request_rate, second.value.request_rate
    assert before is not None
    assert after is not None
    assert (before.limit, before.remaining, after.remaining) == (600, 0, 0)
    assert after.reset_s == pytest.approx(before.reset_s - 0.04)


async def test_slots_are_never_leased() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    for number in range(1000):
        reservation = await limiter.admit("t", f"r{number}", [RATE, SLOTS])
        await limiter.settle(reservation, Usage(0, 0))
    assert store.calls == 1000


async def test_limits_of_end_users_are_never_leased() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    user = Limit(LimitKind.REQUESTS, 100_000, Scope.USER, "u")
    for number in range(1000):
        await limiter.admit("t", f"r{number}", [RATE, user])
    assert store.calls == 1000


async def test_requests_that_are_settled_elsewhere_are_not_kept_for_ever() -> None:
    """As those under an idempotency key are: their record settles them."""
    clock = HandClock()
    limiter = GatewayLimiter(CountedStore(clock), clock)
    for number in range(40_000):
        await limiter.admit("t", f"r{number}", [RATE])
        clock.now_s += 0.0005
    assert limiter.leased <= 16_384


@pytest.mark.parametrize("gateways", [1, 3])
@pytest.mark.parametrize("seed", range(2))
async def test_all_gateways_together_admit_no_more_than_the_rate(gateways: int, seed: int) -> None:
    clock, rng = HandClock(), Random(seed)
    store = CountedStore(clock)
    limiters = [GatewayLimiter(store, clock, gateways=lambda: gateways) for _ in range(gateways)]
    rate, admitted = Limit(LimitKind.REQUESTS, 12_000), 0
    for number in range(16_000):  # 2,000 a second for 8 s, at a rate of 200 with a burst of a minute's
        admitted += await run_request(rng.choice(limiters), number, rate=rate, tokens=1, used=1)
        clock.now_s += 0.0005
    most = rate.limit + rate.limit / 60 * 8
    assert most - rate.limit * SliceSettings().slice_ratio - 1 <= admitted <= most + 1


async def test_a_rate_that_is_used_up_rejects_with_the_time_to_wait() -> None:
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    small = Limit(LimitKind.REQUESTS, 1200)
    admitted, waits_s = 0, []
    for number in range(3000):
        try:
            await limiter.admit("t", f"r{number}", [small])
            admitted += 1
        except RequestRateExceeded as error:
            waits_s.append(error.retry_after_s or 0.0)
        clock.now_s += 0.001
    assert 0 < min(waits_s) <= max(waits_s) <= 0.05 + 1e-6
    assert 1200 <= admitted <= 1200 + 3 * 20 + 1
    assert store.calls < 1500


async def test_tokens_are_corrected_in_the_slice() -> None:
    clock = HandClock()
    limiter = GatewayLimiter(CountedStore(clock), clock)
    for number in range(4000):  # claims 100,000 tokens a second, uses a tenth
        assert await run_request(limiter, number, tokens=100, used=10)
        clock.now_s += 0.001
    store = MemoryLimiter(clock)
    exact = GatewayLimiter(store, clock)
    rejected = 0
    for number in range(20_000):
        rejected += not await run_request(exact, number, tokens=100, used=100)
        clock.now_s += 0.001
    assert rejected == 0, "100,000 tokens a second is the rate"


async def test_a_larger_request_than_was_rejected_before_is_not_taken_for_it() -> None:
    clock = HandClock()
    limiter = GatewayLimiter(CountedStore(clock), clock)
    few = Limit(LimitKind.TOKENS, 1000)
    for number in range(300):
        await limiter.admit("t", f"r{number}", [RATE])
    reservation = await limiter.admit("t", "a", [RATE])
    await limiter.reserve(reservation, [Claim(few, 900)], Price())
    large = await limiter.admit("t", "b", [RATE])
    with pytest.raises(TokenRateExceeded):
        await limiter.reserve(large, [Claim(few, 500)], Price())
    small = await limiter.admit("t", "c", [RATE])
    await limiter.reserve(small, [Claim(few, 50)], Price())


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_decided_at_once_is_decided_alike(seed: int) -> None:
    """The same requests, some of them in flight together: the same outcomes and calls of the store."""
    clock, rng = HandClock(), Random(seed)
    stores = CountedStore(clock), CountedStore(clock)
    limiters = GatewayLimiter(stores[0], clock), NeverAtOnce(stores[1], clock)
    limits = [RATE], [RATE, SLOTS], [Limit(LimitKind.REQUESTS, 6000)], [Limit(LimitKind.REQUESTS, 0)]
    claims = (
        [Claim(TOKENS, 40), Claim(Limit(LimitKind.TOKENS, 0), 9)],
        [Claim(Limit(LimitKind.MONTH_MICROS, 9))],
    )
    running: list[tuple[Reservation, ...]] = []
    outcomes: list[list[str]] = [[], []]
    for number in range(6000):
        due, wanted, used = rng.choice(limits), rng.choices(claims, [9, 1])[0], Usage(rng.randrange(60), 0)
        held = []
        for limiter, outcome in zip(limiters, outcomes, strict=True):
            try:
                reservation = await limiter.admit("t", f"r{number}", due)
                held.append(reservation)
                outcome.append(str(await limiter.reserve(reservation, wanted, Price())))
            except OverQuota as error:
                outcome.append(f"{error.reason} {error.retry_after_s}")
        running.append(tuple(held))
        if len(running) > 5:
            ended = running.pop(rng.randrange(len(running)))
            for limiter, reservation in zip(limiters, ended, strict=False):
                await limiter.settle(reservation, used)
        clock.now_s += 0.0005
    assert outcomes[0] == outcomes[1]
    assert stores[0].calls == stores[1].calls
    assert limiters[0].leased == limiters[1].leased


async def test_an_answer_that_nobody_awaits_is_never_asked_for() -> None:
    """A task that is to await it may be refused by a process that ends."""
    clock = HandClock()
    store = CountedStore(clock)
    limiter = GatewayLimiter(store, clock)
    held = await limiter.admit("t", "r1", [RATE])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        limiter.admit("t", "r2", [RATE])
        limiter.reserve(held, [Claim(TOKENS, 1)], Price())
        limiter.settle(held, Usage(1, 0))
    assert found == []
    assert store.calls == 1


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=80))
def test_what_is_taken_never_exceeds_what_was_added(steps: list[tuple[int, bool]]) -> None:
    slices, added, taken = TenantSlices(SliceSettings()), 0, 0
    limit = Limit(LimitKind.TOKENS, 10_000)
    for amount, adds in steps:
        claims = (Claim(limit, amount),)
        if adds:
            slices.add(claims, 0.0)
            added += amount
        elif slices.take(claims, 0.0):
            taken += amount
        assert taken <= added
