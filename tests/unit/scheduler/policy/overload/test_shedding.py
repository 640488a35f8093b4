"""Who is refused first, and when nobody is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.records import Priority
from services.scheduler.policy.overload.pressure import (
    ArrivalRate,
    Backlog,
    ServiceTargets,
    TokenRate,
    pressure_ratio,
    wait_s,
)
from services.scheduler.policy.overload.rates import TenantRates
from services.scheduler.policy.overload.shedding import (
    Hopeless,
    OfferedPlacement,
    Shed,
    SheddingOrder,
    SheddingPolicy,
    ShedRank,
    Take,
    judge,
    retry_after_s,
    shed_rank,
)

POLICY = SheddingPolicy()
STANDARD = OfferedPlacement(Priority.STANDARD, False, 0, False, 30.0, None, None)


@dataclass(frozen=True)
class Item:
    number: int
    rank: ShedRank
    retried: bool = False


def test_the_order_is_batch_over_quota_standard_interactive() -> None:
    ranks = [
        shed_rank(Priority.BATCH, over_quota=True, begun=False),
        shed_rank(Priority.INTERACTIVE, over_quota=True, begun=False),
        shed_rank(Priority.STANDARD, over_quota=False, begun=False),
        shed_rank(Priority.INTERACTIVE, over_quota=False, begun=False),
        shed_rank(Priority.BATCH, over_quota=True, begun=True),
    ]
    assert ranks == sorted(ShedRank)


def test_nothing_known_refuses_nobody() -> None:
    assert judge(STANDARD, None, POLICY, Random(1)) == Take()


@pytest.mark.parametrize(
    ("arrival", "wait", "kind"),
    [
        (STANDARD, 9.9, Take),
        (STANDARD, 10.1, Shed),
        (replace(STANDARD, priority=Priority.INTERACTIVE), 2.1, Shed),
        (replace(STANDARD, priority=Priority.BATCH), 29.0, Take),
        (replace(STANDARD, priority=Priority.BATCH), 31.0, Shed),
        (replace(STANDARD, ttft_target_s=20.0), 15.0, Take),
        (replace(STANDARD, ttft_target_s=1.0), 1.5, Shed),
        (replace(STANDARD, deadline_left_s=4.0), 4.5, Hopeless),
        (replace(STANDARD, attempt=1), 6.0, Shed),
        (replace(STANDARD, attempt=1), 4.0, Take),
        (replace(STANDARD, begun=True), 1000.0, Take),
    ],
)
def test_a_wait_beyond_its_limit_is_refused(arrival: OfferedPlacement, wait: float, kind: type) -> None:
    assert isinstance(judge(arrival, wait, POLICY, Random(1)), kind)


@given(st.floats(0, 500), st.floats(0, 100), st.integers(0, 50), st.integers())
def test_retry_after_is_within_its_bounds(wait: float, limit: float, attempt: int, seed: int) -> None:
    found = retry_after_s(wait, limit, attempt, POLICY, Random(seed))
    assert POLICY.min_retry_after_s <= found <= POLICY.max_retry_after_s * (1 + POLICY.jitter_ratio)


def test_a_retry_is_told_to_wait_longer() -> None:
    found = [
        retry_after_s(15.0, 10.0, attempt, replace(POLICY, jitter_ratio=0.0), Random(1))
        for attempt in range(4)
    ]
    assert found == [5.0, 10.0, 15.0, 20.0]


def worth(item: Item) -> tuple[ShedRank, bool]:
    return item.rank, not item.retried


@given(
    waiting=st.lists(st.tuples(st.sampled_from(ShedRank), st.booleans()), max_size=40),
    coming=st.tuples(st.sampled_from(ShedRank), st.booleans()),
)
@settings(max_examples=200, deadline=None)
def test_nothing_goes_while_something_lower_waits(
    waiting: list[tuple[ShedRank, bool]], coming: tuple[ShedRank, bool]
) -> None:
    order: SheddingOrder[Item] = SheddingOrder()
    items = [Item(number, rank, retried) for number, (rank, retried) in enumerate(waiting)]
    for item in items:
        order.add(item)
    found = order.victim_for(coming[0], retried=coming[1])
    sheddable = [item for item in items if item.rank is not ShedRank.BEGUN]
    lower = [item for item in sheddable if worth(item) < (coming[0], not coming[1])]
    if not lower:
        assert found is None
        return
    assert found is not None
    assert worth(found) == min(map(worth, sheddable))
    assert found.number == max(item.number for item in sheddable if worth(item) == worth(found)), (
        "newest first"
    )


def test_an_order_forgets_what_left() -> None:
    order: SheddingOrder[Item] = SheddingOrder()
    item = Item(1, ShedRank.STANDARD)
    order.add(item)
    order.discard(item)
    assert len(order) == 0
    assert order.first() is None
    with pytest.raises(KeyError):
        order.discard(item)


def test_one_with_little_queued_does_not_wait_for_one_with_much() -> None:
    backlog = Backlog()
    backlog.add(Priority.STANDARD, "whale", 1_000_000)
    assert backlog.ahead_of(Priority.STANDARD, "minnow", 100, {}) == 100
    assert backlog.ahead_of(Priority.STANDARD, "minnow", 100, {"whale": 4.0}) == 400
    assert backlog.ahead_of(Priority.STANDARD, "whale", 100, {}) == 1_000_000
    backlog.add(Priority.INTERACTIVE, "other", 5_000)
    assert backlog.ahead_of(Priority.STANDARD, "minnow", 100, {}) == 5_100
    assert backlog.ahead_of(Priority.INTERACTIVE, "minnow", 100, {}) == 100
    assert backlog.ahead_of(Priority.BATCH, "minnow", 100, {}) == 1_005_000


@given(
    st.lists(st.tuples(st.sampled_from(Priority), st.sampled_from("abc"), st.integers(1, 10**6)), max_size=50)
)
def test_a_backlog_balances(entries: list[tuple[Priority, str, int]]) -> None:
    backlog = Backlog()
    for entry in entries:
        backlog.add(*entry)
    assert backlog.total(Priority.BATCH) == sum(tokens for _, _, tokens in entries)
    for entry in entries:
        backlog.remove(*entry)
    assert all(backlog.total(priority) == 0 and not backlog.waits(priority) for priority in Priority)


def test_pressure_follows_the_class_that_is_worst_off() -> None:
    backlog, targets = Backlog(), ServiceTargets()
    assert pressure_ratio(backlog, 100.0) == 0.0
    backlog.add(Priority.BATCH, "a", 10**9, targets.of(Priority.BATCH))
    assert pressure_ratio(backlog, 100.0) == 0.0, "batch has no target"
    backlog.add(Priority.STANDARD, "a", 500, targets.of(Priority.STANDARD))
    assert pressure_ratio(backlog, 100.0) == pytest.approx(0.5)
    backlog.add(Priority.INTERACTIVE, "a", 150, targets.of(Priority.INTERACTIVE))
    assert pressure_ratio(backlog, 100.0) == pytest.approx(0.75)
    backlog.add(Priority.INTERACTIVE, "a", 150, targets.of(Priority.INTERACTIVE))
    assert pressure_ratio(backlog, 100.0) == 1.0
    assert pressure_ratio(backlog, None) == 0.0, "nothing is known yet"


def test_the_target_of_a_class_is_the_loosest_that_waits() -> None:
    backlog = Backlog()
    assert backlog.target_of(Priority.STANDARD) == math.inf
    for target_s in (10.0, 28.0, 28.0):
        backlog.add(Priority.STANDARD, "a", 100, target_s)
    assert backlog.target_of(Priority.STANDARD) == 28.0
    backlog.remove(Priority.STANDARD, "a", 100, 28.0)
    assert backlog.target_of(Priority.STANDARD) == 28.0
    backlog.remove(Priority.STANDARD, "a", 100, 28.0)
    assert (backlog.target_of(Priority.STANDARD), pressure_ratio(backlog, 20.0)) == (10.0, 0.5)


def test_the_rate_is_learned_while_work_waits() -> None:
    rate, now_s = TokenRate(), 0.0
    assert rate.tokens_per_s(4) is None
    for _ in range(40):
        now_s += 0.5
        rate.note(200.0, now_s, workers=4, waits=True)
    assert rate.tokens_per_s(4) == pytest.approx(400.0)
    assert rate.tokens_per_s(2) == pytest.approx(200.0)
    for _ in range(400):
        now_s += 0.5
        rate.note(10.0, now_s, workers=4, waits=False)
    assert rate.tokens_per_s(4) == pytest.approx(400.0), "a pool with little to do is no slower"
    for _ in range(800):
        now_s += 0.5
        rate.note(50.0, now_s, workers=4, waits=True)
    assert rate.tokens_per_s(4) == pytest.approx(100.0, rel=0.05)


def test_waits() -> None:
    assert wait_s(0.0, None) == 0.0
    assert wait_s(10.0, None) is None
    assert wait_s(10.0, 4.0) == 2.5
    assert ServiceTargets().of(Priority.BATCH) == math.inf


def test_what_keeps_coming_before_it_makes_a_wait_longer() -> None:
    assert wait_s(10.0, 4.0, arriving_tokens_per_s=2.0) == 5.0
    assert wait_s(10.0, 4.0, arriving_tokens_per_s=100.0) == pytest.approx(25.0), "it is never hopeless"
    assert wait_s(0.0, 4.0, arriving_tokens_per_s=100.0) == 0.0
    assert wait_s(10.0, None, arriving_tokens_per_s=1.0) is None


def test_arrivals_fade() -> None:
    rate = ArrivalRate()
    assert rate.tokens_per_s(0.0) == 0.0
    for tenth in range(1000):
        rate.note(50.0, tenth / 10)
    assert rate.tokens_per_s(99.9) == pytest.approx(500.0, rel=0.02)
    assert rate.tokens_per_s(99.9 + rate.window_s) == pytest.approx(500.0 / math.e, rel=0.02)
    assert rate.tokens_per_s(1000.0) < 1e-9


def test_a_weight_counts_for_one_that_has_nothing_waiting_too() -> None:
    backlog = Backlog()
    backlog.add(Priority.STANDARD, "whale", 1_000_000)
    assert backlog.ahead_of(Priority.STANDARD, "minnow", 100, {}, weight=4.0) == 25
    assert backlog.holds("whale")
    assert not backlog.holds("minnow")


@pytest.mark.parametrize(
    ("arrival", "wait", "claims"),
    [
        (STANDARD, 10.1, True),
        (replace(STANDARD, attempt=1000), 6.0, False),
        (replace(STANDARD, attempt=1000), 10.1, True),
        (replace(STANDARD, ttft_target_s=0.001), 1.0, True),
        (replace(STANDARD, ttft_target_s=0.001, attempt=1), 0.0008, False),
        (replace(STANDARD, ttft_target_s=20.0), 21.0, True),
        (replace(STANDARD, priority=Priority.BATCH), 31.0, True),
    ],
)
def test_only_a_wait_beyond_the_whole_target_is_a_claim_on_others(
    arrival: OfferedPlacement, wait: float, claims: bool
) -> None:
    found = judge(arrival, wait, POLICY, Random(1))
    assert isinstance(found, Shed)
    assert found.claims is claims


@given(st.integers(0, 600), st.integers(1, 50))
def test_a_tenant_that_keeps_to_its_rate_is_never_over_it(start: int, per_s: int) -> None:
    rates = TenantRates()
    for second in range(start, start + 200):
        rates.note("a", per_s, float(second))
        found = rates.tokens_per_minute("a", float(second))
        assert found <= 61 * per_s + 1
        assert second - start < 60 or found >= 58 * per_s, "and what is over is seen at any time"


def test_use_above_the_committed_rate_counts_for_a_minute() -> None:
    rates = TenantRates(max_tenants=2)
    for second in range(60):
        rates.note("a", 100, float(second))
    assert rates.tokens_per_minute("a", 59.0) == 6000
    assert rates.is_over("a", 5999, 59.0)
    assert not rates.is_over("a", 6000, 59.0)
    assert not rates.is_over("a", 0, 59.0), "nothing was promised: nothing is above it"
    assert rates.tokens_per_minute("a", 95.0) == 2500
    assert rates.tokens_per_minute("a", 10_000.0) == 0
    rates.note("b", 1, 100.0)
    rates.note("c", 1, 100.0)
    assert len(rates) == 2
    assert rates.tokens_per_minute("a", 100.0) == 0
