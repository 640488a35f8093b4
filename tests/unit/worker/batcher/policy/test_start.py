"""When an idle device starts a batch: every cause, the bound of the linger, and when waiting pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.batcher.policy.arrival_profile import LEAST_WAIT_S
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.linger import Expected, linger_bound, worthwhile_wait_s
from services.worker.batcher.policy.start import (
    BatchLimits,
    Device,
    Linger,
    Start,
    StartCause,
    WaitingGroup,
    decide,
)
from services.worker.batcher.policy.window import FixedWindow

NOW_S = 100.0
COSTLY = CostCurve(CostPrior(10e-3, 0.1e-3, 0.0))  # c(n) = 10 ms + n * 0.1 ms
CHEAP = CostCurve(CostPrior(0.0, 0.1e-3, 0.0))  # a batch saves nothing
BACK = Expected(returning=((1e-3, 10.0), (2e-3, 32.0)))


def decided(
    group: WaitingGroup, device: Device | None = None, expected: Expected | None = None
) -> Start | Linger:
    device = device if device is not None else Device(COSTLY, BatchLimits())
    return decide(group, device, expected if expected is not None else Expected(), NOW_S)


def cause(group: WaitingGroup, expected: Expected | None = None, **changes: Any) -> StartCause:
    device = replace(Device(COSTLY, BatchLimits()), **changes)
    found = decided(group, device, expected)
    assert isinstance(found, Start), found
    return found.cause


def group(
    rows: int, *, waited_s: float = 0.0, target_s: float = 0.05, width: int = 64, **fields: Any
) -> WaitingGroup:
    arrived_s = NOW_S - waited_s
    return WaitingGroup(width, rows, arrived_s, arrived_s + target_s, target_s, **fields)


def test_every_cause() -> None:
    memory = BatchLimits(memory_bytes=1 << 20, row_bytes=1 << 10, token_bytes=1 << 10)
    assert cause(group(100)) is StartCause.FULL
    assert cause(group(16), limits=BatchLimits(padded_tokens=1024)) is StartCause.TOKENS
    assert cause(group(15), limits=memory) is StartCause.MEMORY
    assert cause(group(3, input_bytes=3 << 10), limits=BatchLimits(input_bytes=3 << 10)) is StartCause.BYTES
    assert cause(group(3), BACK, draining=True) is StartCause.DRAIN
    assert cause(group(3, waited_s=0.04), BACK) is StartCause.LINGER
    assert cause(group(3, deadline_s=NOW_S + 0.012), BACK) is StartCause.DEADLINE
    assert cause(group(3)) is StartCause.IDLE


@pytest.mark.parametrize("limits", [BatchLimits(rows=7), BatchLimits(padded_tokens=7 * 64 + 5)])
def test_a_batch_has_no_more_rows_than_its_limits(limits: BatchLimits) -> None:
    found = decided(group(50), Device(COSTLY, limits))
    assert isinstance(found, Start)
    assert found.rows == 7


def test_a_group_whose_inputs_leave_no_room_starts_at_once_by_their_bytes() -> None:
    device = Device(COSTLY, BatchLimits(input_bytes=1000))
    assert isinstance(decided(group(60, input_bytes=600), device, BACK), Linger)
    found = decided(group(60, input_bytes=1090), device, BACK)
    assert isinstance(found, Start)
    assert (found.rows, found.cause) == (55, StartCause.BYTES)
    fixed = FixedWindow(1.0).decide(group(60, input_bytes=1090), device, BACK, NOW_S)
    assert isinstance(fixed, Start)
    assert (fixed.rows, fixed.cause) == (55, StartCause.BYTES)


def test_mixed_rows_count_by_their_tokens_and_not_by_the_width_that_stands_for_them() -> None:
    device = Device(COSTLY, BatchLimits(padded_tokens=1000))
    assert isinstance(decided(group(20, width=64, mixed=True, tokens=400), device, BACK), Linger)
    found = decided(group(20, width=32, mixed=True, tokens=960), device, BACK)
    assert isinstance(found, Start)
    assert (found.rows, found.cause) == (20, StartCause.TOKENS)


def test_a_row_beyond_every_limit_runs_alone() -> None:
    found = decided(group(2), Device(COSTLY, BatchLimits(padded_tokens=10)))
    assert isinstance(found, Start)
    assert found.rows == 1


def test_the_bound_is_objective_less_compute_less_transport() -> None:
    fields: dict[str, Any] = {"width": 8, "rows": 10, "most_rows": 100, "level": 0.99}
    bound = linger_bound(COSTLY, left_s=0.05, transport_s=0.004, expected=Expected(), **fields)
    assert bound.compute_s == pytest.approx(COSTLY.quantile_s(8, 10, 0.99))
    assert bound.linger_s == pytest.approx(0.05 - bound.compute_s - 0.004)
    growing = linger_bound(COSTLY, left_s=0.05, transport_s=0.004, expected=Expected(1000.0), **fields)
    assert growing.rows > 10
    assert growing.compute_s == pytest.approx(COSTLY.quantile_s(8, growing.rows, 0.99), rel=0.01)
    assert growing.linger_s < bound.linger_s


def test_it_waits_for_rows_that_come_back_and_only_as_long_as_that_pays() -> None:
    found = decided(group(32), expected=BACK)
    assert isinstance(found, Linger)
    assert found.until_s == pytest.approx(NOW_S + 2e-3)
    assert cause(group(32), BACK, curve=CHEAP) is StartCause.IDLE
    late = Expected(returning=((15e-3, 32.0),))
    assert cause(group(32), late) is StartCause.IDLE  # the idle time is worth more than a batch


def test_it_waits_for_an_open_row_that_is_near_and_not_for_one_that_is_far() -> None:
    assert isinstance(decided(group(1), expected=Expected(rate_per_s=1000.0)), Linger)
    assert cause(group(1), Expected(rate_per_s=100.0)) is StartCause.IDLE
    assert cause(group(20), Expected(rate_per_s=1000.0)) is StartCause.IDLE


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 150),
    waited_s=st.floats(0.0, 0.2),
    left_s=st.floats(-0.1, 0.5),
    rate_per_s=st.floats(0.0, 1e5),
    back=st.lists(st.tuples(st.floats(1e-5, 0.2), st.floats(0.0, 100.0)), max_size=4),
)
def test_a_wait_ends_within_the_bound_and_a_device_that_gains_nothing_never_waits(
    rows: int, waited_s: float, left_s: float, rate_per_s: float, back: list[tuple[float, float]]
) -> None:
    expected = Expected(rate_per_s, tuple(sorted(back)))
    found = decided(group(rows, waited_s=waited_s, deadline_s=NOW_S + left_s), expected=expected)
    if isinstance(found, Linger):
        assert found.bound.linger_s >= LEAST_WAIT_S  # a clock of doubles moves
        assert NOW_S < found.until_s <= NOW_S + found.bound.linger_s + 1e-9
        target_s = min(NOW_S - waited_s + 0.05, NOW_S + left_s)
        assert found.until_s + found.bound.compute_s <= target_s + 1e-9
    nothing = worthwhile_wait_s(CHEAP, width=64, rows=rows, most_rows=100, expected=expected)
    assert nothing == 0.0


def test_a_wait_that_pays_is_cut_at_the_bound() -> None:
    late = Expected(returning=((8e-3, 32.0),))
    whole = decided(group(32), expected=late)
    assert isinstance(whole, Linger)
    assert whole.until_s == pytest.approx(NOW_S + 8e-3)
    cut = decided(group(32, waited_s=0.027), expected=late)
    assert isinstance(cut, Linger)
    assert cut.until_s == pytest.approx(NOW_S + cut.bound.linger_s)
    assert cut.bound.linger_s < 4e-3


def test_the_target_due_first_bounds_the_wait_whatever_the_oldest_row_is() -> None:
    late = Expected(returning=((8e-3, 32.0),))
    patient = decided(group(32, waited_s=0.04, target_s=2.0), expected=late)
    assert isinstance(patient, Linger)
    assert patient.until_s == pytest.approx(NOW_S + 8e-3)
    assert cause(group(32, waited_s=0.04), late) is StartCause.LINGER
    joined = replace(group(32, target_s=0.015), oldest_s=NOW_S - 1.0)
    assert cause(joined, late) is StartCause.LINGER
    assert cause(replace(joined, deadline_s=NOW_S + 0.012), late) is StartCause.DEADLINE


def test_a_bound_that_no_clock_can_measure_starts_the_batch() -> None:
    compute_s = COSTLY.quantile_s(64, 3, 0.99)
    assert cause(group(3, deadline_s=NOW_S + compute_s + 1e-9), BACK) is StartCause.DEADLINE
