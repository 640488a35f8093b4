"""Which tenants of a pool hold more than their share of it, with more than that waiting: they give way.

A fair queue says who is next, and a pool gives room as it comes. A tenant with a standing queue takes each
piece of it at once, so that whoever comes next finds its workers with no room and with prompts queued. The
one with the queue loses little by starting a moment later; the others lose their time to the first token. So
a placement of such a tenant starts only where next to no prefill is queued (``length``). A stream that
floods a network is held to what it leaves free for the same reason: trunk reservation (Key, Optimal control
and trunk reservation in loss networks, 1990).

The share is by weight, among the tenants that hold something, and counts sequences: granted and not ended. A
tenant that is alone gives way to nobody, nor does one whose queue is short.

Where no worker has a slot, a tenant that would hold no more than its share with one sequence more may have a
slot that a worker takes from the tenant with the most. Pure; a change costs O(1).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class _Held(Struct):
    sequences: int
    weight: float


_NOTHING: Final = _Held(0, 0.0)


class HeldShares:
    """The granted sequences of one pool, by tenant. Bounded by the grants that are open. Single writer."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._sequences = 0
        self._weight = 0.0

    def __len__(self) -> int:
        """How many tenants hold something."""
        return len(self._held)

    @property
    def sequences(self) -> int:
        return self._sequences

    def take(self, tenant: str, weight: float) -> None:
        """Count a sequence that was granted. The weight said last counts for all of the tenant's."""
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held(0, 0.0)
        self._weight += weight - held.weight
        held.weight = weight
        held.sequences += 1
        self._sequences += 1

    def release(self, tenant: str) -> None:
        """Count one of them as ended. KeyError for a tenant that holds none."""
        held = self._held[tenant]
        held.sequences -= 1
        self._sequences -= 1
        if not held.sequences:
            del self._held[tenant]
            self._weight = self._weight - held.weight if self._held else 0.0  # no rounding is carried along

    def gives_way(self, tenant: str, waiting: int) -> bool:
        """Return whether it holds more than its share, with ``waiting`` placements above that share too."""
        held = self._held.get(tenant)
        if held is None or len(self._held) < 2:
            return False
        share = self._sequences * held.weight / self._weight
        return held.sequences > share and waiting > share

    def is_below(self, tenant: str, weight: float) -> bool:
        """Return whether one sequence more leaves it within its share, while others hold some."""
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
