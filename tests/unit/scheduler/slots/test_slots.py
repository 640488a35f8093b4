"""Division of slots: bounds, levels, classes and first slots, over drawn claims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.slots.pool import SlotClaim, divide, level

CLAIMS = st.lists(
    st.builds(
        SlotClaim,
        name=st.text("abcdefgh", min_size=1, max_size=4),
        rows=st.integers(0, 300),
        rank=st.integers(1, 3),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        row_s=st.sampled_from([1e-4, 1e-3, 2e-2]),
        order=st.tuples(st.floats(0, 100)),
        overdue=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda claim: claim.name,
)


@given(CLAIMS, st.integers(0, 400), st.sampled_from([0.0, 1 / 16]))
def test_nobody_gets_more_than_its_rows_and_all_no_more_than_there_is(
    claims: list[SlotClaim], slots: int, spare_ratio: float
) -> None:
    found = divide(slots, claims, spare_ratio=spare_ratio)
    assert sum(found.values()) <= slots
    assert all(0 <= found[claim.name] <= claim.rows for claim in claims)


@given(CLAIMS, st.integers(0, 400))
def test_each_gets_one_while_they_suffice_and_nothing_stays_unused(
    claims: list[SlotClaim], slots: int
) -> None:
    found = divide(slots, claims)
    wanting = [claim for claim in claims if claim.rows]
    assert sum(bool(found[claim.name]) for claim in wanting) == min(slots, len(wanting))
    assert sum(found.values()) == min(slots, sum(claim.rows for claim in claims)) or slots < len(wanting)


@given(CLAIMS, st.integers(0, 400))
def test_within_a_class_one_that_lacks_slots_is_at_most_one_slot_below_the_others(
    claims: list[SlotClaim], slots: int
) -> None:
    found = divide(slots, claims)
    for lacks in claims:
        for other in claims:
            is_peer = lacks.rank == other.rank and found[other.name] > 1
            if is_peer and 0 < found[lacks.name] < lacks.rows:
                height = (found[lacks.name] + 1) * lacks.slot_cost
                assert (found[other.name] - 1) * other.slot_cost <= height * (1 + 1e-9)


@given(CLAIMS, st.integers(0, 400))
def test_a_class_lacks_nothing_while_one_below_has_more_than_one_each(
    claims: list[SlotClaim], slots: int
) -> None:
    found = divide(slots, claims)
    for low in claims:
        for high in claims:
            if low.rank < high.rank and found[low.name] > 1:
                assert found[high.name] == high.rows


def test_too_few_slots_go_to_those_overdue_then_by_class_then_by_order() -> None:
    claims = [
        SlotClaim("low", 5, rank=1, order=(0.0,)),
        SlotClaim("served", 5, rank=2, order=(9.0,)),
        SlotClaim("less", 5, rank=2, order=(1.0,)),
        SlotClaim("overdue", 5, rank=1, order=(9.0,), overdue=True),
    ]
    assert divide(2, claims) == {"low": 0, "served": 0, "less": 1, "overdue": 1}


def test_level_keeps_what_each_has_at_least() -> None:
    claims = [SlotClaim("a", 100), SlotClaim("b", 100, row_s=9.0)]
    assert level(20, claims, least={"a": 0, "b": 10}) == {"a": 10, "b": 10}
    assert level(20, claims, least={"a": 0, "b": 0}) == {"a": 18, "b": 2}
