"""Turns of tenants, pace of lines, and which errors are temporary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from services.core import errors
from services.core.fixed_cost.turns import TenantTurns
from services.core.records import Meta, Tenant
from services.gateway.policy.batch_turns import (
    MAX_CRASHES,
    MAX_DELAY_S,
    MAX_WAIT_S,
    STALL_S,
    TURN_S,
    BatchPace,
    BatchProgress,
    UnfinishedBatch,
    is_temporary,
    next_batches,
    not_oldest,
    yielding_turn,
)

FREE = Tenant(Meta("acme"))


def waiting(*names: str) -> list[UnfinishedBatch]:
    return [UnfinishedBatch(name[0], name, float(position)) for position, name in enumerate(names)]


def names(found: tuple[UnfinishedBatch, ...]) -> list[str]:
    return [batch.batch_id for batch in found]


def test_of_each_tenant_the_oldest_batch_comes_and_tenants_before_second_batches() -> None:
    assert names(next_batches(waiting("a1", "a2", "b1", "a3"), {}, TenantTurns(), 10)) == ["a1", "b1"]


def test_a_tenant_that_runs_a_batch_anywhere_waits() -> None:
    assert names(next_batches(waiting("a1", "b1"), {"a": 1}, TenantTurns(), 10)) == ["b1"]


def test_the_tenant_with_the_fewest_turns_comes_first() -> None:
    turns = TenantTurns()
    for tenant in ("a", "b", "a"):
        turns.started({tenant: 1.0})
    assert names(next_batches(waiting("a1", "b1", "c1"), {}, turns, 3)) == ["b1", "c1", "a1"]


@pytest.mark.parametrize("seed", range(20))
def test_a_tenant_waits_for_two_turns_of_each_other_at_most(seed: int) -> None:
    """Tenants come and go; a batch that is older is ahead of one of another tenant by one turn only."""
    rng, turns = Random(seed), TenantTurns()
    created = {name: rng.random() for name in "abcdef"}
    since: dict[str, Counter[str]] = {}  # turns of others while a tenant waits
    for _ in range(300):
        for name in rng.sample("abcdef", 2):
            if since.pop(name, None) is None:
                since[name] = Counter()
        batches = [UnfinishedBatch(name, f"{name}1", created[name]) for name in since]
        for chosen in next_batches(batches, {}, turns, 1):
            turns.started({chosen.tenant: 1.0})
            for name, others in since.items():
                others[chosen.tenant] += name != chosen.tenant
            since[chosen.tenant] = Counter()
        assert all(count <= 2 for others in since.values() for count in others.values())


def test_nothing_is_claimed_without_room() -> None:
    assert next_batches(waiting("a1"), {}, TenantTurns(), 0) == ()


def test_a_batch_that_left_stalled_comes_after_the_others_of_its_tenant_alone() -> None:
    left = {("a", "a1"): 10.0, ("a", "a2"): 5.0}
    assert names(next_batches(waiting("a1", "a2", "b1", "a3"), {}, TenantTurns(), 10, left)) == ["b1", "a3"]
    assert names(next_batches(waiting("a1", "a2"), {}, TenantTurns(), 10, left)) == ["a2"]


def test_batches_that_end_leave_half_of_the_room_and_take_one_place_of_each_tenant() -> None:
    ends = [UnfinishedBatch(name[0], name, 0.0, ends=True) for name in ("a1", "a2", "b1", "c1", "d1")]
    found = next_batches([*ends, *waiting("e1", "f1")], {}, TenantTurns(), 4)
    assert names(found) == ["a1", "b1", "e1", "f1"]
    assert names(next_batches(ends, {}, TenantTurns(), 8, ending={"a"})) == ["b1", "c1", "d1"]


def test_a_batch_that_ends_waits_for_no_turn() -> None:
    ends = UnfinishedBatch("a", "a2", 9.0, ends=True)
    assert names(next_batches([*waiting("a1", "b1"), ends], {"a": 1}, TenantTurns(), 10)) == ["a2", "b1"]
    assert names(next_batches([*waiting("b1"), ends], {}, TenantTurns(), 1)) == ["a2"]


def test_of_two_that_run_the_newer_one_yields() -> None:
    assert not_oldest(waiting("a1", "b1", "a2", "a3")) == {"a2", "a3"}
    assert not_oldest(waiting("a1", "b1")) == frozenset()


def test_a_batch_is_stalled_by_refusals_without_a_result() -> None:
    progress = BatchProgress()
    assert not progress.is_stalled(1e9), "a long answer is no stall"
    for now_s in (10.0, 40.0, 70.0):
        progress.refused(now_s)
    assert [progress.is_stalled(now_s) for now_s in (10.0 + STALL_S - 1, 10.0 + STALL_S)] == [False, True]
    progress.result()
    assert not progress.is_stalled(1e9)
    assert STALL_S >= TURN_S


@dataclass
class OneTurn:
    began_s: float
    stalled: bool = False


@pytest.mark.parametrize(
    ("age_s", "tenants", "free", "ends"),
    [(TURN_S, 1, 0, True), (TURN_S - 1, 1, 0, False), (TURN_S, 0, 0, False), (TURN_S, 2, 2, False)],
)
def test_a_turn_ends_for_a_tenant_without_a_place(age_s: float, tenants: int, free: int, ends: bool) -> None:
    turn = OneTurn(100.0)
    assert yielding_turn([turn], 100.0 + age_s, tenants, free) is (turn if ends else None)


def test_a_stalled_turn_ends_first_and_then_the_longest() -> None:
    turns = [OneTurn(2.0), OneTurn(1.0), OneTurn(4.0, stalled=True), OneTurn(3.0, stalled=True)]
    ended = []
    while (turn := yielding_turn(turns, 100.0, 1, 0)) is not None:
        turns.remove(turn)
        ended.append(turn.began_s)
    assert ended == [3.0, 4.0, 1.0, 2.0]


def test_two_tenants_alternate_on_one_place() -> None:
    """With room for one batch, the tenant that had the last turn waits for the other."""
    turns: list[str] = []
    order = TenantTurns()
    for _ in range(6):
        (chosen,) = next_batches(waiting("a1", "a2", "b1"), {}, order, 1)
        order.started({chosen.tenant: 1.0})
        turns.append(chosen.tenant)
    assert turns == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (errors.RequestRateExceeded("x", retry_after_s=1.0), True),
        (errors.TokenRateExceeded("larger than the limit"), False),
        (errors.NoWorkerAvailable("x"), True),
        (errors.StreamBroken("x"), True),
        (errors.DeadlineExceeded("x"), True),
        (errors.RequestCancelled("x"), True),
        (errors.InvalidInput("x"), False),
        (errors.PoisonedInput("x"), False),
        (errors.ResultExpired("x"), False),
        (errors.Unauthenticated("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_temporary_errors(error: errors.FairwayError, temporary: bool) -> None:
    assert is_temporary(error, 0) is temporary


def test_a_line_that_crashes_each_time_fails() -> None:
    crash = errors.InternalError("x", incident="i")
    assert [is_temporary(crash, count) for count in range(MAX_CRASHES)] == [True] * (MAX_CRASHES - 1) + [
        False
    ]


def test_the_pace_grows_by_one_per_window_and_halves_once_per_burst_of_refusals() -> None:
    pace = BatchPace()
    for _ in range(200):
        pace.answered(0.01, 0.0)
    grown = pace.room(100, FREE)
    assert 15 < grown < 30
    for _ in range(10):
        pace.refused(50.0)
    assert pace.room(100, FREE) == grown // 2
    for second in range(60, 90):
        pace.refused(float(second))
    assert pace.room(100, FREE) == 1


def test_a_wait_halves_the_pace_as_a_refusal_does() -> None:
    pace = BatchPace(window=16.0)
    for _ in range(5):
        pace.answered(MAX_WAIT_S + 0.01, 10.0)
    assert pace.room(100, FREE) == 8


def test_so_does_a_wait_above_the_quickest() -> None:
    pace = BatchPace(window=16.0)
    pace.answered(0.05, 10.0)
    for _ in range(5):
        pace.answered(0.05 + MAX_DELAY_S + 0.01, 10.0)
    assert pace.room(100, FREE) == 8


def test_the_quickest_wait_is_that_of_the_last_two_minutes() -> None:
    pace = BatchPace(window=16.0)
    pace.answered(0.0, 0.0)
    pace.answered(0.06, 61.0)
    assert pace.room(100, FREE) == 8, "0 s is remembered"
    pace.answered(0.06, 122.0)
    assert pace.room(100, FREE) == 8, "0 s is forgotten: each line waits as long"
    pace.answered(0.06 + MAX_DELAY_S + 0.01, 124.0)
    assert pace.room(100, FREE) == 4


def test_a_batch_leaves_half_of_its_tenants_limits() -> None:
    pace = BatchPace(window=50.0)
    assert pace.room(32, Tenant(Meta("acme"), max_concurrency=8)) == 4
    assert pace.room(32, Tenant(Meta("acme"), max_concurrency=1)) == 1
    limited = Tenant(Meta("acme"), requests_per_minute=60)
    starts = []
    now_s = 0.0
    for _ in range(4):
        now_s += pace.wait_s(now_s, limited)
        pace.started(now_s, limited)
        starts.append(now_s)
    assert starts == [0.0, 2.0, 4.0, 6.0], "30 of 60 a minute"
    assert pace.wait_s(now_s, FREE) == 0.0
