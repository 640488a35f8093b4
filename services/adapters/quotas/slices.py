"""Slices of a tenant's rates that one gateway holds. Pure: the caller takes them from the shared store.

A tenant is *hot* once this gateway decides ``hot_per_s`` of its requests in a second. Its rates are then
taken from the shared store by the slice: about what ``slice_s`` of its present demand needs, at most this
gateway's part of ``slice_ratio`` of a minute's. What is in a slice has been counted in the shared store, so
all gateways together admit no more than the rate admits. The error is one of time: what the slices hold may
be used later than it was counted, and what they hold unused is missing elsewhere. Each is at most
``slice_ratio``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Scope

_LEASED: Final = frozenset({LimitKind.REQUESTS, *TOKEN_RATES})


def is_leasable(limit: Limit) -> bool:
    """Whether slices may be taken of a limit: a rate of a tenant or a key, not of an end user."""
    return limit.kind in _LEASED and limit.scope is not Scope.USER


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """When and how much of a rate is leased."""

    hot_per_s: float = 200.0
    slice_s: float = 0.5
    # Of a minute's limit, in the slices of all gateways together.
    slice_ratio: float = 0.02
    # The time after which an unused slice is dropped.
    idle_s: float = 5.0


@dataclass(slots=True)
class Slice:
    """What is left of one limit's slice; negative after uses above their claims, until the next one."""

    left: int = 0
    used_s: float = 0.0


@dataclass(slots=True)
class SliceDemand:
    """Decisions and amounts of the present second, and those of the last whole one per second."""

    second: int = 0
    decisions: int = 0
    amounts: dict[Limit, int] = field(default_factory=dict)
    decisions_per_s: float = 0.0
    amounts_per_s: dict[Limit, int] = field(default_factory=dict)

    def count(self, now_s: float, decisions: int, claims: tuple[Claim, ...]) -> None:
        second = int(now_s)
        if second != self.second:
            last = second == self.second + 1
            self.decisions_per_s = float(self.decisions) if last else 0.0
            self.amounts_per_s = self.amounts if last else {}
            self.second, self.decisions, self.amounts = second, 0, {}
        self.decisions += decisions
        amounts = self.amounts
        for claim in claims:
            amounts[claim.limit] = amounts.get(claim.limit, 0) + claim.amount


class TenantSlices:
    """The slices of one tenant. Single writer: its limiter."""

    def __init__(self, settings: SliceSettings) -> None:
        self._settings = settings
        self._slices: dict[Limit, Slice] = {}
        self._demand = SliceDemand()

    @property
    def hot(self) -> bool:
        """Whether the tenant's present demand is worth a lease."""
        demand = self._demand
        return max(demand.decisions_per_s, demand.decisions) >= self._settings.hot_per_s

    @property
    def empty(self) -> bool:
        return not any(each.left > 0 for each in self._slices.values())

    def observe(self, now_s: float, claims: tuple[Claim, ...], *, decision: bool) -> None:
        """Count the demand of one request. ``decision``: its first claims, not its tokens."""
        self._demand.count(now_s, int(decision), claims)

    def take(self, claims: tuple[Claim, ...], now_s: float) -> bool:
        """Take all claims from the slices, or none."""
        slices = self._slices
        for claim in claims:
            found = slices.get(claim.limit)
            if found is None or found.left < claim.amount:
                return False
        for claim in claims:
            found = slices[claim.limit]
            found.left -= claim.amount
            found.used_s = now_s
        return True

    def missing(self, claims: tuple[Claim, ...], gateways: int) -> tuple[Claim, ...]:
        """Return what to take from the store before ``claims`` fit: this gateway's slice of each limit.

        Just what is missing where ``gateways`` is 0.
        """
        wanted = []
        for claim in claims:
            found = self._slices.get(claim.limit)
            short = claim.amount - (found.left if found is not None else 0)
            if short > 0:
                more = self._slice_of(claim.limit, gateways) if gateways else 0
                wanted.append(Claim(claim.limit, max(short, more)))
        return tuple(wanted)

    def add(self, claims: tuple[Claim, ...], now_s: float) -> None:
        """Add what was taken from the store."""
        for claim in claims:
            found = self._slices.setdefault(claim.limit, Slice())
            found.left += claim.amount
            found.used_s = now_s

    def correct(self, limit: Limit, difference: int) -> None:
        """A request used ``difference`` fewer than it had claimed, or more if negative."""
        found = self._slices.get(limit)
        if found is not None:
            found.left += difference

    def drop_idle(self, now_s: float) -> None:
        """Drop slices that were not used for a while: their rest counts as used, a debt is forgiven."""
        idle_s = self._settings.idle_s
        for limit in [limit for limit, each in self._slices.items() if now_s - each.used_s > idle_s]:
            del self._slices[limit]

    def _slice_of(self, limit: Limit, gateways: int) -> int:
        settings, demand = self._settings, self._demand
        per_s = max(demand.amounts_per_s.get(limit, 0), demand.amounts.get(limit, 0))
        return min(math.ceil(per_s * settings.slice_s), int(limit.limit * settings.slice_ratio / gateways))
