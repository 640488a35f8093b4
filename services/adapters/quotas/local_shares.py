"""What limits count in this process, and a gateway's shares of them while the shared store is away.

The arithmetic is that of the Redis scripts. Times are monotonic microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from services.adapters.quotas.quota import (
    REQUEST_UNITS,
    TOKEN_UNITS,
    limited,
    most,
    on_limits,
    rate_state,
    rejection,
    tightest,
)
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, RateState, Scope
from services.ports.clock import Clock
from services.ports.limiter import Reservation

WHOLE: Final = (Scope.TENANT, "")  # the slots of all requests of a tenant
_MAX_METERS: Final = 10_000
LEASE_S: Final = 60.0
_MAX_TENANTS: Final = 100_000
_MAX_LAPSED: Final = 1000  # most of one tenant; older ones that are renewed after all hold no slot


@dataclass(slots=True)
class RequestMeter:
    """``used`` units at ``at_us``."""

    used: int = 0
    at_us: int = 0

    def wait_us(self, limit: Limit, amount: int, now_us: int) -> int:
        """Return the time until ``amount`` more fits; 0 if it fits now."""
        rate = most(limit)
        used = self.level(limit, now_us) + amount * REQUEST_UNITS
        return max(0, -(-(used - rate * REQUEST_UNITS) // rate))

    def count(self, limit: Limit, amount: int, now_us: int) -> int:
        """Count ``amount`` more, or fewer. Returns what is counted now, in units."""
        self.used = self.level(limit, now_us) + amount * REQUEST_UNITS
        self.at_us = now_us
        return self.used

    def level(self, limit: Limit, now_us: int) -> int:
        """Return what is counted now, in units."""
        elapsed_us = max(0, min(now_us - self.at_us, REQUEST_UNITS))
        return max(0, self.used - elapsed_us * most(limit))


@dataclass(slots=True)
class TokenMeter:
    """``used`` units at ``at_ms``, drained by ``rate`` units per millisecond. As ``RequestMeter``."""

    used: int = 0
    at_ms: int = 0
    rate: int = 0

    def wait_us(self, limit: Limit, amount: int, now_us: int) -> int:
        rate = most(limit)
        used = self.level(limit, now_us) + amount * TOKEN_UNITS
        return max(0, -(-(used - rate * TOKEN_UNITS) // rate)) * 1000

    def count(self, limit: Limit, amount: int, now_us: int) -> int:
        self.used = max(0, self.level(limit, now_us) + amount * TOKEN_UNITS)
        self.at_ms, self.rate = now_us // 1000, most(limit)
        return self.used

    def level(self, limit: Limit, now_us: int) -> int:
        return max(0, self.used - max(0, now_us // 1000 - self.at_ms) * self.rate)


@dataclass(slots=True)
class TenantCounts:
    """What the rates of one tenant count, and which requests hold its slots."""

    meters: OrderedDict[tuple[LimitKind, Scope, str], RequestMeter | TokenMeter] = field(
        default_factory=OrderedDict
    )
    # Requests with their deadlines, by scope, in the order of deadlines.
    slots: dict[tuple[Scope, str], dict[str, int]] = field(default_factory=dict)

    def meter(self, limit: Limit) -> RequestMeter | TokenMeter:
        """Return what counts a rate. Beyond 10,000 the one idle for longest is dropped."""
        key = limit.kind, limit.scope, limit.name
        if key not in self.meters:
            self.meters[key] = RequestMeter() if limit.kind is LimitKind.REQUESTS else TokenMeter()
            if len(self.meters) > _MAX_METERS:
                self.meters.popitem(last=False)
        self.meters.move_to_end(key)
        return self.meters[key]

    def hold(self, request_id: str, claims: Iterable[Claim], deadline_us: int) -> None:
        """Add the slots or extend their deadlines. Leases are equal, so they stay in order of deadlines."""
        limits = [claim.limit for claim in claims if claim.limit.kind is LimitKind.CONCURRENCY]
        for scope in dict.fromkeys((WHOLE, *((limit.scope, limit.name) for limit in limits))):
            slots = self.slots.setdefault(scope, {})
            slots.pop(request_id, None)
            slots[request_id] = deadline_us

    def release(self, request_id: str) -> None:
        for scope in list(self.slots):
            self.slots[scope].pop(request_id, None)
            if not self.slots[scope]:
                del self.slots[scope]

    def next_lapsed(self, now_us: int) -> str:
        """Return the request whose slots lapsed first; empty when none lapsed."""
        for request_id, deadline_us in self.slots.get(WHOLE, {}).items():
            return request_id if deadline_us <= now_us else ""
        return ""

    def live(self, scope: tuple[Scope, str], now_us: int) -> int:
        """Return how many slots are held that did not lapse."""
        slots = self.slots.get(scope, {})
        return len(slots) - sum(1 for _ in takewhile(lambda at_us: at_us <= now_us, slots.values()))

    def wait_us(self, claim: Claim, now_us: int) -> int:
        """Return the time until the claim fits; 0 if it fits now."""
        limit = claim.limit
        if limit.kind is not LimitKind.CONCURRENCY:
            return self.meter(limit).wait_us(limit, claim.amount, now_us)
        scope = limit.scope, limit.name
        if self.live(scope, now_us) < most(limit):
            return 0
        return next(at_us for at_us in self.slots[scope].values() if at_us > now_us) - now_us

    def require(self, claims: Sequence[Claim], now_us: int) -> None:
        """Raise the rejection of the first claim that does not fit."""
        for claim in claims:
            if (wait_us := self.wait_us(claim, now_us)) > 0:
                raise rejection(claim, wait_us / 1e6, self.states(claims, now_us))

    def take(self, claims: Sequence[Claim], now_us: int) -> None:
        """Count all claims on rates, or raise the rejection of the first claim that does not fit."""
        claims = on_limits(claims)
        self.require(claims, now_us)
        for claim in claims:
            if claim.limit.kind is not LimitKind.CONCURRENCY:
                self.meter(claim.limit).count(claim.limit, claim.amount, now_us)

    def states(self, claims: Sequence[Claim], now_us: int) -> list[tuple[Limit, RateState]]:
        """Return the present state of the rates among the claims."""
        return [
            (claim.limit, rate_state(claim.limit, self.meter(claim.limit).level(claim.limit, now_us)))
            for claim in claims
            if claim.limit.kind in (LimitKind.REQUESTS, *TOKEN_RATES)
        ]


@dataclass(slots=True)
class _Tenant(TenantCounts):
    """Its requests with the slots that they claim: those that run, and those that lapsed."""

    running: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    lapsed: OrderedDict[str, tuple[Claim, ...]] = field(default_factory=OrderedDict)

    def drop_lapsed(self, now_us: int) -> None:
        while request_id := self.next_lapsed(now_us):
            self.release(request_id)
            self.lapsed[request_id] = self.running.pop(request_id)
            if len(self.lapsed) > _MAX_LAPSED:
                self.lapsed.popitem(last=False)


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
            self._hold(tenant, request_id, held, now_us)
            return Reservation(tenant_id, request_id, local=True, claims=held)
        due = limited(Claim(limit) for limit in limits)
        tenant.take(due, now_us)
        tenant.lapsed.pop(request_id, None)
        slots = tuple(claim for claim in due if claim.limit.kind is LimitKind.CONCURRENCY)
        self._hold(tenant, request_id, slots, now_us)
        rate = tightest(state for _, state in tenant.states(due, now_us))
        return Reservation(tenant_id, request_id, local=True, claims=slots, request_rate=rate)

    def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        """Count amounts against rates, all or none. Raises RequestRateExceeded or TokenRateExceeded."""
        tenant, now_us = self._tenant(tenant_id)
        tenant.take(claims, now_us)

    def renew(self, reservation: Reservation) -> None:
        """Extend the slots of a running request. One that lapsed holds them again, also above a limit."""
        tenant, now_us = self._tenant(reservation.tenant_id)
        tenant.drop_lapsed(now_us)
        request_id = reservation.request_id
        held = tenant.running.get(request_id, tenant.lapsed.pop(request_id, None))
        if held is not None:
            self._hold(tenant, request_id, held, now_us)

    def release(self, reservation: Reservation) -> None:
        tenant, _ = self._tenant(reservation.tenant_id)
        tenant.release(reservation.request_id)
        tenant.running.pop(reservation.request_id, None)
        tenant.lapsed.pop(reservation.request_id, None)

    def _hold(self, tenant: _Tenant, request_id: str, claims: tuple[Claim, ...], now_us: int) -> None:
        tenant.running[request_id] = claims
        tenant.hold(request_id, claims, now_us + self._lease_us)

    def _tenant(self, tenant_id: str) -> tuple[_Tenant, int]:
        """Return the tenant, and the time in microseconds."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return tenant, round(self._clock.monotonic_s() * 1e6)
