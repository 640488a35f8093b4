"""Turns of tenants: equal device time over weight, whatever their rows cost and however many wait."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from services.core.fixed_cost.signature import Operation
from services.core.fixed_cost.turns import SHARED_S, TenantTurns
from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.start import BatchLimits, Device, StartCause
from services.worker.batcher.policy.waiting import WaitingRow, WaitingRows

KEY = BatchKey.of("d", Operation.INFER, "float32", (), {})
CURVE = CostCurve(CostPrior(batch_s=0.0, row_s=0.0, token_s=0.001))  # a row takes a millisecond per token
LIMITS = BatchLimits()


def cost_s(width: int) -> float:
    return CURVE.mean_s(width, 1)


def tags_of(turns: TenantTurns, rows: Sequence[WaitingRow]) -> dict[int, float]:
    return turns.tags((row.number, row.tenant, cost_s(row.width) / row.weight) for row in rows)


def served(widths: dict[str, int], weights: dict[str, float], rows: int) -> dict[str, float]:
    """Return the device time of tenants that always have ten rows, after so many single rows."""
    turns, waiting, rng = TenantTurns(), WaitingRows(), Random(3)
    found = dict.fromkeys(widths, 0.0)
    number = 0

    def add(name: str) -> None:
        nonlocal number
        number += 1
        due_s = rng.random()
        weight = weights.get(name, 1.0)
        row = WaitingRow(number, name, KEY, widths[name], 0.0, due_s, due_s, weight=weight)
        waiting.add(row, CURVE, LIMITS, now_s=0.0)

    for name in widths:
        for _ in range(10):
            add(name)
    for _ in range(rows):
        tags = tags_of(turns, waiting.by_due())
        key, group = next(waiting.groups(tags))
        row = waiting.select(key, group.width, 1, tags)[0]
        waiting.remove((row.number,))
        turns.started({row.tenant: cost_s(row.width) / row.weight})
        found[row.tenant] += cost_s(row.width)
        add(row.tenant)
    waiting.check_integrity()
    return found


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_device_time_follows_weights(weight: float) -> None:
    found = served({"long": 64, "short": 8, "middle": 20}, {"short": weight}, 3000)
    assert found["short"] / found["long"] == pytest.approx(weight, rel=0.02)
    assert found["middle"] / found["long"] == pytest.approx(1.0, rel=0.02)


def row(number: int, tenant: str, due_s: float, width: int = 64) -> WaitingRow:
    return WaitingRow(number, tenant, KEY, width, 0.0, due_s, due_s)


def test_a_backlog_does_not_stand_before_a_single_row() -> None:
    turns = TenantTurns()
    backlog = [row(number, "whale", 1.0) for number in range(50)]
    turns.started({"whale": cost_s(64)})
    tags = tags_of(turns, [*backlog, row(99, "minnow", 9.0)])
    assert sorted(tags, key=tags.__getitem__)[0] == 99
    assert [tags[one.number] for one in backlog] == sorted(tags[one.number] for one in backlog)


def test_a_tenant_that_begins_has_its_turn() -> None:
    """And keeps no other tenant's group waiting: the batch of the least tag has the row of that tag."""
    turns, waiting = TenantTurns(), WaitingRows()
    rows = [row(number, "busy", 0.1) for number in range(40)]
    for one in [*rows, row(90, "newcomer", 0.9), row(91, "narrow", 0.9, width=8)]:
        waiting.add(one, CURVE, LIMITS, now_s=0.0)
    turns.started({"busy": cost_s(64)})
    served: list[str] = []
    for _ in range(6):
        tags = tags_of(turns, waiting.by_due())
        key, group = next(waiting.groups(tags))
        chosen = waiting.select(key, group.width, 1, tags)[0]
        waiting.remove((chosen.number,))
        turns.started({chosen.tenant: cost_s(chosen.width)})
        served.append(chosen.tenant)
    assert {"newcomer", "narrow"} <= set(served[:3])


def test_time_alone_is_not_held_against_a_tenant() -> None:
    turns = TenantTurns()
    for _ in range(1000):
        turns.started({"whale": 1.0})
    tags = turns.tags([(1, "whale", 1.0), (2, "minnow", 1.0), (3, "minnow", 1.0)])
    assert tags[2] == 999.0
    assert tags[1] == tags[3] == 1000.0


def test_a_device_is_shared_for_a_while_after_a_tenants_last_row() -> None:
    turns = TenantTurns()
    turns.seen("a", 0.0)
    assert not turns.are_shared(0.0)
    turns.seen("b", 1.0)
    turns.seen("a", SHARED_S)
    assert turns.are_shared(SHARED_S + 1.0)
    assert not turns.are_shared(SHARED_S + 1.1)


@pytest.mark.parametrize(("turn_s", "most"), [(10.0, 24), (1.0, 9), (0.4, 3), (0.26, 1), (0.01, 1)])
def test_a_turn_bounds_the_rows_of_a_batch(turn_s: float, most: int) -> None:
    """A batch costs 0.2 s, and 0.064 s a row: one of 24 costs a tenth more than one of 100."""
    curve = CostCurve(CostPrior(batch_s=0.2, row_s=0.0, token_s=0.001))
    device = Device(curve, LIMITS, turn_s=turn_s)
    assert device.rows_at(64) == (most, StartCause.TURN)


def test_a_turn_has_no_more_rows_than_save_time() -> None:
    """A row of 256 tokens costs next to nothing less in a batch of several."""
    curve = CostCurve(CostPrior(batch_s=0.001, row_s=0.0, token_s=4e-5))
    device = Device(curve, LIMITS, turn_s=0.025)
    assert device.rows_at(256) == (1, StartCause.TURN)
    short, _ = device.rows_at(16)
    assert 0.9 < (curve.mean_s(16, 37) / 37) / (curve.mean_s(16, short) / short) <= 1.0
    assert curve.mean_s(16, short) < 0.016, "shorter than the turn"


def test_a_batch_of_one_tenant_and_one_within_the_turn_have_the_limits_of_the_device() -> None:
    assert Device(CURVE, LIMITS).rows_at(64) == (100, StartCause.FULL)
    fixed = CostCurve(CostPrior(batch_s=0.1, row_s=0.0, token_s=1e-9))
    device = Device(fixed, BatchLimits(rows=5), turn_s=0.2)
    assert device.rows_at(1) == (5, StartCause.FULL)
