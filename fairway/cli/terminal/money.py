"""Parsing and display of amounts of money, which the API has in millionths of the currency unit."""

from __future__ import annotations

import re
from typing import Final

MICROS: Final = 1_000_000
_MAX_MICROS: Final = 1_000_000_000 * MICROS
_AMOUNT: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?")


def parse_money(text: str) -> int:
    """Return the millionths of `12`, `12.50` or `0.000001`. Raises ValueError with the expected form."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not an amount; write it like 12.50, with at most six decimals")
    micros = int(found[1]) * MICROS + int((found[2] or "").ljust(6, "0"))
    if micros > _MAX_MICROS:
        raise ValueError(f"{text!r} is above a billion")
    return micros


def show_money(micros: int) -> str:
    """Return an amount with two decimals, or as many as it has: `12.50`, `0.000001`."""
    whole, rest = divmod(micros, MICROS)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{decimals}"
