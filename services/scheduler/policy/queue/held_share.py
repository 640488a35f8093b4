"""Held shares: the tenants of a pool that hold more than their share, with more than that waiting.

A fair queue determines the next placement, and a pool frees room a piece at a time. A tenant with a standing
queue takes each piece at once, so that the next tenant finds workers with no room and with queued prompts. A
tenant with a queue loses little when a placement starts slightly later; the others would miss their time to
first token. So a placement of such a tenant starts only where almost no prefill is queued (``length``).
Networks limit a flooding stream to the capacity that it leaves free for the same reason: trunk reservation
(Key, Optimal control and trunk reservation in loss networks, 1990).

The share is by weight, among the tenants that hold sequences: granted and not ended. A tenant that is alone
is not limited, nor is one whose queue is short.

Where no worker has a slot, a tenant that would stay within its share with one more sequence may get a slot
that a worker takes from the tenant with the most. Pure; a change costs O(1).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class _Held(Struct):
    sequences: int
    weight: float


_NOTHING: Final = _Held(0, 0.0)


class HeldShares:
    """The granted sequences of one pool, by tenant. Bounded by the open grants. Single writer."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._sequences = 0
        self._weight = 0.0

    def __len__(self) -> int:
        """Return how many tenants hold a sequence."""
        return len(self._held)

    @property
    def sequences(self) -> int:
        return self._sequences

    def take(self, tenant: str, weight: float) -> None:
        """Count a granted sequence. The latest weight applies to all sequences of the tenant."""
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held(0, 0.0)
        self._weight += weight - held.weight
        held.weight = weight
        held.sequences += 1
        self._sequences += 1

    def release(self, tenant: str) -> None:
        """Count an ended sequence. KeyError for a tenant that holds none."""
        held = self._held[tenant]
        held.sequences -= 1
        self._sequences -= 1
        if not held.sequences:
            del self._held[tenant]
            self._weight = self._weight - held.weight if self._held else 0.0  # no rounding error remains

    def over_share(self, tenant: str, waiting: int) -> bool:
        """Return whether the tenant holds more than its share, with more than its share ``waiting`` too."""
        held = self._held.get(tenant)
        if held is None or len(self._held) < 2:
            return False
        share = self._sequences * held.weight / self._weight
        return held.sequences > share and waiting > share

    def is_below(self, tenant: str, weight: float) -> bool:
        """Return whether one more sequence leaves it within its share, while others hold some."""
        held = self._held.get(tenant, _NOTHING)
        others = self._weight - held.weight
        if len(self._held) - (held is not _NOTHING) == 0:
            return False
        return held.sequences + 1 <= self._sequences * weight / (others + weight)

    def check_integrity(self) -> None:
        """Raise AssertionError when the sums are not those of the tenants."""
        assert self._sequences == sum(held.sequences for held in self._held.values())
        assert all(held.sequences > 0 for held in self._held.values()), "a tenant holds nothing"
        weight = sum(held.weight for held in self._held.values())
        assert abs(self._weight - weight) <= 1e-6 * max(1.0, weight), "the weights are miscounted"
