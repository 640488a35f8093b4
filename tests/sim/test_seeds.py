"""Fifty seeds hold every invariant, and between them reach everything that can happen.

Four have the size that ``make sim`` gives to all (20 workers, 200 requests); the others are small (6 workers,
60 requests), so that the fifty take half a minute of a core. The five fairness seeds among these have at most
three workers at either size. Three more, smaller still, are looked at as a whole at the end of each instant.

``make test`` runs the daily ones, ``make sim-tests`` all fifty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest

from simulator.fleet.chaos import CHAOS_FAULTS, REQUESTS, is_saturated
from simulator.fleet.invariant import Looks
from simulator.invariants.seeds import REACHES, SeedResult, Total, run_seed
from tests.support.sweep import daily

SEEDS = range(50)
FULL = (0, 13, 26, 39)
LOOKED_AT = (3, 7, 21)
SATURATED = next(filter(is_saturated, SEEDS))
DAILY = (*range(6), SATURATED, FULL[1])

# What a client may come to in these runs. Anything else is a bug, INTERNAL above all.
OUTCOMES = {
    "finished", "CANCELLED", "DEADLINE_EXCEEDED", "GATEWAY_LOST", "SLOW_READER", "STREAM_BROKEN",
    "REQUEST_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED", "OVER_COMMITMENT",
    "OVERLOADED", "QUEUE_TIMEOUT", "DEADLINE_UNMEETABLE", "NO_LEADER", "STORE_UNAVAILABLE",
}  # fmt: skip


Seed = Callable[[int], SeedResult]


@pytest.fixture(scope="module")
def result_of() -> Seed:
    """Run a seed, once for all tests of this module, whichever of them are chosen."""

    @functools.cache
    def run(seed: int) -> SeedResult:
        workers, requests = size_of(seed)
        return run_seed(seed, workers=workers, requests=requests)

    return run


def size_of(seed: int) -> tuple[int, int]:
    """Return its workers and its requests."""
    return (20, REQUESTS) if seed in FULL else (6, 60)


def total_of(seeds: Iterable[int], result_of: Seed) -> Total:
    total = Total()
    for seed in seeds:
        total.add(result_of(seed))
    return total


@pytest.mark.parametrize("seed", daily(SEEDS, DAILY))
def test_invariants_hold(seed: int, result_of: Seed) -> None:
    workers, requests = size_of(seed)
    assert result_of(seed).violations == (), (
        f"python -m simulator sim --seed {seed} --workers {workers} --requests {requests} --trace"
    )


@pytest.mark.sweep
def test_the_seeds_reach_every_fault_and_outcome(result_of: Seed) -> None:
    """Else the seeds test nothing."""
    total = total_of(SEEDS, result_of)
    assert set(total.faults) == {kind.value for kind in CHAOS_FAULTS}
    assert set(total.outcomes) >= OUTCOMES
    assert total.outcomes["finished"] > total.requests // 2
    assert {name for name, count in total.reached.items() if count} == set(REACHES)


def test_the_daily_seeds_reach_much(result_of: Seed) -> None:
    total = total_of(dict.fromkeys(DAILY), result_of)
    assert total.outcomes["finished"] > total.requests // 2
    assert len(total.faults) > len(CHAOS_FAULTS) // 2
    assert total.widest, "one is a fairness seed"
    assert total.rows["ANSWERED"] > 500, "some serve a fixed-cost version"
    assert total.rows["POISONED_INPUT"]


@pytest.mark.sweep
def test_the_fairness_seeds_come_near_the_bound(result_of: Seed) -> None:
    """Else the bound is so far away that no order exceeds it."""
    saturated = list(filter(is_saturated, SEEDS))
    total = total_of(saturated, result_of)
    assert set(total.widest) == set(saturated)
    assert len(total.widest) == 5
    assert total.compared > 500
    assert min(total.widest.values()) > 0.1
    assert max(total.widest.values()) > 0.3


@pytest.mark.parametrize("seed", daily(LOOKED_AT, LOOKED_AT[:1]))
def test_invariants_hold_at_the_end_of_each_instant(seed: int) -> None:
    assert run_seed(seed, workers=4, requests=30, looks=Looks.ALL).violations == ()


def test_a_result_tells_its_seed() -> None:
    result: SeedResult = run_seed(3, workers=3, requests=5)
    assert result.report.seed == 3
    assert sum(result.report.outcomes.values()) == result.report.requests == 5
