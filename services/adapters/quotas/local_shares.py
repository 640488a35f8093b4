"""A gateway's shares of limits while the shared store is away: rates from empty buckets, and slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.adapters.quotas.quota import limited, tightest
from services.adapters.quotas.tenant_counts import TenantCounts
from services.core.limits import Claim, Limit, LimitKind
from services.ports.clock import Clock
from services.ports.limiter import Reservation

LEASE_S: Final = 60.0
_MAX_TENANTS: Final = 100_000
_MAX_LAPSED: Final = 1000  # most of one tenant; older ones that are renewed after all hold no slot


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

    def spend(self, tenant_id: str, limit: Limit) -> None:
        """Count work against a rate of its own. Raises RequestRateExceeded."""
        tenant, now_us = self._tenant(tenant_id)
        tenant.spend(limit, now_us)

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
