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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.adapters.quotas.quota import on_limits, used_of
from services.core.errors import OverQuota, retry_in
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Scope
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Reservation

_LEASED: Final = frozenset({LimitKind.REQUESTS, *TOKEN_RATES})
_MAX_TENANTS: Final = 10_000
# Leased requests without a settlement here: those that run, and those that end with an idempotency record.
_MAX_LEASED: Final = 16_384
_REPEATED_S: Final = 0.1  # for how long a rejection of the store is repeated without it


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


class _Tenant(TenantSlices):
    """The slices, and the store's last rejection."""

    def __init__(self, settings: SliceSettings) -> None:
        super().__init__(settings)
        self._rejected: OverQuota | None = None
        self._rejected_claims: tuple[Claim, ...] = ()
        self._rejected_s = 0.0

    def rejected(self, error: OverQuota, claims: tuple[Claim, ...], now_s: float) -> None:
        self._rejected, self._rejected_claims, self._rejected_s = error, claims, now_s

    def rejection(self, claims: tuple[Claim, ...], now_s: float) -> OverQuota | None:
        """Return the last rejection, if the store would certainly repeat it for these claims."""
        error, elapsed_s = self._rejected, now_s - self._rejected_s
        if error is None or elapsed_s >= min(error.retry_after_s or 0.0, _REPEATED_S):
            return None
        amounts = {claim.limit: claim.amount for claim in claims}
        if any(amounts.get(claim.limit, 0) < claim.amount for claim in self._rejected_claims):
            return None
        wait_s = error.retry_after_s or 0.0
        left_s = wait_s - elapsed_s
        text = error.message.replace(retry_in(wait_s), retry_in(left_s))
        again = type(error)(text, retry_after_s=left_s)
        again.metadata |= error.metadata
        again.request_rate = error.request_rate and error.request_rate.later(elapsed_s)
        again.token_rate = error.token_rate and error.token_rate.later(elapsed_s)
        return again


class HotTenants:
    """The part of a gateway's limiter that decides on slices, for requests whose limits are all rates.

    Slots, budgets and the limits of end users stay exact in the store. A leased reservation has no record
    there: a killed gateway's requests are charged as claimed, and so are those under an idempotency key.
    """

    def __init__(
        self,
        take: Callable[[str, Sequence[Claim]], Awaitable[None]],
        clock: Clock,
        *,
        gateways: Callable[[], int],
        settings: SliceSettings,
    ) -> None:
        """``take`` is the store's. ``gateways`` returns the last observed number of gateways."""
        self._take = take
        self._clock = clock
        self._gateways = gateways
        self._settings = settings
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        # Token claims of running leased requests, which the settlement corrects.
        self._leased: OrderedDict[str, tuple[Claim, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many leased requests are not settled here."""
        return len(self._leased)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leased

    async def admit(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation | None:
        """Return None where the store decides: the tenant is not hot, or has other limits than rates."""
        rates = _leasable(limits)
        if not rates:
            return None
        tenant, now_s = self._tenant(tenant_id), self._clock.monotonic_s()
        tenant.observe(now_s, rates, decision=True)
        if not tenant.hot and tenant.empty:
            return None
        if not tenant.take(rates, now_s):
            await self._refill(tenant_id, tenant, rates)
        return self._leased_to(tenant_id, request_id)

    def admit_held(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation | None:
        """Return None without enough in the slices."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None or not (rates := _leasable(limits)):
            return None
        now_s = self._clock.monotonic_s()
        if not tenant.take(rates, now_s):
            return None
        tenant.observe(now_s, rates, decision=True)
        return self._leased_to(tenant_id, request_id)

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim]) -> bool:
        """Return whether the claims are reserved. If not, the store decides, also on the settlement."""
        if reservation.request_id not in self._leased:
            return False
        leased = on_limits(claims)
        if not all(is_leasable(claim.limit) for claim in leased):
            # The store makes a record, of the budgets and of the token rates.
            del self._leased[reservation.request_id]
            return False
        tenant, now_s = self._tenant(reservation.tenant_id), self._clock.monotonic_s()
        tenant.observe(now_s, leased, decision=False)
        if not tenant.take(leased, now_s):
            await self._refill(reservation.tenant_id, tenant, leased)
        self._leased[reservation.request_id] = leased
        return True

    def reserve_held(self, reservation: Reservation, claims: Sequence[Claim]) -> bool:
        """Return whether the claims are reserved, all of them from the slices."""
        tenant = self._tenants.get(reservation.tenant_id)
        if tenant is None or reservation.request_id not in self._leased:
            return False
        leased = on_limits(claims)
        now_s = self._clock.monotonic_s()
        if not all(is_leasable(claim.limit) for claim in leased) or not tenant.take(leased, now_s):
            return False
        tenant.observe(now_s, leased, decision=False)
        self._leased[reservation.request_id] = leased
        return True

    def settle(self, reservation: Reservation, usage: Usage) -> bool:
        """Return whether the request is leased; then it is settled."""
        claims = self._leased.pop(reservation.request_id, None)
        if claims is None:
            return False
        tenant = self._tenant(reservation.tenant_id)
        for claim in claims:
            if claim.limit.kind in TOKEN_RATES:
                tenant.correct(claim.limit, claim.amount - used_of(claim.limit.kind, usage, NO_PRICE))
        return True

    def drop_idle(self) -> None:
        """Drop slices that were not used for a while."""
        now_s = self._clock.monotonic_s()
        for tenant in self._tenants.values():
            tenant.drop_idle(now_s)

    async def _refill(self, tenant_id: str, tenant: _Tenant, claims: tuple[Claim, ...]) -> None:
        """Take a slice of each limit that lacks one, else just what the request needs; then the claims.

        Raises the store's rejection. It is repeated for a moment without the store, so that a tenant above
        its rate costs the store little.
        """
        if (rejection := tenant.rejection(claims, self._clock.monotonic_s())) is not None:
            raise rejection
        for gateways in (max(1, self._gateways()), 0):
            wanted = tenant.missing(claims, gateways)
            try:
                if wanted:
                    await self._take(tenant_id, wanted)
            except OverQuota as error:
                if not gateways:
                    tenant.rejected(error, wanted, self._clock.monotonic_s())
                    raise
                continue
            tenant.add(wanted, self._clock.monotonic_s())
            if tenant.take(claims, self._clock.monotonic_s()):
                return
        await self._take(tenant_id, claims)  # concurrent requests used what was added

    def _leased_to(self, tenant_id: str, request_id: str) -> Reservation:
        self._leased[request_id] = ()
        if len(self._leased) > _MAX_LEASED:
            self._leased.popitem(last=False)
        return Reservation(tenant_id, request_id)

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._tenants[tenant_id] = _Tenant(self._settings)
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        return tenant


def _leasable(limits: Sequence[Limit]) -> tuple[Claim, ...]:
    """Return the claims of a request whose limits are all rates; empty where one is not, or there is none."""
    found = []
    for limit in limits:
        if limit.limit > 0:
            if not is_leasable(limit):
                return ()
            found.append(Claim(limit))
    return tuple(found)
