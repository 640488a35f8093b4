"""A pool a request at a time: what it serves and costs, and what each scaler makes of the same hours."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from services.core.estimates.capacity import capacity_of, mix_of
from services.core.records import Priority
from simulator.elastic.day import DayOutcome, best_day, day, oscillations, zone_loss
from simulator.elastic.plan import LOAD_S, WARM_UP_S, WORKERS, steady
from simulator.elastic.pool import ElasticPool
from simulator.elastic.scalers import RIVALS, Hpa, Ours
from simulator.elastic.traffic import AZURE, DAY_S, MOONCAKE, Workload

# The hour around the peak, without spikes.
PEAK = replace(MOONCAKE, duration_s=3600.0, phase_s=1800.0 - DAY_S / 2, spikes=0)


class Fixed:
    every_s = 10.0

    def __init__(self, replicas: int) -> None:
        self.wanted = replicas

    def replicas(self, pool: ElasticPool, now_s: float) -> int:
        return self.wanted


def run(load: Workload = PEAK, replicas: int = 10) -> ElasticPool:
    pool = ElasticPool(load, Fixed(replicas), replicas=replicas)
    pool.run()
    return pool


def test_every_request_is_counted_once_and_costs_are_the_replicas_time() -> None:
    pool = run()
    for counted in pool.classes.values():
        assert counted.met + counted.refused <= counted.arrived
    left = sum(len(one.queue) for one in pool.classes.values()) + sum(map(len, pool.replicas))
    refused = sum(one.refused for one in pool.classes.values())
    assert len(pool.done) + left + refused == sum(one.arrived for one in pool.classes.values())
    assert pool.node_s == pytest.approx(10 * PEAK.duration_s)


def test_a_full_pool_serves_nearly_its_capacity_and_never_more() -> None:
    pool = run(replicas=5)
    mix = mix_of(pool.done)
    capacity = capacity_of(PEAK.costs, mix, max_sequences=PEAK.max_sequences)
    assert capacity is not None
    served = len(pool.done) / PEAK.duration_s / 5
    assert 0.93 * capacity.requests_per_s < served <= 1.001 * capacity.requests_per_s


def test_first_class_is_served_first_and_the_last_fills_what_is_left() -> None:
    pool = run(replicas=6)
    interactive, standard, batch = pool.classes.values()
    assert interactive.attainment > 0.99
    assert interactive.attainment > standard.attainment > batch.attainment


def steady_attainment(rate_per_s: float) -> float:
    pool = ElasticPool(replace(AZURE, duration_s=LOAD_S), Fixed(WORKERS), replicas=WORKERS)
    pool.run(steady(AZURE, rate_per_s))
    missed = sum(at_s >= WARM_UP_S for at_s in pool.misses)
    return 1.0 - missed / sum(one.arrival_s >= WARM_UP_S for one in steady(AZURE, rate_per_s))


def test_more_replicas_never_serve_worse() -> None:
    found = [steady_attainment(rate) for rate in (15.0, 24.0, 30.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0 > found[-1]


def test_ours_meets_the_objective_near_the_bound_and_nobody_is_below_it() -> None:
    ours = day(PEAK, Ours())
    assert ours.attainment >= 0.99
    assert 1.0 <= ours.cost <= 1.25
    assert ours.oscillations_per_day <= 24.0  # at most one in an hour
    assert day(PEAK, Fixed(9)).cost >= 1.0


def test_utilisation_misleads_where_batches_fill_the_devices() -> None:
    """Devices are full of lines that have six hours; nobody else waits, and no replica is needed."""
    load = replace(PEAK, rate_per_s=3.0, swing_ratio=0.0, job_lines=3000, duration_s=2 * 3600.0)
    most = {}
    for scaler in (Ours(), RIVALS["utilisation"].scaler(0.7)):
        pool = ElasticPool(load, scaler, replicas=4)
        pool.run()
        assert pool.classes[Priority.INTERACTIVE].attainment >= 0.99
        assert pool.classes[Priority.BATCH].refused == 0
        most[type(scaler)] = max(accumulate(change for _, change in pool.changes))
    assert most[Hpa] >= 2 * most[Ours]


def test_a_rivals_search_returns_its_cheapest_day_that_reaches_ours() -> None:
    load = replace(PEAK, duration_s=1200.0, phase_s=0.0)
    found = best_day(load, RIVALS["requests in flight"], 0.9)
    assert found.attainment >= 0.9
    assert found.target > RIVALS["requests in flight"].low


def test_a_lost_zone_costs_seconds() -> None:
    breach_s, rows = zone_loss(MOONCAKE)
    assert breach_s <= 30.0
    before, after = rows[1], rows[2]
    assert int(after[1]) < int(before[1])
    assert int(rows[3][2]) >= 1  # replacements are ordered at once


def test_a_change_and_its_opposite_are_an_oscillation_only_soon_after() -> None:
    assert oscillations([(0.0, 2), (600.0, -1), (1200.0, -1), (9000.0, 3)]) == 1


def test_equal_seeds_are_equal_days_and_recorded_traces_are_replayed(tmp_path: Path) -> None:
    short = replace(PEAK, duration_s=300.0)
    assert day(short, Ours()) == day(short, Ours())
    rows = [
        f'{{"timestamp": {n * 1000}, "input_length": 600, "output_length": 9, "hash_ids": [0, {n}]}}'
        for n in range(9)
    ]
    (tmp_path / MOONCAKE.trace).write_text("\n".join(rows), encoding="utf-8")
    urgent = [one for one in short.recorded(tmp_path).requests() if one.priority is not Priority.BATCH]
    assert {(one.prompt, one.output) for one in urgent} == {(600, 9), (88, 9)}
    assert len(urgent) == pytest.approx(300.0 * 6.0 * 0.7 * 1.6, rel=0.1)
    assert isinstance(day(short.recorded(tmp_path), Ours()), DayOutcome)
