"""Tenants take turns, whatever each of them has waiting."""

from __future__ import annotations

from services.runtime.process.tenant_turns import TenantRoundRobin


def filled(**waiting: int) -> TenantRoundRobin[str]:
    turns: TenantRoundRobin[str] = TenantRoundRobin()
    for tenant, count in waiting.items():
        for number in range(count):
            turns.add(tenant, f"{tenant}{number}")
    return turns


def test_one_of_each_tenant_in_turn() -> None:
    turns = filled(a=3, b=1, c=2)
    assert [turns.take(()) for _ in range(7)] == ["a0", "b0", "c0", "a1", "c1", "a2", None]


def test_a_tenant_that_comes_later_waits_for_one_of_the_others_only() -> None:
    turns = filled(a=1000)
    assert turns.take(()) == "a0"
    turns.add("b", "b0")
    assert [turns.take(()) for _ in range(2)] == ["a1", "b0"]


def test_who_is_busy_is_passed_over_and_loses_nothing() -> None:
    turns = filled(a=2, b=2)
    assert turns.take({"a"}) == "b0"
    assert turns.take({"a", "b"}) is None
    assert turns.next_tenant({"b"}) == "a"
    assert turns.take(()) == "a0"


def test_what_is_given_up_waits_no_more() -> None:
    turns = filled(a=2, b=1)
    turns.discard("a", "a0")
    turns.discard("a", "a0")
    turns.discard("c", "c0")
    assert len(turns) == 2
    assert [turns.take(()) for _ in range(3)] == ["a1", "b0", None]


def test_what_had_its_turn_comes_first() -> None:
    turns = filled(a=1, b=1)
    turns.add_first("b", "again")
    assert [turns.take(()) for _ in range(3)] == ["again", "a0", "b0"]
