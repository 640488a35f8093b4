"""Amounts of money: read as they are written, and shown as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.cli.terminal.cells import parse_money, show_money


@pytest.mark.parametrize(
    ("text", "micros", "shown"),
    [
        ("12", 12_000_000, "12.00"),
        ("12.5", 12_500_000, "12.50"),
        ("0.000001", 1, "0.000001"),
        (" 0.075 ", 75_000, "0.075"),
        ("0", 0, "0.00"),
    ],
)
def test_an_amount_is_read_and_shown(text: str, micros: int, shown: str) -> None:
    assert parse_money(text) == micros
    assert show_money(micros) == shown


@pytest.mark.parametrize("text", ["", "-1", "1.0000001", "1e3", "1,5", "$5", "1000000001", "٣"])
def test_what_is_no_amount_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an amount|above a billion"):
        parse_money(text)


@given(st.integers(0, 10**15))
def test_every_amount_is_shown_exactly(micros: int) -> None:
    assert parse_money(show_money(micros)) == micros
