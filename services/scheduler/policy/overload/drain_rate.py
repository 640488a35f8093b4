"""Drain rate of a queue, for the retry-after of a refused caller."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_WAIT_S = 1.0
MAX_WAIT_S = 30.0
_LEAST_WEIGHT = 0.05  # one grant, three windows ago: a lower weight is no evidence


@dataclass(slots=True)
class DrainRate:
    """Grants per second, exponentially averaged over ``window_s``. Time is an argument."""

    window_s: float = 5.0
    _weight: float = 0.0  # grants, each decayed by its age
    _last_s: float = 0.0

    def note(self, now_s: float) -> None:
        """Count one grant."""
        self._weight = self._decayed(now_s) + 1.0
        self._last_s = now_s

    def drain_s(self, queued: int, now_s: float) -> float | None:
        """Return how long a queue of this length takes to drain; None without recent grants."""
        rate = self._decayed(now_s) / self.window_s
        return queued / rate if rate * self.window_s >= _LEAST_WEIGHT else None

    def wait_s(self, queued: int, now_s: float) -> float:
        """Return how long a queue of this length takes to drain, within MIN_WAIT_S and MAX_WAIT_S."""
        rate = self._decayed(now_s) / self.window_s
        if rate <= 0.0:
            return MIN_WAIT_S if not queued else MAX_WAIT_S
        return min(MAX_WAIT_S, max(MIN_WAIT_S, queued / rate))

    def _decayed(self, now_s: float) -> float:
        return self._weight * math.exp(-max(0.0, now_s - self._last_s) / self.window_s)
