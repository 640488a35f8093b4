"""What limits count, in this process: the same arithmetic as the Redis scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.adapters.quotas.quota import REQUEST_UNITS, TOKEN_UNITS, most, period_end_s, period_of
from services.core.limits import BUDGETS, Limit, LimitKind

_KEPT_PERIODS: Final = 40


@dataclass(frozen=True, slots=True)
class Times:
    """``now_us`` is monotonic, for rates and leases. A budget's period is that of the admission."""

    now_us: int
    now_unix_s: float
    admitted_unix_s: float


class Meter(Protocol):
    def wait_us(self, limit: Limit, amount: int, times: Times) -> int:
        """Return the time until ``amount`` more fits; 0 if it fits now."""

    def level(self, limit: Limit, times: Times) -> int:
        """Return what a rate counts now, in its units."""

    def count(self, limit: Limit, reserved: int, settled: int, times: Times) -> int:
        """Count these amounts more, or fewer. Returns what a rate counts now, in its units."""


@dataclass(slots=True)
class RequestMeter:
    """``used`` units at ``at_us``."""

    used: int = 0
    at_us: int = 0

    def wait_us(self, limit: Limit, amount: int, times: Times) -> int:
        rate = most(limit)
        used = self.level(limit, times) + amount * REQUEST_UNITS
        return max(0, -(-(used - rate * REQUEST_UNITS) // rate))

    def count(self, limit: Limit, reserved: int, settled: int, times: Times) -> int:
        self.used = self.level(limit, times) + (reserved + settled) * REQUEST_UNITS
        self.at_us = times.now_us
        return self.used

    def level(self, limit: Limit, times: Times) -> int:
        elapsed_us = max(0, min(times.now_us - self.at_us, REQUEST_UNITS))
        return max(0, self.used - elapsed_us * most(limit))


@dataclass(slots=True)
class TokenMeter:
    """``used`` units at ``at_ms``, drained by ``rate`` units per millisecond."""

    used: int = 0
    at_ms: int = 0
    rate: int = 0

    def wait_us(self, limit: Limit, amount: int, times: Times) -> int:
        rate = most(limit)
        used = self.level(limit, times) + amount * TOKEN_UNITS
        return max(0, -(-(used - rate * TOKEN_UNITS) // rate)) * 1000

    def count(self, limit: Limit, reserved: int, settled: int, times: Times) -> int:
        self.used = max(0, self.level(limit, times) + (reserved + settled) * TOKEN_UNITS)
        self.at_ms, self.rate = times.now_us // 1000, most(limit)
        return self.used

    def level(self, limit: Limit, times: Times) -> int:
        return max(0, self.used - max(0, times.now_us // 1000 - self.at_ms) * self.rate)


@dataclass(slots=True)
class BudgetMeter:
    """Micro-dollars by period: settled, and reserved by running requests."""

    settled: Counter[int] = field(default_factory=Counter)
    reserved: Counter[int] = field(default_factory=Counter)

    def wait_us(self, limit: Limit, amount: int, times: Times) -> int:
        period = period_of(limit.kind, times.admitted_unix_s)
        if self.settled[period] + self.reserved[period] + amount <= most(limit):
            return 0
        end_s = period_end_s(limit.kind, times.admitted_unix_s)
        return max(1, round((end_s - times.now_unix_s) * 1e6))

    def level(self, limit: Limit, times: Times) -> int:
        return 0

    def count(self, limit: Limit, reserved: int, settled: int, times: Times) -> int:
        period = period_of(limit.kind, times.admitted_unix_s)
        self.reserved[period] = max(0, self.reserved[period] + reserved)
        self.settled[period] += settled
        for old in [old for old in self.settled if old < period - _KEPT_PERIODS]:
            del self.settled[old], self.reserved[old]
        return 0


def new_meter(kind: LimitKind) -> RequestMeter | TokenMeter | BudgetMeter:
    if kind in BUDGETS:
        return BudgetMeter()
    return RequestMeter() if kind is LimitKind.REQUESTS else TokenMeter()
