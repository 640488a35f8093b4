"""A gateway's shares of limits while the shared store is away: rates from empty buckets, and slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.adapters.quotas.quota import limited, most, rate_state, rejection, tightest
from services.adapters.quotas.rate_meters import RequestMeter, TokenMeter, rate_meter
from services.core.limits import Claim, Limit, LimitKind, RateState, Scope
from services.ports.clock import Clock
from services.ports.limiter import Reservation

LEASE_S: Final = 60.0
_MAX_TENANTS: Final = 100_000
_MAX_METERS: Final = 10_000  # of one tenant
_MAX_LAPSED: Final = 1000  # of one tenant; older ones that are renewed after all hold no slot
_WHOLE: Final = (Scope.TENANT, "")  # the slots of all requests of a tenant


@dataclass(slots=True)
class _Tenant:
    """``slots`` map requests to their deadlines, by scope, in the order of deadlines."""

    work: RequestMeter = field(default_factory=RequestMeter)
    meters: OrderedDict[tuple[LimitKind, Scope, str], RequestMeter | TokenMeter] = field(
        default_factory=OrderedDict
    )
    slots: dict[tuple[Scope, str], dict[str, int]] = field(default_factory=dict)
    # The slots that running requests claim, and those of requests that were not renewed in time.
    running: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    lapsed: OrderedDict[str, tuple[Claim, ...]] = field(default_factory=OrderedDict)

    def meter(self, limit: Limit) -> RequestMeter | TokenMeter:
        key = limit.kind, limit.scope, limit.name
        if key not in self.meters:
            self.meters[key] = rate_meter(limit.kind)
            if len(self.meters) > _MAX_METERS:
                self.meters.popitem(last=False)
        self.meters.move_to_end(key)
        return self.meters[key]

    def hold(self, request_id: str, claims: tuple[Claim, ...], deadline_us: int) -> None:
        """Add the slots or extend their deadlines. Leases are equal, so they stay in order of deadlines."""
        self.running[request_id] = claims
        scopes = [(claim.limit.scope, claim.limit.name) for claim in claims]
        for scope in dict.fromkeys((_WHOLE, *scopes)):
            slots = self.slots.setdefault(scope, {})
            slots.pop(request_id, None)
            slots[request_id] = deadline_us

    def release(self, request_id: str) -> tuple[Claim, ...]:
        for scope in list(self.slots):
            self.slots[scope].pop(request_id, None)
            if not self.slots[scope]:
                del self.slots[scope]
        self.lapsed.pop(request_id, None)
        return self.running.pop(request_id, ())

    def drop_lapsed(self, now_us: int) -> None:
        while (slots := self.slots.get(_WHOLE)) and slots[request_id := next(iter(slots))] <= now_us:
            self.lapsed[request_id] = self.release(request_id)
            if len(self.lapsed) > _MAX_LAPSED:
                self.lapsed.popitem(last=False)

    def wait_us(self, claim: Claim, now_us: int) -> int:
        """Return the time until the claim fits; 0 if it fits now."""
        limit = claim.limit
        if limit.kind is not LimitKind.CONCURRENCY:
            return self.meter(limit).wait_us(limit, claim.amount, now_us)
        slots = self.slots.get((limit.scope, limit.name), {})
        return next(iter(slots.values())) - now_us if len(slots) >= most(limit) else 0

    def require(self, claims: Sequence[Claim], now_us: int) -> None:
        """Raise the rejection of the first claim that does not fit."""
        for claim in claims:
            if (wait_us := self.wait_us(claim, now_us)) > 0:
                raise rejection(claim, wait_us / 1e6, self.rates(claims, now_us))

    def count(self, claims: Sequence[Claim], now_us: int) -> None:
        for claim in claims:
            if claim.limit.kind is not LimitKind.CONCURRENCY:
                self.meter(claim.limit).count(claim.limit, claim.amount, now_us)

    def rates(self, claims: Sequence[Claim], now_us: int) -> list[tuple[Limit, RateState]]:
        """Return the present state of the rates among the claims."""
        return [
            (claim.limit, rate_state(claim.limit, self.meter(claim.limit).level(claim.limit, now_us)))
            for claim in claims
            if claim.limit.kind is not LimitKind.CONCURRENCY
        ]


class LocalShares:
    """Decides at once, by the rules of the shared store, on limits that were divided among gateways before.

    The tenant idle for longest is dropped beyond 100,000.
    """

    def __init__(self, clock: Clock, *, lease_s: float = LEASE_S) -> None:
        """A slot lapses ``lease_s`` after its admission or last renewal."""
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def admit(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation:
        """Count the request against every limit of requests and slots, or against none if one is exceeded.

        Raises RequestRateExceeded or ConcurrencyExceeded. A repeated id counts once while it holds its slot.
        """
        tenant, now_us = self._tenant(tenant_id)
        tenant.drop_lapsed(now_us)
        if (held := tenant.running.get(request_id)) is not None:
            tenant.hold(request_id, held, now_us + self._lease_us)
            return Reservation(tenant_id, request_id, local=True, claims=held)
        due = limited(Claim(limit) for limit in limits)
        tenant.require(due, now_us)
        tenant.count(due, now_us)
        tenant.lapsed.pop(request_id, None)
        slots = tuple(claim for claim in due if claim.limit.kind is LimitKind.CONCURRENCY)
        tenant.hold(request_id, slots, now_us + self._lease_us)
        rate = tightest(state for _, state in tenant.rates(due, now_us))
        return Reservation(tenant_id, request_id, local=True, claims=slots, request_rate=rate)

    def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        """Count amounts against rates, all or none. Raises RequestRateExceeded or TokenRateExceeded."""
        tenant, now_us = self._tenant(tenant_id)
        tenant.require(claims, now_us)
        tenant.count(claims, now_us)

    def spend(self, tenant_id: str, limit: Limit) -> None:
        """Count work against a rate of its own. Raises RequestRateExceeded."""
        if limit.limit > 0:
            tenant, now_us = self._tenant(tenant_id)
            if (wait_us := tenant.work.wait_us(limit, 1, now_us)) > 0:
                raise rejection(Claim(limit), wait_us / 1e6)
            tenant.work.count(limit, 1, now_us)

    def renew(self, reservation: Reservation) -> None:
        """Extend the slots of a running request. One that lapsed holds them again, also above a limit."""
        tenant, now_us = self._tenant(reservation.tenant_id)
        tenant.drop_lapsed(now_us)
        request_id = reservation.request_id
        held = tenant.running.get(request_id, tenant.lapsed.pop(request_id, None))
        if held is not None:
            tenant.hold(request_id, held, now_us + self._lease_us)

    def release(self, reservation: Reservation) -> None:
        tenant, _ = self._tenant(reservation.tenant_id)
        tenant.release(reservation.request_id)

    def _tenant(self, tenant_id: str) -> tuple[_Tenant, int]:
        """Return the tenant, and the time in microseconds."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return tenant, round(self._clock.monotonic_s() * 1e6)
