"""Spend alerts: one event for each threshold and period."""

from __future__ import annotations

from services.controlplane.spend_alerts import spend_alerts
from services.core.records import Budget, BudgetAlert, Meta

NOVEMBER = 1_795_600_800.0  # 2026-11-25
DAY_S = 86_400
BUDGET = Budget(Meta("all"), "acme", limit_micros=10_000_000, day_limit_micros=1_000_000)


def reasons(
    last: BudgetAlert, spent: int, day: int, unix_s: float = NOVEMBER
) -> tuple[BudgetAlert, list[str]]:
    after, events = spend_alerts(BUDGET, last, spent_micros=spent, day_spent_micros=day, unix_s=unix_s)
    assert all(event.warning and event.resource == "all" for event in events)
    return after, [event.reason for event in events]


def test_each_threshold_is_reported_once_in_a_period() -> None:
    last, found = reasons(BudgetAlert(), 4_999_999, 0)
    assert found == []
    last, found = reasons(last, 5_000_000, 0)
    assert found == ["BUDGET_SPENT_50"]
    assert reasons(last, 7_999_999, 0) == (last, [])
    last, found = reasons(last, 10_000_000, 1_000_000)
    assert found == [
        "BUDGET_SPENT_80",
        "BUDGET_SPENT_100",
        "BUDGET_DAY_SPENT_50",
        "BUDGET_DAY_SPENT_80",
        "BUDGET_DAY_SPENT_100",
    ]
    assert reasons(last, 11_000_000, 2_000_000) == (last, [])


def test_a_new_period_begins_without_reported_thresholds() -> None:
    last, _ = reasons(BudgetAlert(), 10_000_000, 1_000_000)
    tomorrow, found = reasons(last, 10_000_000, 600_000, NOVEMBER + DAY_S)
    assert found == ["BUDGET_DAY_SPENT_50"]
    _, found = reasons(tomorrow, 5_000_000, 0, NOVEMBER + 10 * DAY_S)
    assert found == ["BUDGET_SPENT_50"]


def test_a_limit_of_zero_has_no_threshold() -> None:
    budget = Budget(Meta("day"), "acme", day_limit_micros=100)
    _, events = spend_alerts(budget, BudgetAlert(), spent_micros=500, day_spent_micros=50, unix_s=NOVEMBER)
    assert [event.message for event in events] == ["50 % spent on 2026-11-25: 0.00 of 0.00 USD, tenant acme"]
