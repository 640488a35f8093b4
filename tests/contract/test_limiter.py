"""What every ``Limiter`` does, checked on a real Redis and on the in-memory one alike."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, RequestRateExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.core.limits import WORK, Claim, Limit, LimitKind, Scope
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from simulator.stores.limiter import MemoryLimiter
from tests.support.metered import PRICE, admit_metered, charged, limits
from tests.support.waiting import sure_within

AnyLimiter = RedisLimiter | MemoryLimiter
Make = Callable[[float], AnyLimiter]
NONE: tuple[Limit, ...] = ()
NOTHING = Usage(0, 0)


@pytest_asyncio.fixture(params=["redis", "memory"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        def of_lease(lease_s: float) -> AnyLimiter:
            if request.param == "memory":
                return MemoryLimiter(SystemClock(), lease_s=lease_s)
            url: str = request.getfixturevalue("redis_url")
            limiter = RedisLimiter(url, SystemClock(), timeout_s=5.0, lease_s=lease_s, grace_s=0.0)
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
    most = limits(slots=2)
    first = await limiter.admit(tenant, "r1", most)
    assert first == Reservation(tenant, "r1", claims=(Claim(most[1]),))
    await limiter.admit(tenant, "r2", most)
    with pytest.raises(ConcurrencyExceeded) as caught:
        await limiter.admit(tenant, "r3", most)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 1
    assert caught.value.metadata == {"limit": "2", "scope": "tenant", "kind": "concurrency"}
    assert await limiter.concurrency(tenant) == 2
    await limiter.settle(first, Usage(1, 1))
    await limiter.admit(tenant, "r3", most)
    assert await limiter.concurrency(tenant) == 2


async def test_simultaneous_requests_get_exactly_the_cap(limiter: AnyLimiter, tenant: str) -> None:
    outcomes = await asyncio.gather(
        *(limiter.admit(tenant, f"r{n}", limits(slots=7)) for n in range(40)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 7
    assert sum(isinstance(outcome, ConcurrencyExceeded) for outcome in outcomes) == 33


@sure_within(1.0)
async def test_rate_admits_a_minutes_worth_then_says_when(limiter: AnyLimiter, tenant: str) -> None:
    most = limits(3)
    for number in range(3):
        await limiter.admit(tenant, f"r{number}", most)
    with pytest.raises(RequestRateExceeded) as caught:
        await limiter.admit(tenant, "r3", most)
    assert caught.value.retry_after_s is not None
    assert 19 < caught.value.retry_after_s <= 20
    assert caught.value.metadata == {"limit": "3", "scope": "tenant", "kind": "requests"}
    await limiter.admit(tenant + "-other", "r3", most)


async def test_the_stated_wait_is_exact(limiter: AnyLimiter, tenant: str) -> None:
    most = limits(300)  # one per 0.2 s
    numbers = itertools.count()

    async def ask_s() -> float:
        return await wait_of(limiter, tenant, f"r{next(numbers)}", most)

    while not await ask_s():
        pass
    assert next(numbers) > 300, "a minute's worth is let in at once"
    judged = 0
    while judged < 3:
        asked_s = time.monotonic()
        if not (wait_s := await ask_s()):
            continue
        assert 0 < wait_s <= 0.2
        await asyncio.sleep(wait_s / 2)
        left_s = await ask_s()
        if not left_s:  # a busy machine asks too late: that is no early request
            assert time.monotonic() >= asked_s + wait_s, "let in before the stated time"
            continue
        await asyncio.sleep(left_s)
        assert not await ask_s(), "turned away at the stated time"
        judged += 1


async def wait_of(limiter: AnyLimiter, tenant: str, request_id: str, most: Sequence[Limit]) -> float:
    """Seconds to wait, or 0 when the request was let in."""
    try:
        await limiter.admit(tenant, request_id, most)
        return 0.0
    except RequestRateExceeded as error:
        return error.retry_after_s or 0.0


async def test_a_rejection_takes_nothing(limiter: AnyLimiter, tenant: str) -> None:
    most = limits(2, 1)
    held = await limiter.admit(tenant, "r1", most)
    for number in range(5):
        with pytest.raises(ConcurrencyExceeded):
            await limiter.admit(tenant, f"c{number}", most)
    await limiter.settle(held, Usage(1, 1))
    held = await limiter.admit(tenant, "r2", most)
    await limiter.settle(held, Usage(1, 1))
    for number in range(5):
        with pytest.raises(RequestRateExceeded):
            await limiter.admit(tenant, f"d{number}", most)
    assert await limiter.concurrency(tenant) == 0


async def test_the_same_request_counts_once_while_held(limiter: AnyLimiter, tenant: str) -> None:
    most = limits(2, 1)
    held = await limiter.admit(tenant, "r1", most)
    for _ in range(4):
        assert await limiter.admit(tenant, "r1", most) == held
    assert await limiter.concurrency(tenant) == 1
    await limiter.settle(held, Usage(1, 1))
    await limiter.admit(tenant, "r2", most)
    await limiter.settle(Reservation(tenant, "r2"), Usage(1, 1))
    with pytest.raises(RequestRateExceeded):
        await limiter.admit(tenant, "r3", most)


async def test_no_limit_counts_but_never_rejects(limiter: AnyLimiter, tenant: str) -> None:
    for number in range(50):
        await limiter.admit(tenant, f"r{number}", NONE)
    assert await limiter.concurrency(tenant) == 50


async def test_a_lowered_limit_holds_at_once(limiter: AnyLimiter, tenant: str) -> None:
    for number in range(5):
        await limiter.admit(tenant, f"r{number}", limits(6, 10))
    with pytest.raises(ConcurrencyExceeded):
        await limiter.admit(tenant, "x", limits(slots=5))
    with pytest.raises(RequestRateExceeded):
        await limiter.admit(tenant, "x", limits(5))
    await limiter.admit(tenant, "x", limits(6, 6))


@sure_within(0.75)
async def test_a_slot_lapses_unless_renewed(make: Make, tenant: str) -> None:
    limiter = make(0.4)
    most = limits(slots=2)
    kept = await limiter.admit(tenant, "kept", most)
    left = await limiter.admit(tenant, "left", most)
    for _ in range(3):
        await asyncio.sleep(0.2)
        await limiter.renew([(kept, NOTHING)])
    assert await limiter.concurrency(tenant) == 1
    await limiter.admit(tenant, "new", most)
    with pytest.raises(ConcurrencyExceeded) as caught:
        await limiter.admit(tenant, "more", most)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 0.4
    await limiter.renew([(left, NOTHING)])
    assert await limiter.concurrency(tenant) == 3, "a request that still runs holds its slot again"


async def test_a_late_renewal_does_not_bring_a_settled_request_back(limiter: AnyLimiter, tenant: str) -> None:
    reservations = [await limiter.admit(tenant, f"r{number}", NONE) for number in range(450)]
    await limiter.settle(reservations[3], Usage(1, 1))
    running = [*reservations, await limiter.admit(tenant + "-other", "r", NONE)]
    await limiter.renew([(held, NOTHING) for held in running])
    assert await limiter.concurrency(tenant) == 449


async def test_usage_counts_once_however_often_it_is_settled(limiter: AnyLimiter, tenant: str) -> None:
    held = await admit_metered(limiter, tenant, "r1")
    await asyncio.gather(*(limiter.settle(held, Usage(10, 5, 3)) for _ in range(8)))
    assert await charged(limiter, tenant) == Usage(10, 5, 3)
    again = await admit_metered(limiter, tenant, "r1")
    await limiter.settle(again, Usage(11, 5, 1))
    assert await charged(limiter, tenant) == Usage(11, 5, 3), "what is new of a request that goes on"
    assert await limiter.concurrency(tenant) == 0


async def test_a_lapsed_request_is_still_charged(make: Make, tenant: str) -> None:
    limiter = make(0.1)
    held = await admit_metered(limiter, tenant, "r1")
    await asyncio.sleep(0.2)
    await limiter.admit(tenant, "r2", NONE)
    await limiter.settle(held, Usage(7, 7))
    await limiter.settle(held, Usage(7, 7))
    assert await charged(limiter, tenant) == Usage(7, 7)


@sure_within(1.0)
async def test_other_work_has_a_rate_of_its_own_and_holds_no_slot(limiter: AnyLimiter, tenant: str) -> None:
    most, work = limits(3, 3), [Claim(Limit(LimitKind.REQUESTS, 3, name=WORK))]
    for number in range(3):
        await limiter.take(tenant, work)
        await limiter.admit(tenant, f"r{number}", most)
    with pytest.raises(RequestRateExceeded) as caught:
        await limiter.take(tenant, work)
    assert caught.value.request_rate is None, "it is not the rate of requests"
    assert caught.value.retry_after_s is not None
    assert 19 < caught.value.retry_after_s <= 20
    assert await limiter.concurrency(tenant) == 3
    for _ in range(50):
        await limiter.take(tenant, [Claim(Limit(LimitKind.REQUESTS, 0, name=WORK))])


async def test_names_are_data(limiter: AnyLimiter, tenant: str) -> None:
    for name in ("}:slots", "ü\n*", "0", "-inf"):
        held = await admit_metered(limiter, tenant + name, name, limits(5, 5))
        assert await limiter.concurrency(tenant + name) == 1
        await limiter.settle(held, Usage(1, 2))
        assert await charged(limiter, tenant + name) == Usage(1, 2)


async def test_a_gateway_with_its_store_there_adds_nothing(limiter: AnyLimiter, tenant: str) -> None:
    clock = SystemClock()
    gateway = GatewayLimiter(limiter, clock)
    held = await admit_metered(gateway, tenant, "r1", limits(slots=1))
    assert not held.local
    with pytest.raises(ConcurrencyExceeded):
        await gateway.admit(tenant, "r2", limits(slots=1))
    await gateway.renew([(held, NOTHING)])
    assert await limiter.concurrency(tenant) == 1
    await gateway.settle(held, Usage(4, 2))
    assert await charged(limiter, tenant) == Usage(4, 2)
    assert (await limiter.concurrency(tenant), gateway.unsettled) == (0, 0)


@sure_within(0.3)
async def test_tokens_are_admitted_up_to_a_minutes_worth_and_the_wait_is_stated(
    limiter: AnyLimiter, tenant: str
) -> None:
    rate = Limit(LimitKind.TOKENS, 6000)  # 100 a second
    first = await limiter.reserve(await limiter.admit(tenant, "r1", NONE), [Claim(rate, 5000)], PRICE)
    assert first.claims == (Claim(rate, 5000),)
    held = await limiter.admit(tenant, "r2", NONE)
    with pytest.raises(TokenRateExceeded) as caught:
        await limiter.reserve(held, [Claim(rate, 1050)], PRICE)
    assert caught.value.metadata == {"limit": "6000", "tokens": "1050", "scope": "tenant", "kind": "tokens"}
    wait_s = caught.value.retry_after_s
    assert wait_s is not None
    assert 0.2 < wait_s <= 0.5
    await asyncio.sleep(wait_s)
    await limiter.reserve(held, [Claim(rate, 1050)], PRICE)
    assert await limiter.concurrency(tenant) == 2, "a rejection keeps the slot"


async def test_more_tokens_than_a_minute_admits_never_fit(limiter: AnyLimiter, tenant: str) -> None:
    held, rate = await limiter.admit(tenant, "r1", NONE), Limit(LimitKind.TOKENS, 100)
    with pytest.raises(TokenRateExceeded, match="more than the limit of 100 per minute") as caught:
        await limiter.reserve(held, [Claim(rate, 101)], PRICE)
    assert caught.value.retry_after_s is None
    await limiter.reserve(held, [Claim(rate, 100)], PRICE)
    none = [Claim(Limit(LimitKind.TOKENS, 0), 10**9)]
    assert await limiter.reserve(held, none, PRICE) == held, "no limit counts nothing"


@sure_within(5.0)
async def test_a_settlement_replaces_reserved_tokens_by_those_used(limiter: AnyLimiter, tenant: str) -> None:
    rate = Limit(LimitKind.TOKENS, 1200)  # 20 a second

    async def room_for(tokens: int) -> bool:
        try:
            probe = await limiter.admit(tenant, f"probe-{uuid.uuid4().hex}", NONE)
            probe = await limiter.reserve(probe, [Claim(rate, tokens)], PRICE)
        except TokenRateExceeded:
            return False
        await limiter.settle(probe, Usage(0, 0))
        return True

    held = await limiter.reserve(await limiter.admit(tenant, "r1", NONE), [Claim(rate, 1200)], PRICE)
    assert not await room_for(300)
    for _ in range(3):  # once, however often it is settled
        await limiter.settle(held, Usage(100, 500))
    assert await room_for(600)
    assert not await room_for(750)
    held = await limiter.reserve(await limiter.admit(tenant, "r2", NONE), [Claim(rate, 100)], PRICE)
    await limiter.settle(held, Usage(100, 1000))  # used more than reserved
    with pytest.raises(TokenRateExceeded) as caught:
        await limiter.reserve(await limiter.admit(tenant, "r3", NONE), [Claim(rate, 100)], PRICE)
    assert caught.value.retry_after_s is not None
    assert 25 < caught.value.retry_after_s <= 30, "600 tokens above the limit, 20 a second"


async def test_simultaneous_reservations_take_exactly_the_tokens(limiter: AnyLimiter, tenant: str) -> None:
    held = [await limiter.admit(tenant, f"r{number}", NONE) for number in range(40)]
    outcomes = await asyncio.gather(
        *(limiter.reserve(one, [Claim(Limit(LimitKind.TOKENS, 70), 10)], PRICE) for one in held),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 7
    assert sum(isinstance(outcome, TokenRateExceeded) for outcome in outcomes) == 33


@sure_within(0.5)
async def test_a_reservation_states_what_its_rates_have_left(limiter: AnyLimiter, tenant: str) -> None:
    most, rate = limits(60), Limit(LimitKind.TOKENS, 6000)
    await limiter.admit(tenant, "r1", most)
    held = await limiter.admit(tenant, "r2", most)
    assert held.request_rate is not None
    assert (held.request_rate.limit, held.request_rate.remaining) == (60, 58)
    assert 1.5 < held.request_rate.reset_s <= 2.0
    again = await limiter.admit(tenant, "r2", most)
    assert (again.request_rate, again.token_rate) == (None, None)
    began_s = time.monotonic()
    held = await limiter.reserve(held, [Claim(rate, 3000)], PRICE)
    took_s = time.monotonic() - began_s  # 100 tokens come back in a second
    assert held.token_rate is not None
    assert held.token_rate.limit == 6000
    assert 3000 <= held.token_rate.remaining <= 3000 + 100 * took_s
    assert 29.99 - took_s <= held.token_rate.reset_s <= 30.0
    unlimited = await limiter.admit(tenant, "r3", NONE)
    assert (unlimited.request_rate, unlimited.token_rate) == (None, None)


@sure_within(1.0)
async def test_a_rejection_states_what_its_rates_have_left(limiter: AnyLimiter, tenant: str) -> None:
    own = Limit(LimitKind.REQUESTS, 2, Scope.KEY, "k")
    most = (*limits(60, slots=2), own)
    held = [await limiter.admit(tenant, f"r{number}", most) for number in range(2)]
    with pytest.raises(ConcurrencyExceeded) as full:
        await limiter.admit(tenant, "r3", most[:2])
    assert full.value.request_rate is not None
    assert (full.value.request_rate.limit, full.value.request_rate.remaining) == (60, 58)
    assert full.value.token_rate is None
    await limiter.settle(held[1], NOTHING)
    began_s = time.monotonic()
    with pytest.raises(RequestRateExceeded) as rate:
        await limiter.admit(tenant, "r3", most)
    took_s = time.monotonic() - began_s
    state, wait_s = rate.value.request_rate, rate.value.retry_after_s
    assert state is not None
    assert wait_s is not None
    assert (state.limit, state.remaining) == (2, 0), "the limit that rejects, not the tenant's"
    assert state.reset_s == pytest.approx(wait_s + 30, abs=0.001 + took_s)
    tokens, output = Limit(LimitKind.TOKENS, 6000), Limit(LimitKind.OUTPUT_TOKENS, 600)
    await limiter.reserve(held[0], [Claim(tokens, 1000), Claim(output, 500)], PRICE)
    admitted = await limiter.admit(tenant, "r4", NONE)
    began_s = time.monotonic()
    with pytest.raises(TokenRateExceeded) as spent:
        await limiter.reserve(admitted, [Claim(output, 50), Claim(tokens, 5500)], PRICE)
    took_s = time.monotonic() - began_s
    state, wait_s = spent.value.token_rate, spent.value.retry_after_s
    assert state is not None
    assert wait_s is not None
    assert state.limit == 6000, "the limit that rejects, not the one with the least room"
    assert 5000 <= state.remaining <= 5100
    assert state.reset_s == pytest.approx(wait_s + 5, abs=0.01 + took_s), "500 more than fit, 100 a second"
    with pytest.raises(TokenRateExceeded) as taken:
        await limiter.take(tenant, [Claim(output, 50), Claim(tokens, 5500)])
    assert taken.value.token_rate is not None
    assert taken.value.token_rate.limit == 6000


@sure_within(1.0)
async def test_an_admission_reserves_what_it_is_given_or_leaves_it_to_reserve(
    limiter: AnyLimiter, tenant: str
) -> None:
    most, rate = limits(60, 3), Limit(LimitKind.TOKENS, 6000)
    held = await limiter.admit(tenant, "r1", most, [Claim(rate, 5000)], PRICE)
    assert held.claims == (Claim(most[1]), Claim(rate, 5000))
    assert await limiter.reserve(held, [Claim(rate, 5000)], PRICE) is held
    assert (held.request_rate, held.token_rate) != (None, None)
    assert held.token_rate is not None
    assert held.token_rate.remaining == 1000
    assert (await limiter.admit(tenant, "r1", most, [Claim(rate, 5000)], PRICE)).claims == held.claims
    for number, tokens in ((2, 2000), (3, 9000)):  # has no room now, never fits
        left = await limiter.admit(tenant, f"r{number}", most, [Claim(rate, tokens)], PRICE)
        assert left.claims == (Claim(most[1]),)
        assert left.request_rate is not None
        assert left.request_rate.remaining == 60 - number, "it is counted like any other"
        with pytest.raises(TokenRateExceeded):
            await limiter.reserve(left, [Claim(rate, tokens)], PRICE)
        await limiter.settle(left, NOTHING)
    await limiter.settle(held, Usage(10, 20))
    last = await limiter.admit(tenant, "r4", most, [Claim(rate, 5900)], PRICE)
    assert last.token_rate is not None, "the settlement replaced the claim by the use"
    assert await limiter.concurrency(tenant) == 1
    full = [await limiter.admit(tenant, f"f{number}", most) for number in range(2)]
    with pytest.raises(ConcurrencyExceeded):
        await limiter.admit(tenant, "r5", most, [Claim(rate, 1)], PRICE)
    assert len(full) == 2
