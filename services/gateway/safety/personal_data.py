"""Recognisers of personal data: bounded expressions, with what their matches have to satisfy."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Final

from fairway.formats.expressions import parse
from fairway.formats.safety import DataKind
from services.gateway.safety.automaton import Sought


def recognisers(kind: DataKind, rule: int) -> list[Sought]:
    """Return what finds data of a kind, for a rule."""
    return [Sought(parse(source), rule, valid) for source, valid in _SOURCES[kind]]


def _digits(text: str) -> list[int]:
    return [int(char) for char in text if char.isdecimal()]


def is_card(text: str) -> bool:
    """Return whether a number has a card's issuer, length and check digit (Luhn, ISO/IEC 7812-1)."""
    digits = _digits(text)
    if digits[0] == 2 and not [2, 2, 0, 0] <= digits[:4] <= [2, 7, 2, 0]:  # the other numbers have no issuer
        return False
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and not (sum(digits[-1::-2]) + sum(doubled)) % 10


def is_iban(text: str) -> bool:
    """Return whether an account number has an IBAN's length and check digits (mod 97, ISO 13616)."""
    compact = text.replace(" ", "")
    number = "".join(str(int(char, 36)) for char in compact[4:] + compact[:4])
    return 15 <= len(compact) <= 34 and int(number) % 97 == 1


def is_address(text: str) -> bool:
    """Return whether a text is an IP address. Short ones such as ``::1`` are of no person."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return len(text) >= 7


def is_ssn(text: str) -> bool:
    """Return whether a number can be one of the US social security: none has a part of zeros."""
    area, group, serial = text[:3], text[4:6], text[7:]
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def is_phone(text: str) -> bool:
    """Return whether a number has the digits of an international one (E.164)."""
    return 8 <= len(_digits(text)) <= 15


_SOURCES: Final[Mapping[DataKind, tuple[tuple[str, Callable[[str], bool] | None], ...]]] = {
    "email": ((r"\b[a-z0-9][a-z0-9._%+'-]{0,63}@(?:[a-z0-9-]{1,30}\.){1,4}[a-z]{2,24}\b", None),),
    "card": (
        (r"\b[2-6]\d{3}[ -]?\d{4}[ -]?\d{4}[ -]?\d{1,7}\b", is_card),
        (r"\b3\d{3}[ -]?\d{6}[ -]?\d{4,5}\b", is_card),
    ),
    "iban": ((r"\b[a-z]{2}\d{2}(?: ?[a-z0-9]{4}){2,7}(?: ?[a-z0-9]{1,3})?\b", is_iban),),
    "phone": (
        (r"\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,6}\b", is_phone),
        (r"\b(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[ .-])\d{3}[ .-]\d{4}\b", None),
    ),
    "ip": (
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", is_address),
        (r"\b[0-9a-f]{1,4}(?::[0-9a-f]{0,4}){2,7}\b", is_address),
    ),
    "ssn": ((r"\b\d{3}[ -]\d{2}[ -]\d{4}\b", is_ssn),),
}
