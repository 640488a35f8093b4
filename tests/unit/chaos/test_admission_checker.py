"""The checker of admissions finds each planted result, and accepts a history that holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.admission_checker import (
    AdmissionEnd,
    AdmissionLimits,
    AdmissionRecord,
    FinalMeters,
    judge_admissions,
)

LIMITS = AdmissionLimits(budget_micros=100, max_concurrency=2, held_s=60.0, outages=((50.0, 60.0),))
DONE = AdmissionRecord(0.0, 10.0, AdmissionEnd.FINISHED, 40, 30)
CUT = AdmissionRecord(1.0, 5.0, AdmissionEnd.CUT, 40, 12)
METERS = FinalMeters(30 + 20, reserved_micros=0, slots=0, by_gateways_micros=30, by_workers_micros=20)


def test_a_history_that_holds() -> None:
    full = AdmissionRecord(2.0, 3.0, AdmissionEnd.NO_SLOT, 40)
    spent = AdmissionRecord(2.0, 3.0, AdmissionEnd.NO_BUDGET, 40)
    verdict = judge_admissions([DONE, CUT, full, spent], LIMITS, METERS)
    assert verdict.problems == ()
    assert (verdict.budget_overspend, verdict.false_rejections, verdict.leaked) == (0, 0, 0)
    assert verdict.killed_charged_ratio == 1


@pytest.mark.parametrize("end", [AdmissionEnd.NO_SLOT, AdmissionEnd.NO_BUDGET])
def test_a_rejection_although_there_was_room_in_every_order(end: AdmissionEnd) -> None:
    rejected = AdmissionRecord(100.0, 101.0, end, 10)
    verdict = judge_admissions([DONE, replace(CUT, received_micros=20), rejected], LIMITS, METERS)
    assert verdict.false_rejections == 1


def test_a_rejection_in_an_outage_is_no_false_one() -> None:
    rejected = AdmissionRecord(59.0, 61.0, AdmissionEnd.NO_SLOT, 10)
    assert judge_admissions([DONE, CUT, rejected], LIMITS, METERS).false_rejections == 0


def test_the_slot_of_a_killed_gateway_may_be_held_until_it_lapses() -> None:
    other = AdmissionRecord(62.0, 70.0, AdmissionEnd.FINISHED, 0)
    rejected = AdmissionRecord(63.0, 64.0, AdmissionEnd.NO_SLOT, 0)
    assert judge_admissions([CUT, other, rejected], LIMITS, METERS).false_rejections == 0
    late = replace(rejected, began_s=66.0, ended_s=67.0)
    assert judge_admissions([CUT, other, late], LIMITS, METERS).false_rejections == 1


@pytest.mark.parametrize(
    ("meters", "field"),
    [
        (replace(METERS, settled_micros=101), "budget_overspend"),
        (replace(METERS, slots=1), "leaked"),
        (replace(METERS, reserved_micros=5), "leaked"),
    ],
)
def test_planted_meters(meters: FinalMeters, field: str) -> None:
    verdict = judge_admissions([DONE, CUT], LIMITS, meters)
    assert getattr(verdict, field) > 0
    assert verdict.problems


def test_tokens_that_were_received_and_not_charged() -> None:
    verdict = judge_admissions([DONE, CUT], LIMITS, replace(METERS, settled_micros=35))
    assert verdict.killed_charged_ratio < 1
    assert verdict.problems


def test_more_charged_than_was_reserved() -> None:
    more = replace(METERS, settled_micros=80, by_workers_micros=50)
    assert judge_admissions([DONE, CUT], LIMITS, more).problems


@pytest.mark.parametrize("by_workers_micros", [19, 21])
def test_a_charge_that_differs_from_the_ledger(by_workers_micros: int) -> None:
    verdict = judge_admissions([DONE, CUT], LIMITS, replace(METERS, by_workers_micros=by_workers_micros))
    assert verdict.killed_charged_ratio != 1
    assert verdict.problems
