"""The judgement of a failover: what may be lost, and what was."""

from __future__ import annotations

from tests.chaos.admission_failover import BUDGET_MICROS, LAG_S, WORST, Charge, judge_failover

CUT_S = 100.0
BEFORE = Charge(90.0, 90.1, BUDGET_MICROS - 500)
LOST = Charge(CUT_S + 0.1, CUT_S + 0.2, 700)
LATER = Charge(CUT_S + LAG_S + 5, CUT_S + LAG_S + 6, 500)


def test_what_was_settled_after_the_last_write_may_be_overspent() -> None:
    verdict = judge_failover([BEFORE, LOST, LATER], BUDGET_MICROS, CUT_S)
    assert (verdict.overspend, verdict.bound, verdict.lost) == (700, WORST, 700)
    assert verdict.problems == ()


def test_requests_of_other_times_raise_no_bound() -> None:
    verdict = judge_failover([BEFORE, LATER, Charge(120.0, 121.0, 300)], BUDGET_MICROS, CUT_S)
    assert (verdict.overspend, verdict.bound) == (300, 0)
    assert len(verdict.problems) == 1


def test_a_failover_that_lost_nothing_shows_nothing() -> None:
    assert judge_failover([BEFORE, LOST], BUDGET_MICROS + 200, CUT_S).problems
