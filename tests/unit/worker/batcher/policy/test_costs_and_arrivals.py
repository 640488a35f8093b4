"""Measured costs are found again, merged and bounded; rows that come back are told from open arrivals."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.batcher.policy.arrival_profile import ArrivalProfile
from services.worker.batcher.policy.cost_curve import LEAST_LIMIT_S, MOST_WIDTHS, CostCurve, CostPrior

SIZES = (1, 2, 3, 5, 8, 12, 20, 32, 50, 80, 100)


def seconds(width: int, size: float) -> float:
    return 3e-3 + size * (2e-4 + width * 5e-6)


def measured(widths: tuple[int, ...] = (16, 64), *, spread: float = 0.1, seed: int = 0) -> CostCurve:
    curve, rng = CostCurve(), Random(seed)
    for _ in range(60):
        for width in widths:
            for size in SIZES:
                curve.note(width, size, seconds(width, size) * (1.0 + spread * rng.uniform(-1.0, 1.0)))
    return curve


def test_means_are_found_between_and_beyond_what_was_measured() -> None:
    curve = measured()
    for width, size in ((16, 1), (16, 40), (64, 7), (64, 100), (64, 150), (32, 20), (128, 50)):
        assert curve.mean_s(width, size) == pytest.approx(seconds(width, size), rel=0.06)


def test_quantiles_are_those_of_the_spread() -> None:
    curve = measured()
    assert curve.quantile_s(64, 20, 0.99) == pytest.approx(1.1 * seconds(64, 20), rel=0.05)
    assert curve.quantile_s(64, 20, 0.5) >= 0.95 * seconds(64, 20)
    assert curve.quantile_s(32, 20, 0.99) == pytest.approx(1.1 * seconds(32, 20), rel=0.1)


def test_before_measurements_the_prior_holds() -> None:
    curve = CostCurve(CostPrior(1e-3, 2e-3, 0.0))
    assert curve.mean_s(10, 3) == pytest.approx(7e-3)
    assert curve.quantile_s(10, 3, 0.99) > 7e-3
    assert curve.limit_s(10, 3) == LEAST_LIMIT_S


def test_a_hang_is_cut_at_a_multiple_of_what_was_measured() -> None:
    curve = CostCurve()
    for _ in range(30):
        curve.note(1, 10, 2.0)
    assert curve.limit_s(1, 10) == pytest.approx(16.0, rel=0.05)


def test_what_was_not_measured_has_at_least_the_prior_s_time_to_hang() -> None:
    curve = CostCurve(CostPrior(1e-3, 1e-3, 2e-3))
    for size in (1, 8) * 50:
        curve.note(1, size, 0.005)
    assert curve.mean_s(512, 1) < 0.1, "one width does not show what longer rows take"
    assert curve.limit_s(512, 1) == pytest.approx(8 * 1.5 * (2e-3 + 512 * 2e-3))
    for _ in range(30):
        curve.note(512, 1, 0.3)
    assert curve.limit_s(512, 1) == pytest.approx(8 * 0.3, rel=0.05)


def test_two_curves_merge_into_one_of_all_samples() -> None:
    one, other = measured((16,), seed=1), measured((64,), seed=2)
    one.merge(other)
    for width in (16, 64):
        assert one.mean_s(width, 32) == pytest.approx(seconds(width, 32), rel=0.06)
    assert one.mean_s(32, 32) == pytest.approx(seconds(32, 32), rel=0.1)


def test_a_curve_is_bounded_and_follows_a_change() -> None:
    curve = measured(tuple(range(1, 60)), spread=0.0)
    assert curve.widths == MOST_WIDTHS
    for _ in range(600):
        curve.note(59, 32, 0.5)
    assert curve.mean_s(59, 32) == pytest.approx(0.5, rel=0.1)


def test_a_class_that_was_measured_faster_than_a_smaller_one_is_not() -> None:
    curve = CostCurve()
    for _ in range(16):
        curve.note(8, 10, 0.5)
        curve.note(8, 90, 0.1)
    assert curve.mean_s(8, 90) >= curve.mean_s(8, 50) >= curve.mean_s(8, 10) == pytest.approx(0.5)


@settings(deadline=None, max_examples=40)
@given(
    samples=st.lists(st.tuples(st.integers(1, 100), st.floats(1e-4, 1.0)), max_size=60),
    sizes=st.lists(st.floats(1.0, 200.0), min_size=2, max_size=5),
)
def test_more_rows_never_take_less(samples: list[tuple[int, float]], sizes: list[float]) -> None:
    curve = CostCurve()
    for size, took_s in samples:
        curve.note(8, size, took_s)
    means = [curve.mean_s(8, size) for size in sorted(sizes)]
    assert all(mean > 0.0 for mean in means)
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(means))


def test_poisson_arrivals_are_open_and_have_their_rate() -> None:
    profile, rng, now_s, next_end_s, waiting = ArrivalProfile(), Random(1), 0.0, 0.01, 0
    for _ in range(6000):
        now_s += rng.expovariate(1000.0)
        while next_end_s <= now_s:
            profile.ended(waiting, next_end_s)
            next_end_s, waiting = next_end_s + 0.01, 0
        profile.arrived(now_s)
        waiting += 1
    assert profile.rate_per_s(now_s) == pytest.approx(1000.0, rel=0.25)
    back = list(profile.returning(next_end_s - 0.01))
    assert not back or back[-1][1] < 3.0  # of ten rows in each batch
    assert profile.rate_per_s(now_s + 1.0) < 30.0


def test_rows_of_a_closed_loop_are_expected_back() -> None:
    profile, rng, now_s = ArrivalProfile(), Random(1), 0.0
    for _ in range(100):
        profile.ended(32, now_s)
        for back_s in sorted(now_s + 1e-3 * rng.uniform(0.5, 1.5) for _ in range(32)):
            profile.arrived(back_s)
        now_s += 0.02
    profile.ended(32, now_s)
    back = dict(profile.returning(now_s))
    assert max(back.values()) == pytest.approx(32.0, rel=0.1)
    assert min(wait_s for wait_s, rows in back.items() if rows > 30.0) < 3e-3
    assert profile.rate_per_s(now_s) == 0.0
    late = list(profile.returning(now_s + 0.01))
    assert not late or late[-1][1] < 1.0
