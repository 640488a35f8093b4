"""Lines of the usage ledger: where amounts are booked, and their sums by hour.

Structs, not dataclasses: several are made, hashed and compared for every request of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import astuple, replace

from services.core.generation import Usage

HOUR_S: Final = 3600
MAX_USERS: Final = 10_000  # end users of a tenant with lines of their own, per hour
MAX_AMOUNT: Final = 2**63 - 1  # the largest stored sum
OTHER_USERS: Final = "(other)"


class Source(StrEnum):
    """Who reported what a line sums. IDLE and UNATTRIBUTED: device time that belongs to no request."""

    GATEWAY = "gateway"
    WORKER = "worker"
    IDLE = "idle"
    UNATTRIBUTED = "unattributed"


class Line(Struct, frozen=True):
    """``hour``: hours since the Unix epoch."""

    hour: int
    tenant: str = ""
    key_id: str = ""
    user: str = ""
    model: str = ""
    version_digest: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    source: Source = Source.GATEWAY


class Amounts(Struct, frozen=True, gc=False):
    """Differences and sums. Money: list price in millionths, measured cost in billionths of the unit."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    device_us: int = 0
    list_micros: int = 0
    measured_nanos: int = 0

    @classmethod
    def of_tokens(cls, usage: Usage, list_micros: int) -> Self:
        """Return the amounts of one request, without device time."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        return cls(1, usage.prompt_tokens, cached, usage.output_tokens, list_micros=list_micros)

    @classmethod
    def of_device(cls, device_s: float, cost_per_hour: float) -> Self:
        return cls(
            device_us=round(device_s * 1e6), measured_nanos=round(device_s * cost_per_hour / HOUR_S * 1e9)
        )

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.device_us + other.device_us,
            self.list_micros + other.list_micros,
            self.measured_nanos + other.measured_nanos,
        )

    def negated(self) -> Amounts:
        return Amounts(
            -self.requests,
            -self.prompt_tokens,
            -self.cached_tokens,
            -self.output_tokens,
            -self.device_us,
            -self.list_micros,
            -self.measured_nanos,
        )

    def bounded(self) -> Amounts:
        """Return the amounts, each within what is stored. The caller reports one that is not."""
        return Amounts(*(max(-MAX_AMOUNT, min(MAX_AMOUNT, amount)) for amount in astuple(self)))

    def rise_to(self, total: Amounts) -> Amounts:
        """Return what the larger counts of ``total`` add to the tokens and the list price of these."""
        return Amounts(
            0,
            max(0, total.prompt_tokens - self.prompt_tokens),
            max(0, total.cached_tokens - self.cached_tokens),
            max(0, total.output_tokens - self.output_tokens),
            list_micros=max(0, total.list_micros - self.list_micros),
        )


NOTHING: Final = Amounts()
Lines = Mapping[Line, Amounts]


class LineSums:
    """Sums by hour and line. At most ``MAX_USERS`` users per tenant and hour; later ones share a line."""

    def __init__(self) -> None:
        self._hours: dict[int, dict[Line, Amounts]] = {}
        self._users: dict[tuple[int, str], set[str]] = {}
        self._lines: dict[Line, Line] = {}

    @property
    def hours(self) -> Mapping[int, Lines]:
        return self._hours

    def add(self, line: Line, amounts: Amounts) -> Line:
        """Book the amounts; return the line that has them. A line with nothing left is removed."""
        line = self._line_of(line)
        lines = self._hours.setdefault(line.hour, {})
        total = lines.get(line, NOTHING).plus(amounts)
        if total == NOTHING:
            lines.pop(line, None)
        else:
            lines[line] = total
        return line

    def add_all(self, lines: Lines) -> None:
        for line, amounts in lines.items():
            self.add(line, amounts)

    def _line_of(self, line: Line) -> Line:
        known = self._lines.get(line)
        if known is not None:
            return known
        if line.user and line.user != OTHER_USERS:
            users = self._users.setdefault((line.hour, line.tenant), set())
            if line.user not in users:
                if len(users) >= MAX_USERS:
                    return self._line_of(replace(line, user=OTHER_USERS))
                users.add(line.user)
        return self._lines.setdefault(line, line)  # one object for the many requests that refer to it


def summed(parts: Iterable[Lines]) -> Lines:
    """Return the sum of the lines of one hour."""
    sums = LineSums()
    for part in parts:
        sums.add_all(part)
    for lines in sums.hours.values():
        return lines
    return {}
