"""The policy of scaling: what it orders, what it leaves, and that bounds and operators win."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.scaling.policy.scaler import (
    PoolScaler,
    ReplicaBounds,
    ReplicaDecision,
    ScalerTuning,
    Supply,
    Zone,
    spread,
    zones_need,
)
from services.core.estimates.capacity import Bound, ReplicaCapacity
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Priority

RATE = 100.0  # work per second of a replica
WIDE = ReplicaBounds(1, 1000)


@dataclass
class Driven:
    """A scaler whose decisions are obeyed at once: what it orders starts ``start_s`` later."""

    scaler: PoolScaler = field(default_factory=PoolScaler)
    bounds: ReplicaBounds = WIDE
    start_s: float = 60.0
    now_s: float = 0.0
    arrived: float = 0.0
    ready: int = 1
    orders: list[float] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def step(self, work: float, **observed: Any) -> ReplicaDecision:
        """A second in which ``work`` of the first class arrives."""
        self.now_s += 1.0
        self.arrived += work
        self.ready += sum(at_s <= self.now_s for at_s in self.orders)
        self.orders = [at_s for at_s in self.orders if at_s > self.now_s]
        load = PoolLoad((ClassLoad(Priority.INTERACTIVE, 2.0, arrived=self.arrived),), RATE, 10.0)
        supply = Supply(self.ready, tuple(at_s - self.now_s for at_s in self.orders), self.start_s)
        found = self.scaler.decide(replace(load, **observed), supply, self.bounds, self.now_s)
        more = found.replicas - supply.replicas
        self.orders += [self.now_s + self.start_s] * more
        self.ready -= max(0, -more)
        self.taken.append(found.replicas)
        return found

    def run(self, work: float, seconds: int) -> ReplicaDecision:
        return [self.step(work) for _ in range(seconds)][-1]


def test_ten_times_the_load_orders_within_one_decision_and_for_all_of_it_within_its_window() -> None:
    pool = Driven()
    before = pool.run(300.0, 1200).replicas
    first = pool.step(3000.0)
    assert first.replicas > before
    assert first.reasons[0].signal == "excursion"
    assert pool.run(3000.0, 15).replicas >= 28


def test_short_excursions_are_learned_and_ordered_for_no_more() -> None:
    pool = Driven()
    pool.run(300.0, 1200)
    peaks = []
    for _ in range(4):
        pool.taken.clear()
        pool.run(3000.0, 30)
        pool.run(300.0, 1200)
        peaks.append(max(pool.taken))
    assert peaks[0] >= 25
    assert peaks[-1] <= 6


def test_an_excursion_that_outlasts_the_learned_ones_is_ordered_for() -> None:
    pool = Driven()
    pool.run(300.0, 1200)
    for _ in range(4):
        pool.run(3000.0, 30)
        pool.run(300.0, 1200)
    assert pool.run(3000.0, 20).replicas <= 8
    assert pool.run(3000.0, 60).replicas >= 28


def test_constant_load_with_noise_keeps_its_size() -> None:
    rng, pool = Random(5), Driven()
    pool.run(520.0, 600)
    for _ in range(4 * 3600):
        pool.step(520.0 * rng.gammavariate(4.0, 0.25))
    settled = pool.taken[3600:]
    assert max(settled) - min(settled) <= 1
    assert sum(one != other for one, other in pairwise(settled)) <= 1


def test_replicas_leave_only_after_the_settling_time() -> None:
    pool = Driven(ready=9)
    pool.run(600.0, 2400)
    held = pool.taken[-1]
    assert pool.run(100.0, 1500).replicas == held
    assert pool.run(100.0, 3600).replicas <= 3


def test_nothing_is_ordered_twice_while_it_starts() -> None:
    pool = Driven(start_s=180.0)
    pool.run(300.0, 1200)
    pool.run(900.0, 170)
    assert pool.ready <= 5  # nothing of it serves yet
    assert max(pool.taken) <= 14


def test_idle_deployment_goes_to_zero_and_a_held_request_wakes_it() -> None:
    pool = Driven(bounds=ReplicaBounds(0, 5, idle_s=600.0))
    pool.run(100.0, 60)
    assert pool.run(0.0, 590).replicas == 2
    assert pool.run(0.0, 30).replicas == 0
    woken = pool.step(0.0, held=1)
    assert woken.replicas == 1
    assert woken.reasons[0].signal == "held"


def test_an_operator_wins_over_every_signal() -> None:
    for bounds, expected in ((replace(WIDE, pinned=3), 3), (replace(WIDE, frozen=True), 1)):
        pool = Driven(bounds=bounds)
        pool.run(100.0, 60)
        assert Driven(bounds=bounds).run(5000.0, 60).replicas == expected


def test_batch_runs_in_the_reserve_and_adds_replicas_only_by_its_deadline() -> None:
    def need(work: float, left_s: float) -> int:
        pool = Driven(ready=5)
        pool.run(300.0, 2400)
        due = ClassLoad(Priority.BATCH, waiting=work, due=((left_s, work),))
        urgent = ClassLoad(Priority.INTERACTIVE, 2.0, arrived=pool.arrived)
        return pool.step(300.0, classes=(urgent, due)).replicas

    alone = need(0.0, 3600.0)
    assert need(100.0 * 1800.0, 3 * 3600.0) == alone
    assert need(800.0 * 3600.0, 3600.0 + 60.0) == 11
    assert need(800.0 * 3600.0, 60.0) == alone  # no order helps it


def test_burn_adds_replicas_only_while_requests_wait_and_none_start() -> None:
    pool = Driven(ready=8)
    pool.run(100.0, 1900)
    burning = ClassLoad(Priority.INTERACTIVE, 2.0, 0.0, pool.arrived, burn_ratio=10.0)
    have = pool.taken[-1]
    assert pool.step(0.0, classes=(burning,)).replicas == have
    waits = replace(burning, waiting=1.0)
    assert pool.step(0.0, classes=(waits,)).replicas > have
    assert pool.step(0.0, classes=(waits,)).replicas == pool.taken[-2]


def test_the_lower_of_the_measured_and_the_calibrated_rate_counts_and_the_bound_is_named() -> None:
    capacity = ReplicaCapacity(5.0, 64.0, 64.0, 0.1, 0.2, Bound.DECODE, 25.0, 6.0)
    pool = Driven()
    # 5 requests of 10 a second: half the measured rate.
    found = [pool.step(300.0, capacity=capacity) for _ in range(600)][-1]
    assert found.replicas >= 6
    assert any("bound by decode" in one.text for one in found.reasons)


def test_utilisation_is_no_signal() -> None:
    """Devices are full of batch work, and nobody else waits: only the deadline counts."""
    pool = Driven(ready=4)
    pool.run(100.0, 2400)
    full = ClassLoad(Priority.BATCH, waiting=1e5, arrived=1e7, due=((24 * 3600.0, 1e5),))
    urgent = ClassLoad(Priority.INTERACTIVE, 2.0, arrived=pool.arrived)
    assert pool.step(100.0, classes=(urgent, full)).replicas == pool.taken[-2]


def test_a_zone_is_lost_and_the_first_class_still_has_its_replicas() -> None:
    zones = tuple(Zone(name) for name in "abc")
    scaler = PoolScaler()

    def decide(now_s: int) -> ReplicaDecision:
        load = PoolLoad((ClassLoad(Priority.INTERACTIVE, 2.0, arrived=600.0 * now_s),), RATE, 10.0)
        return scaler.decide(load, Supply(7, zones=zones), WIDE, float(now_s))

    found = [decide(now_s) for now_s in range(1200)][-1]
    assert found.replicas - max(count for _, count in found.zones) >= 6


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 30.0), st.lists(st.integers(0, 12), min_size=2, max_size=5))
def test_a_zone_may_be_lost_where_replicas_go_as_the_planner_puts_them(busy: float, have: list[int]) -> None:
    """It fills the zone with the fewest, and takes from the one with the most."""
    counts, need = list(have), 0
    for _ in range(4):
        need = math.ceil(zones_need(busy, tuple(Zone(str(at), each) for at, each in enumerate(counts))))
        while sum(counts) < need:
            counts[counts.index(min(counts))] += 1
        while sum(counts) > need:
            counts[counts.index(max(counts))] -= 1
        assert need <= 1 or sum(counts) - max(counts) >= busy - 1e-6
    counts[counts.index(max(counts))] -= 1
    assert need <= 1 or sum(counts) - max(counts) < busy, "none is left over in the end"


def test_what_arrived_while_lines_had_deadlines_does_not_arrive_again_when_they_end() -> None:
    pool = Driven(ready=2)
    pool.run(100.0, 600)
    arrived = 0.0

    def step(due: tuple[tuple[float, float], ...] | None) -> ReplicaDecision:
        nonlocal arrived
        arrived += 150.0
        lines = ClassLoad(Priority.BATCH, arrived=arrived, due=due)
        urgent = ClassLoad(Priority.INTERACTIVE, 2.0, arrived=pool.arrived + 100.0)
        return pool.step(100.0, classes=(urgent, lines))

    most = max(step(((80_000.0, 1000.0),)).replicas for _ in range(1200))
    assert most == pool.taken[500], "lines that run on what is free need no more"
    assert step(None).replicas == most
    undated = ClassLoad(Priority.BATCH, waiting=5000.0, due=((80_000.0, 1000.0),))
    urgent = ClassLoad(Priority.INTERACTIVE, 2.0, arrived=pool.arrived)
    found = pool.step(0.0, classes=(urgent, replace(undated, waiting=9e5)))
    assert found.reasons[0].signal == "deadlines", "what waits beyond the lines has an hour"


def test_a_deadline_within_two_starts_orders_no_more_than_a_start_can_use() -> None:
    def need(left_s: float) -> int:
        pool = Driven(ready=5)
        pool.run(300.0, 2400)
        due = ClassLoad(Priority.BATCH, due=((left_s, 60_000.0),))
        urgent = ClassLoad(Priority.INTERACTIVE, 2.0, arrived=pool.arrived)
        return pool.step(300.0, classes=(urgent, due)).replicas

    assert need(61.0) == need(120.0) == 13


def test_zones_are_equal_and_the_rest_goes_where_it_costs_least() -> None:
    zones = (Zone("a", 1, 3.0), Zone("b", 1, 2.0), Zone("c", 1, 2.5))
    assert spread(5, zones) == (("b", 2), ("c", 2), ("a", 1))
    assert spread(5, ()) == ()


def test_steady_loads_get_replicas_in_order_of_their_size() -> None:
    sizes = [Driven().run(100.0 * busy, 900).replicas for busy in range(1, 13)]
    assert sizes == sorted(sizes)
    assert all(1.25 * busy < size <= 1.6 * busy + 1 for busy, size in enumerate(sizes, 1))


works = st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(works, st.integers(0, 4), st.integers(0, 20))
def test_bounds_hold_whatever_arrives(amounts: list[float], least: int, more: int) -> None:
    pool = Driven(bounds=ReplicaBounds(least, least + more, idle_s=30.0), ready=least)
    for amount in amounts:
        assert least <= pool.step(amount).replicas <= least + more


@settings(max_examples=60, deadline=None)
@given(works, st.floats(0.0, 5000.0), st.floats(0.0, 20_000.0), st.floats(0.0, 1000.0))
def test_more_load_never_gets_fewer_replicas(
    amounts: list[float], last: float, more: float, waiting: float
) -> None:
    def after(amount: float, wait: float) -> int:
        pool = Driven()
        for each in amounts:
            pool.step(each)
        mine = ClassLoad(Priority.INTERACTIVE, 2.0, wait, pool.arrived + amount)
        return pool.step(amount, classes=(mine,)).replicas

    assert after(last, 0.0) <= after(last + more, waiting)


@settings(max_examples=60, deadline=None)
@given(works)
def test_what_starts_and_serves_never_exceeds_what_was_decided(amounts: list[float]) -> None:
    pool = Driven()
    for amount in amounts:
        found = pool.step(amount)
        assert pool.ready + len(pool.orders) == found.replicas
        assert not math.isnan(sum(one.replicas for one in found.reasons))


@pytest.mark.parametrize("held", [0, 3])
def test_a_pool_without_a_rate_stays_as_it_is(held: int) -> None:
    waits = (ClassLoad(Priority.INTERACTIVE, 2.0, 50.0, 50.0),)
    found = PoolScaler().decide(PoolLoad(waits, held=held), Supply(4), WIDE, 0.0)
    assert found.replicas == 4


def test_the_sustained_rate_leaves_zero() -> None:
    """What counts as an excursion is never less than a few requests, or nothing would ever be sustained."""
    scaler, arrived = PoolScaler(ScalerTuning(rate_window_s=1.0)), 0.0
    for second in range(120):
        arrived += 20.0 if second >= 60 else 0.0
        load = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, arrived=arrived),), rate=10.0)
        scaler.decide(load, Supply(4), ReplicaBounds(most=9), float(second))
    assert scaler.busy == pytest.approx(2.0, rel=0.01)
