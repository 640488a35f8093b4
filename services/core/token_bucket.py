"""A rate with a burst, as tokens that are earned over time. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Has at most ``burst`` tokens and gains ``rate_per_s``; starts full."""

    rate_per_s: float
    burst: int
    _taken: float = 0.0
    _last_s: float = 0.0

    def take(self, wanted: int, now_s: float) -> int:
        """Take up to ``wanted`` tokens and return how many were taken."""
        self._taken = max(0.0, self._taken - max(0.0, now_s - self._last_s) * self.rate_per_s)
        self._last_s = now_s
        given = min(wanted, int(self.burst - self._taken))
        self._taken += given
        return given
