"""The leader's picture of a worker's prefix cache, told in deltas, is the cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.streams.kv import PrefixSet

names = st.lists(st.integers(0, 12), max_size=5, unique=True)


def told(known: set[int], found: PrefixSet, *, whole: bool = False) -> set[int]:
    """Return what a leader knows after the next report."""
    added, removed = found.take(whole=whole)
    assert not set(added) & set(removed), "a block came and left in one report"
    if whole:
        return set(added)
    assert not set(added) & known, "told twice"
    assert set(removed) <= known, "left without having come"
    return known - set(removed) | set(added)


@given(st.lists(st.tuples(st.sampled_from(("step", "report", "stream", "restart")), names, names)))
def test_deltas_add_up_to_the_set(turns: list[tuple[str, list[int], list[int]]]) -> None:
    found, cached, known = PrefixSet(), set[int](), set[int]()
    for turn, added, removed in turns:
        match turn:
            case "step":
                found.change(added, removed)
                cached = cached - set(removed) | set(added)
            case "report":
                known = told(known, found)
                assert known == cached
            case "stream":
                known = told(set(), found, whole=True)
                assert known == cached
            case _:
                left, found, cached = found, PrefixSet(), set()
                found.follow(left)
    assert told(known, found) == cached


def test_what_came_and_left_between_two_reports_is_not_told() -> None:
    found = PrefixSet()
    found.change([1, 2], [])
    found.change([], [1])
    assert found.take(whole=False) == ((2,), ())


@pytest.mark.parametrize("whole", [True, False])
def test_the_set_is_bounded_and_what_is_beyond_is_unknown(whole: bool) -> None:
    found = PrefixSet(most=2)
    found.change([1, 2, 3], [])
    assert (len(found), found.take(whole=whole)) == (2, ((1, 2), ()))
    found.change([], [3])
    assert found.take(whole=False) == ((), ())
    found.change([4], [1])
    assert found.take(whole=False) == ((4,), (1,))
