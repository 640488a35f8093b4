"""Tenants take turns, whatever each of them has waiting."""

from __future__ import annotations

from services.gateway.policy.text_turns import CALM_S, FIRST_S, MAX_TENANTS, MOST_S, Strikes, TenantRoundRobin


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


def struck(strikes: Strikes, tenant: str, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        strikes.killed(tenant, now_s)


def test_a_tenant_is_suspended_for_longer_each_time() -> None:
    strikes = Strikes()
    struck(strikes, "a", 2)
    assert strikes.suspended_s("a", 0.0) == 0.0
    found = []
    for _ in range(6):
        strikes.killed("a", 0.0)
        found.append(strikes.suspended_s("a", 0.0))
    assert found == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, MOST_S, MOST_S]
    assert strikes.suspended_s("b", 0.0) == 0.0
    assert strikes.suspended_s("a", MOST_S) == 0.0


def test_three_suspended_tenants_suspend_the_version() -> None:
    strikes = Strikes()
    struck(strikes, "a", 9)
    struck(strikes, "b", 9)
    assert strikes.suspended_s("honest", 0.0) == 0.0
    struck(strikes, "c", 9)
    assert strikes.suspended_s("honest", 0.0) == MOST_S


def test_a_count_begins_anew_after_a_calm_time() -> None:
    strikes = Strikes()
    struck(strikes, "a", 9)
    strikes.killed("a", CALM_S)
    assert strikes.suspended_s("a", CALM_S) == 0.0


def test_what_is_counted_is_bounded() -> None:
    strikes = Strikes()
    for number in range(2 * MAX_TENANTS):
        strikes.killed(f"tenant {number}", number / 1e3)
    assert len(strikes._counts) == MAX_TENANTS
