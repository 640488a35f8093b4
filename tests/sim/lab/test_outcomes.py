"""Scenarios end as they promise: what each is there to show holds on a small fleet that is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.core.records import Priority
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.fleet import SimFleet, simulate
from simulator.lab import scenarios
from simulator.lab.runner import run
from simulator.lab.scenario import Options, Scenario, Script, Step
from tests.support.sweep import daily

MAX_DIFFERENCE_TOKENS = 40_000  # of two that wait; by arrival the whale is 100,000 ahead, with the same load


def small(name: str, *, workers: int, duration_s: float, load_ratio: float | None = None) -> Scenario:
    return scenarios.load(
        name, Options(workers=workers, seed=1, duration_s=duration_s, load_ratio=load_ratio)
    )


@pytest.mark.sweep
def test_a_slow_worker_is_found_and_gets_next_to_nothing_from_then_on() -> None:
    report = run(small("slow-worker", workers=4, duration_s=24.0))
    before, after = report.figures["share_before_ratio"], report.figures["share_after_ratio"]
    found_s = report.figures["found_after_s"]
    assert found_s is not None
    assert 0 < found_s <= 15
    assert before is not None
    assert before > 0.15  # of four
    assert after is not None
    assert after < 0.05
    assert report.total.finished == report.total.sent
    assert report.violations == ()


@pytest.mark.parametrize("workers", daily([2, 4], [2]))
def test_in_a_burst_batch_is_refused_first_and_most_and_interactive_last(workers: int) -> None:
    made = small("burst", workers=workers, duration_s=40.0)
    (mark,) = made.marks
    records: list[RequestRecord] = []
    ran = simulate(made.fleet, made.load(), plans=made.plans, on_record=records.append)
    assert ran.violations == ()
    began_s = min(record.sent_s - record.request.arrival_s for record in records)
    sent = Counter(record.request.priority for record in records)
    refused = sorted(
        (record for record in records if record.outcome == "OVERLOADED"), key=lambda each: each.sent_s
    )
    assert refused[0].request.priority is Priority.BATCH
    assert refused[0].sent_s - began_s >= mark.from_s
    by_class = Counter(record.request.priority for record in refused)
    batch, standard, interactive = (
        by_class[each] / sent[each] for each in (Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE)
    )
    assert batch > 0.3
    if workers == 2:  # so few requests that batch alone is refused
        assert standard == interactive == 0
    else:
        assert batch > 2 * standard > 4 * interactive
    assert all(record.outcome in ("finished", "OVERLOADED", "QUEUE_TIMEOUT") for record in records)


def test_beside_a_whale_the_others_wait_a_fraction_of_what_it_does() -> None:
    report = run(small("whale", workers=2, duration_s=40.0))
    (whale,) = (row for row in report.rows if row.tenant == "whale")
    minnows_s = report.figures["together_ttft_p95_s"]
    assert minnows_s is not None
    assert whale.ttft_s.p95 is not None
    assert minnows_s < whale.ttft_s.p95 / 3


@pytest.mark.sweep
def test_tenants_that_wait_beside_a_whale_get_equal_service() -> None:
    report = run(small("whale", workers=2, duration_s=40.0, load_ratio=2.0))
    found = report.fairness
    assert found.windows >= 2  # else no two waited for long enough to compare
    assert found.jain_mean is not None
    assert found.jain_mean >= 0.9
    assert report.fairness_bound_tokens is not None
    assert found.difference_tokens <= min(report.fairness_bound_tokens, MAX_DIFFERENCE_TOKENS)


def test_nothing_is_lost_when_the_leading_scheduler_is_killed() -> None:
    made = small("failover", workers=3, duration_s=30.0)
    (mark,) = made.marks
    leaders: list[str | None] = []

    def note(fleet: SimFleet) -> None:
        leaders.append(fleet.leader.name if fleet.leader is not None else None)

    looks = Script(tuple(Step(at_s, note) for at_s in (mark.from_s - 0.1, mark.to_s - 0.1)))
    report = run(replace(made, plans=(*made.plans, looks)))
    before, after = leaders
    assert None not in leaders
    assert before != after  # another one leads while the killed one is away
    asked = list(made.load())
    assert report.total.sent == report.total.finished == len(asked)
    assert report.total.output_tokens == sum(each.output_tokens for each in asked)
    assert report.violations == ()
