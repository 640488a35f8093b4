"""Division of slots by weighted max-min fairness of device time. Pure.

A slot in use has always a row in flight, and a worker serves rows in the order of their arrival. So by
Little's law the rows per second of a tenant are proportional to its slots, and its device time to its slots
times the device time of its rows. ``divide`` levels that product, over weight, among those who can use more
(progressive filling; Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# Part of the slots that is kept for tenants that begin while others could use all.
NEWCOMERS_RATIO: Final = 1 / 16
_HALVINGS: Final = 20  # the rest is given slot by slot


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """One claimant. ``rows``: the most slots it can use."""

    name: str
    rows: int
    rank: int = 0  # rank of its class; the higher is served first
    weight: float = 1.0
    row_s: float = 1.0  # device time of one of its rows
    order: tuple[float, ...] = ()  # order among equals and for the first slots; the smallest is first
    overdue: bool = False  # it gets one slot before any class

    @property
    def slot_cost(self) -> float:
        """The weighted device time that one slot takes."""
        return self.row_s / self.weight


def divide(slots: int, claims: Sequence[SlotClaim], *, spare_ratio: float = 0.0) -> dict[str, int]:
    """Return the slots of each claimant, in sum at most ``slots``.

    One for each, while they suffice; the rest by class, level within a class, ``spare_ratio`` of them to
    nobody.
    """
    first = sorted(claims, key=lambda claim: (not claim.overdue, -claim.rank, claim.order, claim.name))
    given = dict.fromkeys((claim.name for claim in claims), 0)
    for claim in [claim for claim in first if claim.rows > 0][:slots]:
        given[claim.name] = 1
    left = slots - sum(given.values())
    left = max(0, left - int(slots * spare_ratio))
    for rank in sorted({claim.rank for claim in claims}, reverse=True):
        peers = [claim for claim in claims if claim.rank == rank and given[claim.name] > 0]
        before = sum(given[claim.name] for claim in peers)
        given |= level(left + before, peers, least=given)
        left -= sum(given[claim.name] for claim in peers) - before
    return given


def level(slots: int, claims: Sequence[SlotClaim], *, least: Mapping[str, int]) -> dict[str, int]:
    """Return the slots of each claimant: at most its rows, at least ``least``, otherwise of equal cost.

    ``least`` in sum is at most ``slots``.
    """

    bounds = [(claim.slot_cost, least[claim.name], claim.rows) for claim in claims]

    def at(height: float) -> list[int]:
        return [max(low, min(high, int(height / cost))) for cost, low, high in bounds]

    low, high = 0.0, max((cost * rows for cost, _, rows in bounds), default=0.0) * (1 + 1e-9)
    found = at(high)
    if sum(found) > slots:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(at(middle)) <= slots:
                low = middle
            else:
                high = middle
        found = at(low)
    given = {claim.name: rows for claim, rows in zip(claims, found, strict=True)}
    _give_rest(slots - sum(found), claims, given)
    return given


def _give_rest(slots: int, claims: Sequence[SlotClaim], given: dict[str, int]) -> None:
    """Give what equal heights leave over, each slot to the claimant with the least."""
    heap = [
        (given[claim.name] * claim.slot_cost, claim.order, claim.name, claim)
        for claim in claims
        if given[claim.name] < claim.rows
    ]
    heapq.heapify(heap)
    while slots > 0 and heap:
        _, _, name, claim = heapq.heappop(heap)
        given[name] += 1
        slots -= 1
        if given[name] < claim.rows:
            heapq.heappush(heap, (given[name] * claim.slot_cost, claim.order, name, claim))
