"""Prefix changes reach the leader within the bounds of a report, the latest word on each block last."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from services.adapters.links.report_deltas import PrefixBacklog
from services.core.fleet import PoolSnapshot


def pool(added: Iterable[int] = (), removed: Iterable[int] = (), digest: str = "d") -> PoolSnapshot:
    return PoolSnapshot(
        digest, 64, 0, 16, 0, 0, 8, 1024, prefix_added=tuple(added), prefix_removed=tuple(removed)
    )


def test_what_fits_goes_as_it_is() -> None:
    backlog = PrefixBacklog()
    pools = (pool((1, 2), (3,)), pool((9,), digest="e"))
    assert backlog.next_pools(pools) == pools
    assert len(backlog) == 0


def test_what_does_not_fit_goes_into_the_next_report() -> None:
    backlog = PrefixBacklog(max_pool_changes=2)
    assert backlog.next_pools([pool((1, 2, 3))]) == (pool((1, 2)),)
    assert len(backlog) == 1
    assert backlog.next_pools([pool((4,))]) == (pool((3, 4)),)
    assert len(backlog) == 0


def test_a_report_is_bounded_over_all_pools() -> None:
    backlog = PrefixBacklog(max_report_changes=3)
    found = backlog.next_pools([pool((1, 2)), pool((1, 2), digest="e")])
    assert found == (pool((1, 2)), pool((1,), digest="e"))
    assert backlog.next_pools([pool(), pool(digest="e")]) == (pool(), pool((2,), digest="e"))


def test_the_later_word_on_a_block_counts() -> None:
    backlog = PrefixBacklog(max_pool_changes=1)
    backlog.next_pools([pool((1, 2))])
    assert backlog.next_pools([pool((), (2,))]) == (pool((), (2,)),)
    assert len(backlog) == 0


def test_a_block_that_left_and_came_back_is_there() -> None:
    backlog = PrefixBacklog(max_pool_changes=1)
    assert backlog.next_pools([pool((2,), (2,))]) == (pool((2,)),)
    assert len(backlog) == 0


def test_a_pool_that_is_gone_takes_its_changes_along() -> None:
    backlog = PrefixBacklog(max_pool_changes=1)
    backlog.next_pools([pool((1, 2, 3))])
    assert backlog.next_pools([]) == ()
    assert len(backlog) == 0


def test_an_overflow_lasts_until_the_next_stream() -> None:
    backlog = PrefixBacklog(max_pool_changes=1, max_kept=3)
    backlog.next_pools([pool(range(5))])
    assert backlog.overflowed
    assert len(backlog) == 0
    backlog.clear()
    assert not backlog.overflowed
    assert backlog.next_pools([pool((7,))]) == (pool((7,)),)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), max_size=20))
def test_the_leader_ends_up_with_what_is_cached(turns: list[list[int]]) -> None:
    backlog = PrefixBacklog(max_pool_changes=2)
    cached: set[int] = set()
    known: set[int] = set()
    for turn in [*turns, *[[]] * 30]:
        added = [name for name in turn if name not in cached]
        removed = [name for name in turn if name in cached]
        cached ^= set(turn)
        (found,) = backlog.next_pools([pool(added, removed)])
        assert len(found.prefix_added) + len(found.prefix_removed) <= 2
        known = (known - set(found.prefix_removed)) | set(found.prefix_added)
    assert known == cached
