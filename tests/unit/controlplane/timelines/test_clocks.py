"""Corrections of clocks and the layout of steps."""

import itertools
from random import Random

import pytest

from services.controlplane.timelines.policy.clocks import Correction, Interval, correction_of, laid_out


def test_clocks_that_agree_are_not_corrected() -> None:
    assert correction_of(Interval(1000, 2000), Interval(1100, 1900)) == Correction(0, 100)
    assert correction_of(Interval(1000, 2000), Interval(1000, 2000)) == Correction(0, 0)


@pytest.mark.parametrize("seed", range(50))
def test_a_clock_that_differs_is_corrected_within_the_error(seed: int) -> None:
    rng = Random(seed)
    there_us, inside_us, back_us = (rng.randrange(0, 5000) for _ in range(3))
    offset_us = rng.choice((-1, 1)) * rng.randrange(5001, 10**9)
    outer = Interval(10**12, 10**12 + there_us + inside_us + back_us)
    start_us = outer.start_us + there_us - offset_us
    found = correction_of(outer, Interval(start_us, start_us + inside_us))
    assert abs(found.offset_us - offset_us) <= found.error_us + 1
    moved = start_us + found.offset_us
    assert outer.start_us <= moved + 1
    assert moved + inside_us <= outer.end_us + 1


def test_an_inner_interval_that_is_longer_is_centred() -> None:
    found = correction_of(Interval(1000, 2000), Interval(5000, 6200))
    assert found == Correction(-4100, 100)


def test_steps_of_one_engine_do_not_overlap_and_keep_their_durations() -> None:
    late = [Interval(0, 10), Interval(8, 20), Interval(15, 25), Interval(40, 50)]
    found = laid_out(late)
    assert [end - start for start, end in found] == [10, 12, 10, 10]
    assert found == [Interval(-7, 3), Interval(3, 15), Interval(15, 25), Interval(40, 50)]
    assert laid_out([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_is_in_order_and_never_later_than_dated(seed: int) -> None:
    rng = Random(seed)
    dated = sorted(rng.randrange(10_000) for _ in range(40))
    steps = [Interval(end - rng.randrange(1, 400), end) for end in dated]
    found = laid_out(steps)
    assert all(one.end_us <= step.end_us for one, step in zip(found, steps, strict=True))
    assert all(one.end_us <= after.start_us for one, after in itertools.pairwise(found))
