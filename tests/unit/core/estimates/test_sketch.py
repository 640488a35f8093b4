"""A sketch's quantiles keep the stated error in bounded memory."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.estimates.sketch import Sketch, merged

RATIOS = (0.0, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def exact(values: list[float], ratio: float) -> float:
    """Return the smallest value that at least ``ratio`` of the values do not exceed."""
    ordered = sorted(values)
    return next(value for rank, value in enumerate(ordered, start=1) if rank >= ratio * len(ordered) - 1e-9)


@given(
    st.lists(st.floats(1e-5, 1e6, allow_nan=False), min_size=1, max_size=200),
    st.sampled_from((0.005, 0.01, 0.05)),
    st.sampled_from(RATIOS),
)
def test_quantiles_keep_the_stated_error(values: list[float], error: float, ratio: float) -> None:
    sketch = Sketch(error_ratio=error)
    for value in values:
        sketch.add(value)
    assert sketch.quantile(ratio) == pytest.approx(exact(values, ratio), rel=error * (1 + 1e-6))


def test_weights_count_as_so_many_values() -> None:
    weighted, plain = Sketch(), Sketch()
    rng = Random(4)
    for _ in range(500):
        value, times = rng.lognormvariate(0, 2), rng.randrange(1, 9)
        weighted.add(value, times)
        for _ in range(times):
            plain.add(value)
    assert [weighted.quantile(ratio) for ratio in RATIOS] == [plain.quantile(ratio) for ratio in RATIOS]
    assert weighted.mean == pytest.approx(plain.mean)


def test_merging_loses_nothing() -> None:
    rng = Random(5)
    values = [rng.expovariate(3.0) for _ in range(3000)]
    whole = Sketch()
    parts = [Sketch() for _ in range(3)]
    for number, value in enumerate(values):
        whole.add(value)
        parts[number % 3].add(value)
    joined = merged(parts)
    assert [joined.quantile(ratio) for ratio in RATIOS] == [whole.quantile(ratio) for ratio in RATIOS]
    assert (joined.count, joined.most) == (whole.count, whole.most)


def test_memory_is_bounded_and_upper_quantiles_survive_it() -> None:
    sketch = Sketch(max_buckets=200)
    rng = Random(6)
    values = [10 ** rng.uniform(-5, 6) for _ in range(20_000)]
    for value in values:
        sketch.add(value)
    assert len(sketch) <= 200
    assert sketch.count == len(values)
    for ratio in (0.9, 0.99, 0.999):
        assert sketch.quantile(ratio) == pytest.approx(exact(values, ratio), rel=0.01)


def test_zeros_and_what_lies_below_the_floor_read_as_zero() -> None:
    sketch = Sketch(floor=1e-3)
    for value in (0.0, 1e-4, 5.0, 6.0):
        sketch.add(value)
    assert sketch.quantile(0.5) == 0.0
    assert sketch.quantile(1.0) == pytest.approx(6.0, rel=0.01)
    assert next(sketch.cdf()) == (0.0, 0.5)


def test_cdf_ascends_to_one() -> None:
    sketch = Sketch()
    for value in (3.0, 1.0, 2.0, 2.0):
        sketch.add(value)
    points = list(sketch.cdf())
    assert points == sorted(points)
    assert points[-1][1] == 1.0
    assert points[-1][0] == pytest.approx(3.0, rel=0.01)


def test_nothing_counted_has_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().mean is None
    assert merged([]).quantile(0.5) is None


def test_senseless_values_are_refused() -> None:
    sketch = Sketch()
    for value, weight in ((-1.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="cannot count"):
            sketch.add(value, weight)
    with pytest.raises(ValueError, match="no quantile"):
        sketch.quantile(1.5)
    with pytest.raises(ValueError, match="do not merge"):
        sketch.merge(Sketch(error_ratio=0.02))


def test_what_was_counted_weighs_less_and_its_quantiles_stay() -> None:
    sketch = Sketch()
    for value in (0.0, 1.0, 2.0, 3.0):
        sketch.add(value)
    before = [sketch.quantile(ratio) for ratio in RATIOS], sketch.mean
    sketch.keep(0.25)
    assert sketch.count == 1.0
    assert ([sketch.quantile(ratio) for ratio in RATIOS], sketch.mean) == before
    sketch.add(9.0, 3.0)
    assert sketch.quantile(0.5) == pytest.approx(9.0, rel=0.01)
