"""A budget that shows in one number what requests were charged, for tests of charges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price
from services.ports.limiter import NO_PRICE, Limiter, Reservation
from services.ports.usage import Spending

# A month's cost is prompt + 10^4 * cached + 10^8 * output tokens.
METER: Final = Limit(LimitKind.MONTH_MICROS, 10**15)
PRICE: Final = Price(10**6, 10**6 * (10**4 + 1), 10**6 * 10**8)


def limits(requests: int = 0, slots: int = 0) -> tuple[Limit, ...]:
    """Return a tenant's limits of requests per minute and at once."""
    return Limit(LimitKind.REQUESTS, requests), Limit(LimitKind.CONCURRENCY, slots)


async def admit_metered(
    limiter: Limiter, tenant_id: str, request_id: str, of: Sequence[Limit] = ()
) -> Reservation:
    """Return an admitted request whose charges are metered."""
    reservation = await limiter.admit(tenant_id, request_id, of)
    return await limiter.reserve(reservation, [Claim(METER, 0)], PRICE)


async def charged(limiter: Spending, tenant_id: str) -> Usage:
    """Return what metered requests of the tenant were charged."""
    (spent,) = await limiter.spent(tenant_id, [METER])
    return usage_of(spent.settled_micros)


def usage_of(micros: int) -> Usage:
    return Usage(micros % 10**4, micros // 10**8, micros // 10**4 % 10**4)


class MeteredLimiter:
    """Meters every request that it admits."""

    def __init__(self, inner: Limiter) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Reservation:
        return await admit_metered(self._inner, tenant_id, request_id, limits)

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        return await self._inner.reserve(reservation, claims, PRICE)
