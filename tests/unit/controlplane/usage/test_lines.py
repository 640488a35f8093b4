"""Sums of lines, and their bound."""

from __future__ import annotations

from msgspec.structs import replace

from services.controlplane.usage.policy.lines import (
    MAX_USERS,
    OTHER_USERS,
    Amounts,
    Line,
    LineSums,
    summed,
)

ONE = Amounts(1, 10, 4, 2, 1000, 3, 5)
LINE = Line(5, "acme", "k1", "ann", "chat")


def test_amounts_add_up_per_line_and_hour() -> None:
    sums = LineSums()
    for line in (LINE, LINE, replace(LINE, hour=6)):
        sums.add(line, ONE)
    assert sums.hours == {5: {LINE: ONE.plus(ONE)}, 6: {replace(LINE, hour=6): ONE}}


def test_a_line_with_nothing_left_is_removed() -> None:
    sums = LineSums()
    sums.add(LINE, ONE)
    sums.add(LINE, ONE.negated())
    assert sums.hours == {5: {}}


def test_users_above_the_bound_share_a_line() -> None:
    sums = LineSums()
    for number in range(MAX_USERS + 50):
        sums.add(replace(LINE, user=f"u{number}"), ONE)
    sums.add(replace(LINE, user="u0"), ONE)
    lines = sums.hours[5]
    assert len(lines) == MAX_USERS + 1
    assert lines[replace(LINE, user=OTHER_USERS)].requests == 50
    assert lines[replace(LINE, user="u0")].requests == 2
    assert sum(amounts.requests for amounts in lines.values()) == MAX_USERS + 51


def test_the_bound_holds_for_merged_parts() -> None:
    parts = []
    for part in range(2):
        sums = LineSums()
        for number in range(MAX_USERS):
            sums.add(replace(LINE, user=f"u{part}-{number}"), ONE)
        parts.append(sums.hours[5])
    merged = summed(parts)
    assert len(merged) == MAX_USERS + 1
    assert merged[replace(LINE, user=OTHER_USERS)].requests == MAX_USERS


def test_each_tenant_has_its_own_bound() -> None:
    sums = LineSums()
    for number in range(MAX_USERS + 1):
        sums.add(replace(LINE, user=f"u{number}"), ONE)
    assert sums.add(replace(LINE, tenant="other", user="bob"), ONE).user == "bob"
    assert sums.add(replace(LINE, hour=6, user="bob"), ONE).user == "bob"


def test_measured_cost_is_device_time_at_the_price_of_the_device() -> None:
    assert Amounts.of_device(1800, 2.0) == Amounts(device_us=1_800_000_000, measured_nanos=1_000_000_000)
