"""Rows that wait at a gateway: order within a tenant, and tenants without a leader."""

from __future__ import annotations

import pytest

from services.core.fixed_cost.rows import RowsRequest
from services.core.records import Priority
from services.gateway.rows.row_queue import QueuedRow, RowQueue

INF = float("inf")


def queued(
    number: int, tenant: str = "acme", priority: Priority = Priority.STANDARD, deadline_s: float = INF
) -> QueuedRow:
    request = RowsRequest("r", tenant, "m", "d", ((),), priority, deadline_s=deadline_s)
    return QueuedRow(request, 0, number, 0.0, deadline_s)


def drained(queue: RowQueue, tenant: str) -> list[int]:
    found = []
    while (row := queue.first(tenant)) is not None:
        queue.pop(tenant)
        found.append(row.number)
    return found


def test_class_then_deadline_then_arrival() -> None:
    queue = RowQueue()
    for row in (
        queued(1),
        queued(2, deadline_s=9.0),
        queued(3, deadline_s=5.0),
        queued(4, priority=Priority.BATCH, deadline_s=1.0),
        queued(5, priority=Priority.INTERACTIVE),
        queued(6),
    ):
        queue.push(row)
    assert drained(queue, "acme") == [5, 3, 2, 1, 6, 4]
    assert queue.tenants == ()


def test_rows_that_are_over_are_skipped() -> None:
    queue = RowQueue()
    rows = [queued(number) for number in range(3)]
    for row in rows:
        queue.push(row)
    rows[0].over = rows[2].over = True
    assert [row.number for row in queue.rows()] == [1]
    assert drained(queue, "acme") == [1]


def test_without_a_leader_tenants_take_turns_by_weight() -> None:
    queue = RowQueue()
    for number in range(40):
        queue.push(queued(number, "one"))
        queue.push(queued(number + 100, "three"))
    weights, started = {"one": 1.0, "three": 3.0}, {"one": 0, "three": 0}
    for _ in range(20):
        tenant = queue.by_turn()[0]
        assert queue.first(tenant) is not None
        queue.pop(tenant)
        queue.turns.started({tenant: 1 / weights[tenant]})
        started[tenant] += 1
    assert started == pytest.approx({"one": 5, "three": 15}, abs=1)
    queue.push(queued(500, "new"))
    assert queue.by_turn().index("new") <= 2, "a tenant that begins starts from the least served"
