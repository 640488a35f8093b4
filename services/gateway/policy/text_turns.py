"""Which tenants' texts are suspended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FREE_KILLS: Final = 2
FIRST_S: Final = 5.0
MOST_S: Final = 60.0
CALM_S: Final = 120.0  # time after which a count starts again
SUSPENDING_TENANTS: Final = 3
MAX_TENANTS: Final = 256


@dataclass(slots=True)
class _Count:
    kills: int
    last_s: float
    until_s: float


class Strikes:
    """Ended text processes of one version, by the tenant whose text ended them.

    One tenant's texts never suspend a version for the others; those of several tenants do.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def suspended_s(self, tenant: str, now_s: float) -> float:
        """Return for how long the tenant's texts are rejected; 0 when they are accepted."""
        if not self._counts:
            return 0.0
        left_s = [max(0.0, count.until_s - now_s) for count in self._counts.values()]
        if sum(1 for left in left_s if left) >= SUSPENDING_TENANTS:
            return max(left_s)
        mine = self._counts.get(tenant)
        return 0.0 if mine is None else max(0.0, mine.until_s - now_s)

    def killed(self, tenant: str, now_s: float) -> None:
        """Count a process that a text of the tenant ended."""
        self._counts = {name: count for name, count in self._counts.items() if now_s < count.last_s + CALM_S}
        count = self._counts.get(tenant)
        if count is None:
            if len(self._counts) >= MAX_TENANTS:
                del self._counts[min(self._counts, key=lambda name: self._counts[name].last_s)]
            count = self._counts[tenant] = _Count(0, now_s, 0.0)
        count.kills += 1
        count.last_s = now_s
        if count.kills > FREE_KILLS:
            count.until_s = now_s + min(MOST_S, FIRST_S * 2 ** (count.kills - FREE_KILLS - 1))
