"""Tokens and budgets of tenants, keys and users, with checkpoints and lapses, on every ``Limiter``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from services.core.errors import BudgetExceeded, ConcurrencyExceeded, RequestRateExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.ports.limiter import NO_PRICE, Reservation
from tests.contract.test_limiter import AnyLimiter, Make, limiter, make, tenant
from tests.support.metered import admit_metered, charged
from tests.support.waiting import sure_within

__all__ = ["limiter", "make", "tenant"]

MONTH = Limit(LimitKind.MONTH_MICROS, 1000)
DAY = Limit(LimitKind.DAY_MICROS, 600)
PRICE = Price(10**6, 10**6, 2 * 10**6)  # 1 and 2 micro-dollars a token
NOTHING = Usage(0, 0)


async def reserved(
    limiter: AnyLimiter, tenant: str, request_id: str, *claims: Claim, price: Price = PRICE
) -> Reservation:
    return await limiter.reserve(await limiter.admit(tenant, request_id, ()), claims, price)


async def spent(limiter: AnyLimiter, tenant: str, limit: Limit = MONTH) -> tuple[int, int]:
    (found,) = await limiter.spent(tenant, [limit])
    assert found.limit == limit
    return found.settled_micros, found.reserved_micros


async def test_simultaneous_requests_never_overspend_a_budget(limiter: AnyLimiter, tenant: str) -> None:
    outcomes = await asyncio.gather(
        *(reserved(limiter, tenant, f"r{n}", Claim(MONTH, 90), Claim(DAY, 90)) for n in range(40)),
        return_exceptions=True,
    )
    held = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
    rejected = [outcome for outcome in outcomes if isinstance(outcome, BudgetExceeded)]
    assert (len(held), len(rejected)) == (6, 34), "the day's budget of 600 has room for 6 of 90"
    assert await spent(limiter, tenant) == (0, 540), "all claims of a request or none"
    assert await spent(limiter, tenant, DAY) == (0, 540)
    for each in held:
        await limiter.settle(each, Usage(10, 5))
    assert await spent(limiter, tenant) == (120, 0)
    assert await spent(limiter, tenant, DAY) == (120, 0)


async def test_a_rejection_states_its_budget_and_when_it_ends(limiter: AnyLimiter, tenant: str) -> None:
    await reserved(limiter, tenant, "r1", Claim(DAY, 600))
    with pytest.raises(BudgetExceeded) as caught:
        await reserved(limiter, tenant, "r2", Claim(DAY, 1))
    assert caught.value.metadata == {"limit": "600", "micros": "1", "scope": "tenant", "kind": "day_micros"}
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 86_400
    await reserved(limiter, tenant, "r3", Claim(MONTH, 600))
    with pytest.raises(BudgetExceeded) as caught:
        await reserved(limiter, tenant, "r4", Claim(MONTH, 401))
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 31 * 86_400
    with pytest.raises(BudgetExceeded, match="more than the budget of 1000 per month") as caught:
        await reserved(limiter, tenant, "r5", Claim(MONTH, 1001))
    assert caught.value.retry_after_s is None


async def test_a_settlement_leaves_exactly_the_rest_of_the_budget(limiter: AnyLimiter, tenant: str) -> None:
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 1000))
    for _ in range(3):
        await limiter.settle(held, Usage(100, 100, 50))
    assert await spent(limiter, tenant) == (300, 0)
    with pytest.raises(BudgetExceeded):
        await reserved(limiter, tenant, "r2", Claim(MONTH, 701))
    await reserved(limiter, tenant, "r2", Claim(MONTH, 700))


async def test_costs_are_those_of_the_price_list(limiter: AnyLimiter, tenant: str) -> None:
    budget = Limit(LimitKind.MONTH_MICROS, 10**15)
    total = 0
    for number, (price, usage) in enumerate(
        [
            (Price(1, 1, 1), Usage(1, 0)),
            (Price(150_000, 75_000, 600_000), Usage(1234, 77, 1000)),
            (Price(2_500_001, 1_250_000, 10_000_003), Usage(999_999, 131_071, 512)),
            (Price(3_000_000_000, 0, 15_000_000_001), Usage(8_000_001, 99_999, 9_000_000)),
        ]
    ):
        held = await reserved(limiter, tenant, f"r{number}", Claim(budget, 5), price=price)
        await limiter.settle(held, usage)
        total += price.cost_micros(usage)
        assert await spent(limiter, tenant, budget) == (total, 0)


async def test_claims_of_all_scopes_are_reserved_together_or_not_at_all(
    limiter: AnyLimiter, tenant: str
) -> None:
    tokens = Limit(LimitKind.TOKENS, 1000)
    key = Limit(LimitKind.MONTH_MICROS, 500, Scope.KEY, "k1")
    user = Limit(LimitKind.OUTPUT_TOKENS, 100, Scope.USER, "ann@example.org")
    claims = (Claim(tokens, 50), Claim(MONTH, 150), Claim(key, 150), Claim(user, 40))
    for number in range(2):
        await reserved(limiter, tenant, f"r{number}", *claims)
    with pytest.raises(TokenRateExceeded, match="this end user's limit of 100 output tokens") as caught:
        await reserved(limiter, tenant, "r2", *claims)
    assert caught.value.metadata["scope"] == "user"
    other = Limit(LimitKind.OUTPUT_TOKENS, 100, Scope.USER, "ben@example.org")
    with pytest.raises(BudgetExceeded, match="this key's budget of 500"):
        await reserved(limiter, tenant, "r3", Claim(other, 100), Claim(MONTH, 250), Claim(key, 250))
    assert (await spent(limiter, tenant), await spent(limiter, tenant, key)) == ((0, 300), (0, 300))
    held = await reserved(limiter, tenant, "r4", Claim(other, 100), Claim(tokens, 900))
    assert held.token_rate is not None
    assert held.token_rate.remaining == 0


async def test_keys_and_users_have_requests_and_slots_of_their_own(limiter: AnyLimiter, tenant: str) -> None:
    def of(key: str, user: str) -> Sequence[Limit]:
        return (
            Limit(LimitKind.REQUESTS, 100),
            Limit(LimitKind.CONCURRENCY, 10),
            Limit(LimitKind.CONCURRENCY, 2, Scope.KEY, key),
            Limit(LimitKind.REQUESTS, 3, Scope.USER, user),
        )

    held = [await limiter.admit(tenant, f"r{number}", of("k1", "ann")) for number in range(2)]
    with pytest.raises(ConcurrencyExceeded, match="this key's limit of 2"):
        await limiter.admit(tenant, "r2", of("k1", "ann"))
    held.append(await limiter.admit(tenant, "r3", of("k2", "ann")))
    with pytest.raises(RequestRateExceeded, match="this end user's limit of 3"):
        await limiter.admit(tenant, "r4", of("k2", "ann"))
    await limiter.admit(tenant, "r5", of("k2", "ben"))
    await limiter.renew([(each, NOTHING) for each in held])
    await limiter.settle(held[0], NOTHING)
    await limiter.admit(tenant, "r6", of("k1", "ben"))
    with pytest.raises(ConcurrencyExceeded):
        await limiter.admit(tenant, "r7", of("k1", "ben"))
    assert await limiter.concurrency(tenant) == 4


async def test_a_lapse_charges_the_checkpoint_and_the_rest_later(make: Make, tenant: str) -> None:
    limiter = make(0.15)
    began_s = time.monotonic()
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 1000))
    await limiter.renew([(held, Usage(100, 20))])
    await limiter.checkpoint(tenant, "r1", Usage(90, 30))
    early = await limiter.settle_lapsed(tenant)
    assert early == 0 or time.monotonic() - began_s >= 0.15
    await asyncio.sleep(0.3)
    assert early + await limiter.settle_lapsed(tenant) == 1
    assert await limiter.settle_lapsed(tenant) == 0
    assert await spent(limiter, tenant) == (160, 0)
    for _ in range(2):
        await limiter.checkpoint(tenant, "r1", Usage(100, 45))
    assert await spent(limiter, tenant) == (190, 0), "a worker reported more after the lapse"
    for _ in range(2):
        await limiter.settle(held, Usage(100, 50))
    assert await spent(limiter, tenant) == (200, 0), "the gateway was only slow"
    await limiter.checkpoint(tenant, "r1", Usage(100, 60))
    assert await spent(limiter, tenant) == (200, 0), "a settlement is final"
    await limiter.checkpoint(tenant, "unknown", Usage(1, 1))


async def test_what_lapsed_takes_no_room(make: Make, tenant: str) -> None:
    limiter = make(3.0)

    @sure_within(3.0)
    async def filled(tenant: str) -> None:
        claims = (reserved(limiter, tenant, f"r{number}", Claim(MONTH, 50)) for number in range(20))
        await asyncio.gather(*claims)
        with pytest.raises(BudgetExceeded):
            await reserved(limiter, tenant, "early", Claim(MONTH, 1))

    tenant = await filled(tenant=tenant)
    await asyncio.sleep(3.1)
    await reserved(limiter, tenant, "late", Claim(MONTH, 1000))
    assert await spent(limiter, tenant) == (0, 1000)


async def test_an_admission_settles_a_few_that_lapsed(make: Make, tenant: str) -> None:
    limiter = make(0.15)
    for number in range(3):
        held = await reserved(limiter, tenant, f"r{number}", Claim(MONTH, 100))
        await limiter.renew([(held, Usage(1, 0))])
    await asyncio.sleep(0.3)
    await limiter.admit(tenant, "next", ())
    assert await spent(limiter, tenant) == (3, 0)


async def test_a_renewed_request_that_had_lapsed_holds_its_claims_again(make: Make, tenant: str) -> None:
    limiter = make(0.15)
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 1000))
    await limiter.renew([(held, Usage(100, 0))])
    await asyncio.sleep(0.3)
    await limiter.settle_lapsed(tenant)
    assert await spent(limiter, tenant) == (100, 0)
    await limiter.renew([(held, Usage(100, 50))])
    assert await spent(limiter, tenant) == (100, 900)
    await limiter.settle(held, Usage(100, 60))
    assert await spent(limiter, tenant) == (220, 0)


@sure_within(1.0)
async def test_use_beyond_the_prediction_tops_up_the_rate(limiter: AnyLimiter, tenant: str) -> None:
    rate = Limit(LimitKind.TOKENS, 6000)
    held = await reserved(limiter, tenant, "r1", Claim(rate, 1000))
    await limiter.renew([(held, Usage(500, 400))])
    await limiter.renew([(held, Usage(500, 5000))])
    for _ in range(2):
        await limiter.renew([(held, Usage(500, 5300))])
    probe = await reserved(limiter, tenant, "r2", Claim(rate, 100))
    assert probe.token_rate is not None
    assert 100 <= probe.token_rate.remaining <= 200, "5,800 and 100, less what drained since"
    await limiter.settle(held, Usage(500, 5300))
    probe = await reserved(limiter, tenant, "r3", Claim(rate, 0))
    assert probe.token_rate is not None
    assert 100 <= probe.token_rate.remaining <= 300


@sure_within(1.0)
async def test_a_resumed_request_reserves_and_pays_only_what_is_new(limiter: AnyLimiter, tenant: str) -> None:
    rate = Limit(LimitKind.TOKENS, 6000)
    claims = (Claim(rate, 4000), Claim(MONTH, 800))
    first = await reserved(limiter, tenant, "r1", *claims)
    await limiter.settle(first, Usage(100, 200))
    assert await spent(limiter, tenant) == (500, 0)
    second = await reserved(limiter, tenant, "r1", *claims)
    assert await spent(limiter, tenant) == (500, 300)
    assert second.token_rate is not None
    assert 2000 <= second.token_rate.remaining <= 2100
    await limiter.settle(first, Usage(100, 220))  # late, of the first run
    assert await spent(limiter, tenant) == (540, 260)
    assert await limiter.concurrency(tenant) == 1, "the second run holds its slot"
    await limiter.settle(second, Usage(100, 230))
    await limiter.settle(first, Usage(100, 225))
    assert await spent(limiter, tenant) == (560, 0)
    with pytest.raises(BudgetExceeded):
        await reserved(limiter, tenant, "r2", Claim(MONTH, 441))


async def test_a_request_that_resumes_after_a_lapse_is_charged_once(make: Make, tenant: str) -> None:
    limiter = make(0.15)
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 500))
    await limiter.renew([(held, Usage(100, 50))])
    await asyncio.sleep(0.3)
    again = await reserved(limiter, tenant, "r1", Claim(MONTH, 500))
    assert await spent(limiter, tenant) == (200, 300), "the first run is settled"
    await limiter.settle(again, Usage(100, 60))
    assert await spent(limiter, tenant) == (220, 0)


async def test_a_takeover_within_the_lease_goes_on_with_the_claims(limiter: AnyLimiter, tenant: str) -> None:
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 500))
    again = await reserved(limiter, tenant, "r1", Claim(MONTH, 500))
    assert again.claims == held.claims
    assert await spent(limiter, tenant) == (0, 500)
    await limiter.settle(again, Usage(100, 0))
    assert await spent(limiter, tenant) == (100, 0)


async def test_a_takeover_under_other_limits_leaves_no_slot(limiter: AnyLimiter, tenant: str) -> None:
    of_key = Limit(LimitKind.CONCURRENCY, 1, Scope.KEY, "k")
    held = await limiter.admit(tenant, "r1", ())
    assert await limiter.admit(tenant, "r1", [of_key]) == held
    await limiter.settle(held, NOTHING)
    await limiter.admit(tenant, "r2", [of_key])
    with pytest.raises(ConcurrencyExceeded):
        await limiter.admit(tenant, "r3", [of_key])


async def test_a_settlement_releases_claims_that_the_caller_did_not_receive(
    limiter: AnyLimiter, tenant: str
) -> None:
    """The response to the reservation was lost: the caller has only the admission."""
    admitted = await limiter.admit(tenant, "r1", [Limit(LimitKind.CONCURRENCY, 5)])
    await limiter.reserve(admitted, [Claim(MONTH, 500)], PRICE)
    await limiter.reserve(admitted, [Claim(MONTH, 500)], PRICE)
    assert await spent(limiter, tenant) == (0, 500)
    await limiter.renew([(admitted, Usage(1, 1))])
    await limiter.settle(admitted, Usage(0, 0))
    assert await spent(limiter, tenant) == (0, 0)
    assert await limiter.concurrency(tenant) == 0


async def test_no_price_costs_nothing(limiter: AnyLimiter, tenant: str) -> None:
    held = await reserved(limiter, tenant, "r1", Claim(MONTH, 0), price=NO_PRICE)
    await limiter.settle(held, Usage(1000, 1000))
    assert await spent(limiter, tenant) == (0, 0)
    await limiter.settle(await admit_metered(limiter, tenant, "r2"), Usage(7, 8, 9))
    assert await charged(limiter, tenant) == Usage(7, 8, 7)
