"""Keys separate every computation, and widths pad as little as any choice could."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.fixed_cost.signature import Operation, TensorSpec
from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.length_buckets import (
    MOST_PADDING_RATIO,
    LengthHistogram,
    _Padding,
    bin_edges,
    choose_widths,
    padding_ratio,
    width_of,
)

IDS = TensorSpec("input_ids", "INT64", (17,), has_length=True)
TYPES = TensorSpec("token_type_ids", "INT64", (17,), has_length=True)
PIXELS = TensorSpec("pixel_values", "FP32", (3, 32, 32))


def key(*inputs: TensorSpec, **parameters: str | int | float | bool) -> BatchKey:
    return BatchKey.of("sha256:a", Operation.EMBED, "float32", inputs or (IDS, TYPES), parameters)


def test_length_and_order_of_tensors_are_not_part_of_the_key() -> None:
    assert key(IDS, TYPES) == key(replace(TYPES, shape=(9,)), replace(IDS, shape=(9,)))
    assert hash(key(IDS)) == hash(key(replace(IDS, shape=(3,))))


@pytest.mark.parametrize(
    "other",
    [
        BatchKey.of("sha256:b", Operation.EMBED, "float32", (IDS, TYPES), {}),
        BatchKey.of("sha256:a", Operation.SCORE, "float32", (IDS, TYPES), {}),
        BatchKey.of("sha256:a", Operation.EMBED, "bfloat16", (IDS, TYPES), {}),
        key(IDS),
        key(replace(IDS, datatype="INT32"), TYPES),
        key(replace(IDS, has_length=False), TYPES),
        key(dimensions=64),
        key(PIXELS),
    ],
)
def test_whatever_defines_the_computation_is(other: BatchKey) -> None:
    assert key() != other


def test_values_of_parameters_are_compared_with_their_types_and_shapes_whole() -> None:
    assert len({key(x=1), key(x=1.0), key(x=True), key(x="1"), key(y=1)}) == 5
    assert key(PIXELS) != key(replace(PIXELS, shape=(3, 32, 33)))


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), count=st.integers(1, 4))
def test_widths_pad_as_little_as_any_choice(lengths: list[int], count: int) -> None:
    histogram = LengthHistogram(40)
    for length in lengths:
        histogram.note(length)
    table = _Padding(histogram)
    found = [table.best(number) for number in range(1, count + 1)][-1]
    *others, last = histogram.edges
    best = min(padding_ratio(histogram, (*chosen, last)) for chosen in combinations(others, count - 1))
    assert padding_ratio(histogram, found) <= best + 1e-9
    assert len(found) <= count
    assert found[-1] == 40
    assert list(found) == sorted(found)


@given(lengths=st.lists(st.integers(1, 512), max_size=50))
@settings(deadline=None, max_examples=20)
def test_every_row_fits_its_width_and_no_more_widths_than_needed(lengths: list[int]) -> None:
    histogram = LengthHistogram(512)
    for length in lengths:
        histogram.note(length)
    widths = choose_widths(histogram)
    assert all(width_of(widths, length) >= length for length in [*lengths, 1, 512])
    assert len(widths) == 1 or padding_ratio(histogram, _Padding(histogram).best(1)) > MOST_PADDING_RATIO


def test_the_histogram_is_bounded_and_forgets() -> None:
    assert len(bin_edges(8192)) < 100
    histogram = LengthHistogram(512)
    for _ in range(5000):
        histogram.note(500)
    for _ in range(40_000):
        histogram.note(5)
    assert sum(histogram.rows) < 4096
    assert choose_widths(histogram)[0] == 5
    assert choose_widths(LengthHistogram(64)) == (64,)
