"""A tenant whose texts end processes is suspended, for longer each time."""

from __future__ import annotations

from services.gateway.text.child import CALM_S, FIRST_S, MAX_TENANTS, MOST_S, Strikes


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
