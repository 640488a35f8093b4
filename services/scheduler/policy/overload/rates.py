"""Rates: the drain of a queue, for the retry-after of a refused caller, and each tenant's tokens per minute.

Pure: time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MIN_WAIT_S = 1.0
MAX_WAIT_S = 30.0
_LEAST_WEIGHT = 0.05  # one grant, three windows ago: a lower weight is no evidence


@dataclass(slots=True)
class DrainRate:
    """Grants per second, exponentially averaged over ``window_s``."""

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


WINDOW_S: Final = 60.0
_SLICE_S: Final = 10.0
_KEPT: Final = round(WINDOW_S / _SLICE_S) + 1


@dataclass(slots=True)
class _Use:
    """Tokens by time slice. ``number`` is that of the newest slice; one slice more than a minute is
    stored."""

    number: int
    slices: list[int]

    def turn_to(self, number: int) -> None:
        for passed in range(self.number + 1, min(number, self.number + _KEPT) + 1):
            self.slices[passed % _KEPT] = 0
        self.number = max(self.number, number)


class TenantRates:
    """Tokens of the last minute, of at most ``max_tenants``, counted in slices of ten seconds.

    The tenant updated least recently is removed first; it then counts as having used nothing.
    """

    def __init__(self, max_tenants: int = 16384) -> None:
        self._max = max_tenants
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, tenant: str, tokens: int, now_s: float) -> None:
        """Count tokens that were computed for the tenant."""
        number = int(now_s // _SLICE_S)
        use = self._uses.get(tenant)
        if use is None:
            while len(self._uses) >= self._max:
                self._uses.popitem(last=False)
            use = self._uses[tenant] = _Use(number, [0] * _KEPT)
        self._uses.move_to_end(tenant)
        if number != use.number:
            use.turn_to(number)
        use.slices[number % _KEPT] += tokens

    def tokens_per_minute(self, tenant: str, now_s: float) -> int:
        """Return the tokens of the last minute; the oldest slice counts with its share of the minute."""
        use = self._uses.get(tenant)
        if use is None:
            return 0
        number, into_s = divmod(now_s, _SLICE_S)
        use.turn_to(int(number))
        oldest = use.slices[(use.number + 1) % _KEPT]
        return sum(use.slices) - round(oldest * into_s / _SLICE_S)

    def is_over(self, tenant: str, committed_per_minute: int, now_s: float) -> bool:
        """Whether the tenant exceeds its committed rate. Without a commitment it never does."""
        return committed_per_minute > 0 and self.tokens_per_minute(tenant, now_s) > committed_per_minute
