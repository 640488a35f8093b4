"""The queue: bounded, in order; what cannot be in time is rejected when it arrives."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import DeadlineUnmeetable
from services.core.fixed_cost.signature import Operation
from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.start import BatchLimits, WaitingGroup
from services.worker.batcher.policy.waiting import (
    WaitingRow,
    WaitingRows,
)

KEYS = [BatchKey.of(f"sha256:{name}", Operation.EMBED, "float32", (), {}) for name in "ab"]
CURVE = CostCurve(CostPrior(10e-3, 1e-3, 0.0))
LIMITS = BatchLimits(rows=10)


def row(number: int, **changes: Any) -> WaitingRow:
    """Return a row that is due ``by_s``; its target counts from its arrival."""
    fields: dict[str, Any] = {"tenant": "t", "key": KEYS[0], "width": 8, "arrived_s": 0.0, "by_s": 1.0}
    fields |= changes
    by_s = fields.pop("by_s")
    return WaitingRow(number, **fields, answer_by_s=by_s, target_s=by_s - fields["arrived_s"])


def add(waiting: WaitingRows, *rows: WaitingRow, **more: float) -> list[str]:
    """Add the rows; return the reason of each that is refused, empty of each that waits."""
    errors = (waiting.add(each, CURVE, LIMITS, now_s=0.0, **more) for each in rows)
    return ["" if error is None else error.reason for error in errors]


def numbers(waiting: WaitingRows, rows: int = 100) -> list[int]:
    return [each.number for each in waiting.select(KEYS[0], 8, rows)]


def test_it_is_bounded() -> None:
    waiting = WaitingRows(most_rows=2)
    assert add(waiting, row(0), row(1), row(2)) == ["", "", "QUEUE_FULL"]
    waiting.remove([0, 0, 77])
    assert add(waiting, row(3)) == [""]


def test_tags_order_rows_and_deadlines_those_of_one_tag() -> None:
    waiting = WaitingRows()
    add(waiting, row(0, by_s=0.1), row(1, by_s=0.2), row(2, by_s=5.0, tenant="calm"), row(3, by_s=4.0))
    tags = {0: 1.0, 1: 2.0, 2: 0.0, 3: 0.0}
    assert [each.number for each in waiting.select(KEYS[0], 8, 3, tags)] == [3, 2, 0]
    assert [each.number for each in waiting.select(KEYS[0], 8, 9, tags, without=["calm"])] == [3, 0, 1]
    assert numbers(waiting, 2) == [0, 1]


def test_what_cannot_be_in_time_is_rejected_with_the_time() -> None:
    waiting = WaitingRows()
    refused = waiting.add(row(0, deadline_s=0.005), CURVE, LIMITS, now_s=0.0)
    assert refused is not None
    assert refused.message == "the row would be answered in 0.011 s; the deadline is in 0.005 s"
    assert add(waiting, row(1, deadline_s=0.02)) == [""]
    assert add(waiting, row(2, deadline_s=0.02), busy_until_s=0.015) == [DeadlineUnmeetable.reason]
    ahead = [row(number, by_s=0.035, key=KEYS[1]) for number in range(10, 30)]
    add(waiting, *ahead)
    assert add(waiting, row(3, by_s=0.9, deadline_s=0.04)) == [DeadlineUnmeetable.reason]
    assert add(waiting, row(4, by_s=0.03, deadline_s=0.04)) == [""]  # it goes first
    assert {each.number for each in waiting.unmeetable(CURVE, now_s=0.015)} == {1}


def test_groups_are_in_order_of_their_first_row() -> None:
    waiting = WaitingRows()
    add(
        waiting,
        row(0, by_s=3.0),
        row(1, by_s=2.0, width=16),
        row(2, by_s=1.0, key=KEYS[1], arrived_s=0.5),
    )
    add(waiting, row(3, by_s=9.0, width=16, arrived_s=-1.0, deadline_s=50.0))
    found = [(key, group.width, group.rows) for key, group in waiting.groups()]
    assert found == [(KEYS[1], 8, 1), (KEYS[0], 16, 2), (KEYS[0], 8, 1)]
    wide = next(group for _, group in waiting.groups() if group.width == 16)
    assert (wide.oldest_s, wide.deadline_s) == (-1.0, 50.0)
    assert (wide.answer_by_s, wide.target_s) == (2.0, 2.0), "of the row due first, not of the oldest"
    assert waiting.least_target_s(9.0) == 0.5
    assert waiting.least_target_s(0.1) == 0.1


def test_rows_of_all_widths_form_one_group_of_each_key() -> None:
    waiting = WaitingRows()
    add(
        waiting,
        row(0, by_s=3.0),
        row(1, by_s=2.0, width=32, deadline_s=50.0),
        row(2, by_s=2.5),
    )
    add(
        waiting,
        row(3, by_s=1.0, key=KEYS[1], width=16),
        row(4, by_s=2.7, width=32, arrived_s=-1.0),
    )
    found = list(waiting.mixed_groups(lambda mean: round(10 * mean)))
    assert [key for key, _ in found] == [KEYS[1], KEYS[0]]
    assert found[1][1] == WaitingGroup(200, 4, -1.0, 2.0, 2.0, 50.0, mixed=True, tokens=80)
    chosen = waiting.select(KEYS[0], None, 3)
    assert [each.number for each in chosen] == [1, 2, 4]


def test_of_rows_that_are_due_together_the_named_one_is_removed() -> None:
    waiting = WaitingRows()
    add(waiting, row(0), row(1), row(2))
    waiting.remove([1])
    waiting.check_integrity()
    assert numbers(waiting) == [0, 2]


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 30),
            st.integers(0, 1),
            st.sampled_from((8, 16)),
            st.sampled_from((1.0, 2.0, 5.0)),
        ),
        max_size=60,
    )
)
def test_no_row_is_lost_or_doubled(steps: list[tuple[bool, int, int, int, float]]) -> None:
    waiting, expected, number = WaitingRows(most_rows=20), set[int](), 0
    for adds, target, key, width, due_s in steps:
        if adds:
            number += 1
            (found,) = add(waiting, row(number, key=KEYS[key], width=width, by_s=due_s))
            if not found:
                expected.add(number)
        else:
            waiting.remove([target])
            expected.discard(target)
        waiting.check_integrity()
        assert len(waiting) == len(expected) <= 20
    for of, group in list(waiting.groups()):
        taken = waiting.select(of, group.width, 7)
        assert [each.due_s for each in taken] == sorted(each.due_s for each in taken)
        waiting.remove(each.number for each in taken)
        expected -= {each.number for each in taken}
    assert len(waiting) == len(expected)
