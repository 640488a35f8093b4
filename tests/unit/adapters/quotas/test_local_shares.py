"""Limits without the shared store follow its rules, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.adapters.quotas.local_shares import LocalShares
from services.core.errors import ConcurrencyExceeded, OverQuota
from services.core.generation import Usage
from services.core.limits import WORK, Claim, Limit, LimitKind, Scope
from services.ports.limiter import Reservation
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.metered import limits

LEASE_S = 10.0
LIMITS = (
    Limit(LimitKind.REQUESTS, 40),
    Limit(LimitKind.CONCURRENCY, 3),
    Limit(LimitKind.REQUESTS, 25, Scope.KEY, "k"),
    Limit(LimitKind.CONCURRENCY, 2, Scope.USER, "u"),
    Limit(LimitKind.CONCURRENCY, 0, Scope.KEY, "k"),
)
TOKENS = Limit(LimitKind.TOKENS, 100)
OTHER_WORK = [Claim(Limit(LimitKind.REQUESTS, 3, name=WORK))]
NOTHING = Usage(0, 0)
STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "take", "work", "renew", "settle", "wait"]), st.integers(0, 5)),
    max_size=80,
)


def seen(answer: Reservation | None) -> str:
    """Return what a caller sees of an answer."""
    return str(answer and (answer.request_id, answer.claims, answer.request_rate))


def refused(error: OverQuota) -> str:
    return f"{error.message} {error.metadata} {error.retry_after_s} {error.request_rate} {error.token_rate}"


def here(call: Callable[[], Reservation | None]) -> str:
    try:
        return seen(call())
    except OverQuota as error:
        return refused(error)


async def there(call: Awaitable[Reservation | None]) -> str:
    try:
        return seen(await call)
    except OverQuota as error:
        return refused(error)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_every_answer_is_that_of_the_store(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        clock = HandClock()
        local, store = LocalShares(clock, lease_s=LEASE_S), MemoryLimiter(clock, lease_s=LEASE_S)
        held: dict[int, Reservation] = {}
        for kind, number in steps:
            name, claims = f"r{number}", [Claim(TOKENS, 20 * number)]
            if kind == "wait":
                clock.now_s += number * 2.5
            elif kind == "admit":
                admitted = asyncio.ensure_future(store.admit("t", name, LIMITS))
                assert here(partial(local.admit, "t", name, LIMITS)) == await there(admitted)
                if admitted.exception() is None:  # nobody renews what was refused
                    held[number] = admitted.result()
            elif kind == "take":
                assert here(partial(local.take, "t", claims)) == await there(store.take("t", claims))
            elif kind == "work":
                assert here(partial(local.take, "t", OTHER_WORK)) == await there(store.take("t", OTHER_WORK))
            elif number in held and kind == "renew":
                local.renew(held[number])
                await store.renew([(held[number], NOTHING)])
            elif number in held:
                local.release(held[number])
                await store.settle(held.pop(number), NOTHING)

    asyncio.run(scenario())


def test_a_slot_that_is_not_renewed_lapses() -> None:
    clock, most = HandClock(), limits(slots=1)
    shares = LocalShares(clock, lease_s=LEASE_S)
    first = shares.admit("t", "r1", most)
    for _ in range(3):
        clock.now_s += LEASE_S * 0.9
        shares.renew(first)
        with pytest.raises(ConcurrencyExceeded):
            shares.admit("t", "r2", most)
    clock.now_s += LEASE_S
    shares.admit("t", "r2", most)


def test_a_renewal_after_the_release_takes_no_slot() -> None:
    """Renewals are sent in batches: a request may end between two of them."""
    shares, most = LocalShares(HandClock()), limits(slots=1)
    first = shares.admit("t", "r1", most)
    shares.release(first)
    shares.renew(first)
    shares.admit("t", "r2", most)


def test_a_request_that_lapsed_holds_its_slot_again_once_it_is_renewed() -> None:
    clock, most = HandClock(), limits(slots=1)
    shares = LocalShares(clock, lease_s=LEASE_S)
    late = shares.admit("t", "late", most)
    clock.now_s += LEASE_S
    shares.admit("t", "next", most)
    shares.renew(late)
    shares.release(Reservation("t", "next", local=True))
    with pytest.raises(ConcurrencyExceeded):
        shares.admit("t", "r", most)
    shares.release(late)
    shares.admit("t", "r", most)


def test_what_is_kept_of_tenants_and_lapsed_requests_is_bounded() -> None:
    clock = HandClock()
    shares = LocalShares(clock, lease_s=LEASE_S)
    for number in range(3000):
        shares.admit("t", f"r{number}", limits())
        clock.now_s += LEASE_S
    (tenant,) = shares._tenants.values()
    assert len(tenant.lapsed) <= 1000
    assert not tenant.meters
    assert len(tenant.running) == 1


def test_the_number_of_tenants_is_bounded() -> None:
    shares = LocalShares(HandClock())
    for number in range(100_000):
        shares.take(f"t{number}", OTHER_WORK)
    shares.take("t0", OTHER_WORK)
    shares.take("new", OTHER_WORK)
    assert len(shares._tenants) == 100_000
    assert "t0" in shares._tenants, "the one idle for longest is dropped"
    assert "t1" not in shares._tenants
