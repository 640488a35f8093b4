"""No grant starts anything twice, none of another life or of a deposed leader starts anything at all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.generation import Grant, NotAdmittedReason
from services.worker.streams.admission import WINDOW, GrantFence


def grant(sequence: int, *, epoch: int = 3, incarnation: int = 5) -> Grant:
    return Grant("w", "a:1", incarnation, epoch, sequence, 1, 5.0, "sha256:x")


def book() -> GrantFence:
    made = GrantFence()
    made.registered(5)
    return made


def test_only_grants_for_this_life_count() -> None:
    grants = GrantFence()
    assert grants.check(grant(1, incarnation=0)) is NotAdmittedReason.STALE_INCARNATION
    grants.registered(5)
    assert grants.check(grant(1)) is None
    assert grants.check(grant(2, incarnation=4)) is NotAdmittedReason.STALE_INCARNATION
    grants.registered(9)
    assert grants.check(grant(3)) is NotAdmittedReason.STALE_INCARNATION
    assert grants.check(grant(1, incarnation=9)) is None, "numbers start again in a new life"


def test_a_newer_leader_ends_the_older_one() -> None:
    grants = book()
    assert grants.check(grant(1, epoch=3)) is None
    assert grants.check(grant(1, epoch=4)) is None, "each leader counts for itself"
    assert grants.check(grant(2, epoch=3)) is NotAdmittedReason.STALE_EPOCH
    grants.on_leader(6)
    assert grants.check(grant(2, epoch=4)) is NotAdmittedReason.STALE_EPOCH
    grants.on_leader(5)
    assert grants.epoch == 6


def test_the_numbers_seen_are_told_once_admitted_or_not() -> None:
    grants = book()
    for number in (1, 3, 2, 3):
        grants.check(grant(number))
    assert grants.take_seen() == (3, (1, 3, 2))
    assert grants.take_seen() == (3, ())
    grants.check(grant(4))
    grants.on_leader(4)
    assert grants.take_seen() == (4, ()), "the numbers of the old leader mean nothing to the new one"


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=200))
def test_each_number_counts_once(numbers: list[int]) -> None:
    grants = book()
    admitted = [number for number in numbers if grants.check(grant(number)) is None]
    assert sorted(admitted) == sorted(set(numbers))


def test_memory_is_bounded_and_forgotten_numbers_stay_refused() -> None:
    grants = book()
    for number in range(1, 5 * WINDOW):
        assert grants.check(grant(2 * number)) is None
    assert len(grants._seen) <= 2 * WINDOW
    for number in (1, 2, 2 * WINDOW, 4 * WINDOW):
        assert grants.check(grant(number)) is NotAdmittedReason.GRANT_REPLAYED
    assert grants.check(grant(10 * WINDOW - 1)) is None, "the newest may come late"
    assert len(grants.take_seen()[1]) <= 65536
