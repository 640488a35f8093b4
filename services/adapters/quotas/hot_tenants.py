"""Rates of hot tenants, decided on slices that this gateway holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.adapters.quotas.quota import used_of
from services.adapters.quotas.slices import SliceSettings, TenantSlices, is_leasable
from services.core.errors import OverQuota, retry_in
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Reservation

_MAX_TENANTS: Final = 10_000
# Leased requests without a settlement here: those that run, and those that end with an idempotency record.
_MAX_LEASED: Final = 16_384
_REPEATED_S: Final = 0.1  # for how long a rejection of the store is repeated without it


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
        leased = tuple(claim for claim in claims if claim.limit.limit > 0)
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
        leased = tuple(claim for claim in claims if claim.limit.limit > 0)
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
