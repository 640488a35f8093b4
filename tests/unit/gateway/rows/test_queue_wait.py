"""When a request of a fixed-cost model waits beyond its deadline: observations, rows ahead, the margin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.records import Priority
from services.gateway.rows.row_queue import (
    MARGIN_RATIO,
    MEMORY_S,
    EndRate,
    NewRows,
    RowsAhead,
    late_answer_s,
)

BEGAN_S = 50.0
NEVER = 1e6


def observed(
    per_s: float = 1000.0, *, seconds: float = 3.0, batch: int = 10, stay_s: float = 0.02
) -> EndRate:
    """Return the rate after batches of interactive rows at equal distances."""
    rate = EndRate()
    for number in range(round(seconds * per_s / batch) + 1):
        for _ in range(batch):
            rate.ended(Priority.INTERACTIVE, stay_s, BEGAN_S + number * batch / per_s)
    return rate


def late(
    left_s: float,
    ahead: Sequence[float],
    rate: EndRate | None = None,
    *,
    rows: int = 1,
    priority: Priority = Priority.INTERACTIVE,
) -> float | None:
    rate = observed() if rate is None else rate
    return late_answer_s(NewRows(rows, priority, left_s), RowsAhead(len(ahead), ahead), rate, rate.last_s)


@pytest.mark.parametrize("batch", [1, 100, 1000])
def test_the_rate_is_that_of_the_ends_whatever_the_batches(batch: int) -> None:
    rate = observed(seconds=12.0, batch=batch)
    assert rate.per_s(rate.last_s) == pytest.approx(1000.0, rel=0.05)


def test_nothing_is_predicted_without_observations() -> None:
    for rate in (EndRate(), observed(seconds=0.9)):
        assert late(0.1, [NEVER] * 8000, rate) is None
    rate = observed()
    after_s = rate.last_s + MEMORY_S + 0.1
    assert rate.per_s(after_s) == 0.0
    rate.ended(Priority.INTERACTIVE, 0.02, after_s)
    assert rate.per_s(after_s) == 0.0, "a worker that begins is observed anew"


def test_a_long_queue_is_refused_with_the_time_that_it_takes() -> None:
    assert late(1.0, [NEVER] * 8000) == pytest.approx(8.02, rel=0.05)
    assert late(1.0, [], rows=8000) == pytest.approx(8.02, rel=0.05)
    assert late(float("inf"), [NEVER] * 8000) is None


def test_what_may_meet_its_deadline_by_the_margin_is_not_refused() -> None:
    within = round(1000 * MARGIN_RATIO * 0.9)
    assert late(1.0, [NEVER] * within) is None
    assert late(1.0, [NEVER] * (within // 2), rows=within // 2) is None
    assert late(1.0, [NEVER] * round(1000 * MARGIN_RATIO * 1.1)) is not None
    assert late(0.001, []) is None, "it is the next one"


def test_rows_ahead_that_reach_their_own_deadline_leave() -> None:
    assert late(5.0, [0.5] * 8000) is None
    assert late(5.0, [0.5] * 8000 + [NEVER] * 8000) is not None


def test_a_row_that_starts_just_before_its_deadline_is_late_by_the_stay_of_its_class() -> None:
    rate, ahead = observed(stay_s=0.3), [index / 8000 for index in range(8000)]
    assert late(1.0, ahead, rate) is not None
    assert late(1.25, ahead, rate) is None
    assert late(1.0, ahead, rate, priority=Priority.STANDARD) is None, "no row of its class was observed"


def test_rows_that_left_the_queue_take_no_time() -> None:
    new = NewRows(1, Priority.INTERACTIVE, 1.0)
    rate = observed()
    assert late_answer_s(new, RowsAhead(8000, [], 32), rate, rate.last_s) is None
    assert late_answer_s(new, RowsAhead(8000, [NEVER] * 250, 32), rate, rate.last_s) is not None


@given(st.lists(st.floats(0.0, 3.0), max_size=60), st.floats(0.0, 3.0), st.integers(1, 50))
def test_a_request_that_meets_its_deadline_at_the_observed_rate_is_not_refused(
    times: list[float], left_s: float, rows: int
) -> None:
    rate, ahead = observed(20.0, stay_s=0.1, batch=1), sorted(times)
    now_s = 0.0
    for until_s in ahead:  # one row starts every 50 ms, unless its time is over
        if now_s < until_s:
            now_s += 0.05
    meets = now_s + 0.05 * (rows - 1) + 0.1 <= left_s
    if meets:
        assert late(left_s, ahead, rate, rows=rows) is None
