"""What rates count in this process: the same arithmetic as the Redis scripts, on monotonic microseconds."""

from __future__ import annotations

from dataclasses import dataclass

from services.adapters.quotas.quota import REQUEST_UNITS, TOKEN_UNITS, most
from services.core.limits import Limit, LimitKind


@dataclass(slots=True)
class RequestMeter:
    """``used`` units at ``at_us``."""

    used: int = 0
    at_us: int = 0

    def wait_us(self, limit: Limit, amount: int, now_us: int) -> int:
        """Return the time until ``amount`` more fits; 0 if it fits now."""
        rate = most(limit)
        used = self.level(limit, now_us) + amount * REQUEST_UNITS
        return max(0, -(-(used - rate * REQUEST_UNITS) // rate))

    def count(self, limit: Limit, amount: int, now_us: int) -> int:
        """Count ``amount`` more, or fewer. Returns what is counted now, in units."""
        self.used = self.level(limit, now_us) + amount * REQUEST_UNITS
        self.at_us = now_us
        return self.used

    def level(self, limit: Limit, now_us: int) -> int:
        """Return what is counted now, in units."""
        elapsed_us = max(0, min(now_us - self.at_us, REQUEST_UNITS))
        return max(0, self.used - elapsed_us * most(limit))


@dataclass(slots=True)
class TokenMeter:
    """``used`` units at ``at_ms``, drained by ``rate`` units per millisecond. As ``RequestMeter``."""

    used: int = 0
    at_ms: int = 0
    rate: int = 0

    def wait_us(self, limit: Limit, amount: int, now_us: int) -> int:
        rate = most(limit)
        used = self.level(limit, now_us) + amount * TOKEN_UNITS
        return max(0, -(-(used - rate * TOKEN_UNITS) // rate)) * 1000

    def count(self, limit: Limit, amount: int, now_us: int) -> int:
        self.used = max(0, self.level(limit, now_us) + amount * TOKEN_UNITS)
        self.at_ms, self.rate = now_us // 1000, most(limit)
        return self.used

    def level(self, limit: Limit, now_us: int) -> int:
        return max(0, self.used - max(0, now_us // 1000 - self.at_ms) * self.rate)


def rate_meter(kind: LimitKind) -> RequestMeter | TokenMeter:
    return RequestMeter() if kind is LimitKind.REQUESTS else TokenMeter()
