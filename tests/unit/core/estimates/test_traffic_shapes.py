"""Shapes of traffic merge, stay bounded, keep the longest, and yield what a version is probed with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.core.estimates.traffic_shapes import (
    MOST_CELLS,
    MOST_PROBES,
    RequestShape,
    SamplingKind,
    TrafficShapes,
    probed_shapes,
)

KINDS = [kind for kind in SamplingKind if kind is not SamplingKind.ROW]
SHAPES = st.builds(RequestShape, st.integers(0, 1 << 20), st.integers(0, 1 << 16), st.sampled_from(KINDS))


def counted(*shapes: RequestShape) -> TrafficShapes:
    found = TrafficShapes()
    for shape in shapes:
        found.add(shape)
    return found


@given(st.lists(SHAPES, min_size=1, max_size=300))
def test_shapes_are_bounded_and_keep_the_longest_prompt(shapes: list[RequestShape]) -> None:
    found = counted(*shapes)
    assert len(found) <= MOST_CELLS
    assert max(shape.input_tokens for shape, _ in found.items()) == max(one.input_tokens for one in shapes)


@given(st.lists(SHAPES, max_size=20), st.lists(SHAPES, max_size=20))
def test_what_two_gateways_counted_adds_up(first: list[RequestShape], second: list[RequestShape]) -> None:
    merged = counted(*first)
    merged.merge(counted(*second))
    assert dict(merged.items()) == dict(counted(*first, *second).items())


@given(st.lists(SHAPES, min_size=1, max_size=40))
def test_probes_are_seen_shapes_with_the_longest_and_every_kind(shapes: list[RequestShape]) -> None:
    found = counted(*shapes)
    probes = probed_shapes(found.items())
    assert 1 <= len(probes) <= MOST_PROBES
    assert set(probes) <= {shape for shape, _ in found.items()}
    assert max(one.input_tokens + one.output_tokens for one in probes) == max(
        one.input_tokens + one.output_tokens for one, _ in found.items()
    )
    assert {one.sampling for one in probes} == {one.sampling for one in shapes}


def test_a_frequent_shape_comes_before_a_rare_one() -> None:
    rare = [RequestShape(1 << at, 8, SamplingKind.GREEDY) for at in range(3, 12)]
    frequent = RequestShape(100, 50, SamplingKind.GREEDY)
    probes = probed_shapes(counted(*rare, *[frequent] * 5).items())
    assert probes[:2] == (rare[-1], frequent)


def test_old_traffic_weighs_less_and_is_forgotten() -> None:
    found = counted(RequestShape(10, 5, SamplingKind.GREEDY))
    found.keep(0.5)
    assert [weight for _, weight in found.items()] == [0.5]
    for _ in range(4):
        found.keep(0.5)
    assert len(found) == 0


def test_without_traffic_there_is_nothing_to_probe_with() -> None:
    assert probed_shapes([]) == ()
