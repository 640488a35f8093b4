"""What every ``Limiter`` does, checked on a real Redis and on the in-memory one alike."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from services.adapters.memory.limiter import MemoryLimiter
from services.adapters.quotas.fallback_limiter import FallbackLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, RequestRateExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.ports.limiter import Limits, Reservation
from services.runtime.clock import SystemClock

AnyLimiter = RedisLimiter | MemoryLimiter
Make = Callable[[float], AnyLimiter]
NONE = Limits()


@pytest_asyncio.fixture(params=["redis", "memory"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        def of_lease(lease_s: float) -> AnyLimiter:
            if request.param == "memory":
                return MemoryLimiter(SystemClock(), lease_s=lease_s)
            url: str = request.getfixturevalue("redis_url")
            limiter = RedisLimiter(url, SystemClock(), timeout_s=5.0, lease_s=lease_s)
            stack.push_async_callback(limiter.close)
            return limiter

        yield of_lease


@pytest.fixture
def limiter(make: Make) -> AnyLimiter:
    return make(60.0)


@pytest.fixture
def tenant() -> str:
    return f"acme-{uuid.uuid4().hex}"


async def test_concurrency_is_capped_until_one_settles(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(max_concurrency=2)
    first = await limiter.admit(tenant, "r1", limits)
    assert first == Reservation(tenant, "r1")
    await limiter.admit(tenant, "r2", limits)
    with pytest.raises(ConcurrencyExceeded) as caught:
        await limiter.admit(tenant, "r3", limits)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 1
    assert caught.value.metadata == {"limit": "2"}
    assert await limiter.concurrency(tenant) == 2
    await limiter.settle(first, Usage(1, 1))
    await limiter.admit(tenant, "r3", limits)
    assert await limiter.concurrency(tenant) == 2


async def test_simultaneous_requests_get_exactly_the_cap(limiter: AnyLimiter, tenant: str) -> None:
    outcomes = await asyncio.gather(
        *(limiter.admit(tenant, f"r{n}", Limits(max_concurrency=7)) for n in range(40)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 7
    assert sum(isinstance(outcome, ConcurrencyExceeded) for outcome in outcomes) == 33


async def test_rate_admits_a_minutes_worth_then_says_when(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=3)
    for number in range(3):
        await limiter.admit(tenant, f"r{number}", limits)
    with pytest.raises(RequestRateExceeded) as caught:
        await limiter.admit(tenant, "r3", limits)
    assert caught.value.retry_after_s is not None
    assert 19 < caught.value.retry_after_s <= 20
    assert caught.value.metadata == {"limit": "3"}
    await limiter.admit(tenant + "-other", "r3", limits)


async def test_the_stated_wait_is_exact(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=300)  # one per 0.2 s
    admitted = 0
    wait_s = 0.0
    while not wait_s:
        wait_s = await wait_of(limiter, tenant, f"r{admitted}", limits)
        admitted += not wait_s
    assert admitted >= 300, "a minute's worth is let in at once"
    for number in range(3):
        assert 0 < wait_s <= 0.2
        await asyncio.sleep(wait_s / 2)
        wait_s = await wait_of(limiter, tenant, "early", limits)
        assert wait_s, "let in before the stated time"
        await asyncio.sleep(wait_s)
        assert not await wait_of(limiter, tenant, f"w{number}", limits), "turned away at the stated time"
        wait_s = await wait_of(limiter, tenant, "next", limits)


async def wait_of(limiter: AnyLimiter, tenant: str, request_id: str, limits: Limits) -> float:
    """Seconds to wait, or 0 when the request was let in."""
    try:
        await limiter.admit(tenant, request_id, limits)
        return 0.0
    except RequestRateExceeded as error:
        return error.retry_after_s or 0.0


async def test_a_rejection_takes_nothing(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=2, max_concurrency=1)
    held = await limiter.admit(tenant, "r1", limits)
    for number in range(5):
        with pytest.raises(ConcurrencyExceeded):
            await limiter.admit(tenant, f"c{number}", limits)
    await limiter.settle(held, Usage(1, 1))
    held = await limiter.admit(tenant, "r2", limits)
    await limiter.settle(held, Usage(1, 1))
    for number in range(5):
        with pytest.raises(RequestRateExceeded):
            await limiter.admit(tenant, f"d{number}", limits)
    assert await limiter.concurrency(tenant) == 0


async def test_the_same_request_counts_once_while_held(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=2, max_concurrency=1)
    held = await limiter.admit(tenant, "r1", limits)
    for _ in range(4):
        assert await limiter.admit(tenant, "r1", limits) == held
    assert await limiter.concurrency(tenant) == 1
    await limiter.settle(held, Usage(1, 1))
    await limiter.admit(tenant, "r2", limits)
    await limiter.settle(Reservation(tenant, "r2"), Usage(1, 1))
    with pytest.raises(RequestRateExceeded):
        await limiter.admit(tenant, "r3", limits)


async def test_no_limit_counts_but_never_rejects(limiter: AnyLimiter, tenant: str) -> None:
    for number in range(50):
        await limiter.admit(tenant, f"r{number}", NONE)
    assert await limiter.concurrency(tenant) == 50


async def test_a_lowered_limit_holds_at_once(limiter: AnyLimiter, tenant: str) -> None:
    for number in range(5):
        await limiter.admit(tenant, f"r{number}", Limits(requests_per_minute=100, max_concurrency=10))
    with pytest.raises(ConcurrencyExceeded):
        await limiter.admit(tenant, "x", Limits(max_concurrency=5))
    with pytest.raises(RequestRateExceeded):
        await limiter.admit(tenant, "x", Limits(requests_per_minute=5))
    await limiter.admit(tenant, "x", Limits(requests_per_minute=6, max_concurrency=6))


async def test_a_slot_lapses_unless_renewed(make: Make, tenant: str) -> None:
    limiter = make(0.4)
    limits = Limits(max_concurrency=2)
    kept = await limiter.admit(tenant, "kept", limits)
    left = await limiter.admit(tenant, "left", limits)
    for _ in range(3):
        await asyncio.sleep(0.2)
        await limiter.renew([kept])
    assert await limiter.concurrency(tenant) == 1
    await limiter.admit(tenant, "new", limits)
    with pytest.raises(ConcurrencyExceeded) as caught:
        await limiter.admit(tenant, "more", limits)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 0.4
    await limiter.renew([left])
    assert await limiter.concurrency(tenant) == 3, "a request that still runs holds its slot again"


async def test_a_late_renewal_does_not_bring_a_settled_request_back(limiter: AnyLimiter, tenant: str) -> None:
    reservations = [await limiter.admit(tenant, f"r{number}", NONE) for number in range(450)]
    await limiter.settle(reservations[3], Usage(1, 1))
    await limiter.renew([*reservations, await limiter.admit(tenant + "-other", "r", NONE)])
    assert await limiter.concurrency(tenant) == 449


async def test_usage_counts_once_however_often_it_is_settled(limiter: AnyLimiter, tenant: str) -> None:
    held = await limiter.admit(tenant, "r1", NONE)
    await asyncio.gather(*(limiter.settle(held, Usage(10, 5, 3)) for _ in range(8)))
    assert await limiter.usage(tenant) == Usage(10, 5, 3)
    again = await limiter.admit(tenant, "r1", NONE)
    await limiter.settle(again, Usage(1, 1, 1))
    assert await limiter.usage(tenant) == Usage(11, 6, 4)
    assert await limiter.concurrency(tenant) == 0


async def test_a_lapsed_request_is_still_counted(make: Make, tenant: str) -> None:
    limiter = make(0.1)
    held = await limiter.admit(tenant, "r1", NONE)
    await asyncio.sleep(0.2)
    await limiter.admit(tenant, "r2", NONE)
    await limiter.settle(held, Usage(7, 7))
    await limiter.settle(held, Usage(7, 7))
    assert await limiter.usage(tenant) == Usage(7, 7)


async def test_other_work_has_a_rate_of_its_own_and_holds_no_slot(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=3, max_concurrency=3)
    for number in range(3):
        await limiter.spend(tenant, limits)
        await limiter.admit(tenant, f"r{number}", limits)
    with pytest.raises(RequestRateExceeded) as caught:
        await limiter.spend(tenant, limits)
    assert caught.value.retry_after_s is not None
    assert 19 < caught.value.retry_after_s <= 20
    assert await limiter.concurrency(tenant) == 3
    for _ in range(50):
        await limiter.spend(tenant, NONE)


async def test_names_are_data(limiter: AnyLimiter, tenant: str) -> None:
    for name in ("}:slots", "ü\n*", "0", "-inf"):
        held = await limiter.admit(tenant + name, name, Limits(5, 5))
        assert await limiter.concurrency(tenant + name) == 1
        await limiter.settle(held, Usage(1, 2))
        assert await limiter.usage(tenant + name) == Usage(1, 2)


async def test_a_fallback_with_its_store_there_adds_nothing(limiter: AnyLimiter, tenant: str) -> None:
    clock = SystemClock()
    fallback = FallbackLimiter(limiter, MemoryLimiter(clock, local=True), clock)
    held = await fallback.admit(tenant, "r1", Limits(max_concurrency=1))
    assert held == Reservation(tenant, "r1", local=False)
    with pytest.raises(ConcurrencyExceeded):
        await fallback.admit(tenant, "r2", Limits(max_concurrency=1))
    await fallback.renew([held])
    assert await fallback.concurrency(tenant) == 1
    await fallback.settle(held, Usage(4, 2))
    assert await limiter.usage(tenant) == Usage(4, 2)
    assert (await fallback.concurrency(tenant), fallback.unsettled) == (0, 0)


async def test_tokens_are_admitted_up_to_a_minutes_worth_and_the_wait_is_stated(
    limiter: AnyLimiter, tenant: str
) -> None:
    limits = Limits(tokens_per_minute=6000)  # 100 a second
    first = await limiter.reserve_tokens(await limiter.admit(tenant, "r1", NONE), 5000, limits)
    assert (first.tokens, first.tokens_per_minute) == (5000, 6000)
    held = await limiter.admit(tenant, "r2", NONE)
    with pytest.raises(TokenRateExceeded) as caught:
        await limiter.reserve_tokens(held, 1050, limits)
    assert caught.value.metadata == {"limit": "6000", "tokens": "1050"}
    wait_s = caught.value.retry_after_s
    assert wait_s is not None
    assert 0.2 < wait_s <= 0.5
    await asyncio.sleep(wait_s)
    await limiter.reserve_tokens(held, 1050, limits)
    assert await limiter.concurrency(tenant) == 2, "a rejection keeps the slot"


async def test_more_tokens_than_a_minute_admits_never_fit(limiter: AnyLimiter, tenant: str) -> None:
    held = await limiter.admit(tenant, "r1", NONE)
    with pytest.raises(TokenRateExceeded, match="more than the limit of 100 per minute") as caught:
        await limiter.reserve_tokens(held, 101, Limits(tokens_per_minute=100))
    assert caught.value.retry_after_s is None
    await limiter.reserve_tokens(held, 100, Limits(tokens_per_minute=100))
    assert await limiter.reserve_tokens(held, 10**9, NONE) == held, "no limit counts nothing"


async def test_a_settlement_replaces_reserved_tokens_by_those_used(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(tokens_per_minute=1200)  # 20 a second

    async def room_for(tokens: int) -> bool:
        try:
            probe = await limiter.admit(tenant, f"probe-{uuid.uuid4().hex}", NONE)
            probe = await limiter.reserve_tokens(probe, tokens, limits)
        except TokenRateExceeded:
            return False
        await limiter.settle(probe, Usage(0, 0))
        return True

    held = await limiter.reserve_tokens(await limiter.admit(tenant, "r1", NONE), 1200, limits)
    assert not await room_for(300)
    for _ in range(3):  # once, however often it is settled
        await limiter.settle(held, Usage(100, 500))
    assert await room_for(600)
    assert not await room_for(750)
    held = await limiter.reserve_tokens(await limiter.admit(tenant, "r2", NONE), 100, limits)
    await limiter.settle(held, Usage(100, 1000))  # used more than reserved
    with pytest.raises(TokenRateExceeded) as caught:
        await limiter.reserve_tokens(await limiter.admit(tenant, "r3", NONE), 100, limits)
    assert caught.value.retry_after_s is not None
    assert 25 < caught.value.retry_after_s <= 30, "600 tokens above the limit, 20 a second"


async def test_simultaneous_reservations_take_exactly_the_tokens(limiter: AnyLimiter, tenant: str) -> None:
    held = [await limiter.admit(tenant, f"r{number}", NONE) for number in range(40)]
    outcomes = await asyncio.gather(
        *(limiter.reserve_tokens(one, 10, Limits(tokens_per_minute=75)) for one in held),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 7
    assert sum(isinstance(outcome, TokenRateExceeded) for outcome in outcomes) == 33


async def test_a_reservation_states_what_its_rates_have_left(limiter: AnyLimiter, tenant: str) -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=6000)
    await limiter.admit(tenant, "r1", limits)
    held = await limiter.admit(tenant, "r2", limits)
    assert held.request_rate is not None
    assert (held.request_rate.limit, held.request_rate.remaining) == (60, 58)
    assert 1.5 < held.request_rate.reset_s <= 2.0
    again = await limiter.admit(tenant, "r2", limits)
    assert (again.request_rate, again.token_rate) == (None, None)
    held = await limiter.reserve_tokens(held, 3000, limits)
    assert held.token_rate is not None
    assert (held.token_rate.limit, held.token_rate.remaining) == (6000, 3000)
    assert held.token_rate.reset_s == pytest.approx(30.0, abs=0.01)
    unlimited = await limiter.admit(tenant, "r3", NONE)
    assert (unlimited.request_rate, unlimited.token_rate) == (None, None)
