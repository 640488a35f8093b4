"""Quotas in this process: the same arithmetic as the Redis scripts, by the injected clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.adapters.quotas.quota import (
    MAX_REQUESTS_PER_MINUTE,
    REQUEST_UNITS,
    SETTLED_KEEP_S,
    TOKEN_UNITS,
    rate_state,
    rejection,
    token_rate,
    token_rejection,
)
from services.core.generation import Usage
from services.ports.clock import Clock
from services.ports.limiter import Limits, RateState, Reservation

_MAX_RECORDS: Final = 10_000


@dataclass(slots=True)
class _Bucket:
    """``used`` units at ``at_us``."""

    used: int = 0
    at_us: int = 0

    def with_one_more(self, now_us: int, rate: int) -> tuple[int, int]:
        """Return the content with one more request, and the time in us until it fits."""
        elapsed_us = max(0, min(now_us - self.at_us, REQUEST_UNITS))
        used = max(0, self.used - elapsed_us * rate) + REQUEST_UNITS
        return used, max(0, -(-(used - rate * REQUEST_UNITS) // rate))


@dataclass(slots=True)
class _TokenBucket:
    """``used`` units at ``at_ms``, drained by ``rate`` units per millisecond."""

    used: int = 0
    at_ms: int = 0
    rate: int = 0

    def at(self, now_ms: int) -> int:
        """Return the units in the bucket."""
        return max(0, self.used - max(0, now_ms - self.at_ms) * self.rate)


@dataclass(slots=True)
class _Tenant:
    """``slots`` and ``settled`` map a request to its expiry, in us. ``charged`` maps the record of an
    idempotency key to its request and the usage counted for it."""

    rate: _Bucket = field(default_factory=_Bucket)
    work: _Bucket = field(default_factory=_Bucket)
    tokens: _TokenBucket = field(default_factory=_TokenBucket)
    slots: dict[str, int] = field(default_factory=dict)
    settled: OrderedDict[str, int] = field(default_factory=OrderedDict)
    charged: OrderedDict[str, tuple[str, Usage]] = field(default_factory=OrderedDict)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))


class MemoryLimiter:
    """``Limiter`` in one event loop. Beyond ``max_tenants`` the tenant idle for longest is dropped."""

    def __init__(
        self,
        clock: Clock,
        *,
        lease_s: float = 60.0,
        local: bool = False,
        max_tenants: int = 100_000,
        settled_keep_s: float = SETTLED_KEEP_S,
    ) -> None:
        """``local`` marks the reservations as made without the shared store. ``settled_keep_s``: for how long
        a second settlement of a request is detected."""
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self._local = local
        self._max_tenants = max_tenants
        self._settled_keep_us = round(settled_keep_s * 1e6)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def admit(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        tenant, now_us = self._tenant(tenant_id), self._now_us()
        state: RateState | None = None
        self._lapse(tenant, now_us)
        if request_id not in tenant.slots:
            used = self._check(tenant, now_us, limits)
            if limits.requests_per_minute > 0:
                tenant.rate = _Bucket(used, now_us)
                state = rate_state(
                    min(limits.requests_per_minute, MAX_REQUESTS_PER_MINUTE), used, REQUEST_UNITS
                )
            tenant.settled.pop(request_id, None)
        self._hold(tenant, request_id, now_us)
        return Reservation(tenant_id, request_id, self._local, request_rate=state)

    async def reserve_tokens(self, reservation: Reservation, tokens: int, limits: Limits) -> Reservation:
        rate = token_rate(tokens, limits)
        if rate <= 0:
            return reservation
        tenant, now_ms = self._tenant(reservation.tenant_id), self._now_us() // 1000
        used = tenant.tokens.at(now_ms) + tokens * TOKEN_UNITS
        wait_ms = -(-(used - rate * TOKEN_UNITS) // rate)
        if wait_ms > 0:
            raise token_rejection(wait_ms / 1e3, tokens, limits)
        tenant.tokens = _TokenBucket(used, now_ms, rate)
        state = rate_state(rate, used, TOKEN_UNITS)
        return replace(reservation, tokens=tokens, tokens_per_minute=rate, token_rate=state)

    async def spend(self, tenant_id: str, limits: Limits) -> None:
        rate = min(limits.requests_per_minute, MAX_REQUESTS_PER_MINUTE)
        if rate > 0:
            tenant, now_us = self._tenant(tenant_id), self._now_us()
            used, wait_us = tenant.work.with_one_more(now_us, rate)
            if wait_us > 0:
                raise rejection(True, wait_us / 1e6, limits)
            tenant.work = _Bucket(used, now_us)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        now_us = self._now_us()
        for reservation in reservations:
            tenant = self._tenant(reservation.tenant_id)
            if reservation.request_id not in tenant.settled:
                self._hold(tenant, reservation.request_id, now_us)

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        tenant, now_us = self._tenant(reservation.tenant_id), self._now_us()
        tenant.slots.pop(reservation.request_id, None)
        while tenant.settled and next(iter(tenant.settled.values())) <= now_us:
            tenant.settled.popitem(last=False)
        first = reservation.request_id not in tenant.settled
        tenant.settled.setdefault(reservation.request_id, now_us + self._settled_keep_us)
        if first:
            _correct_tokens(tenant, reservation, usage, now_us // 1000)
        if reservation.record:
            usage = self._not_charged(tenant, reservation, usage)
        elif not first:
            return
        tenant.usage = _sum(tenant.usage, usage)

    def _not_charged(self, tenant: _Tenant, reservation: Reservation, usage: Usage) -> Usage:
        """Return the usage of a request under a key that was not counted yet, and count it."""
        nothing = (reservation.request_id, Usage(0, 0))
        request_id, before = tenant.charged.pop(reservation.record, nothing)
        if request_id != reservation.request_id:  # a new request uses the key
            before = Usage(0, 0)
        due = Usage(
            max(0, usage.prompt_tokens - before.prompt_tokens),
            max(0, usage.output_tokens - before.output_tokens),
            max(0, usage.cached_tokens - before.cached_tokens),
        )
        tenant.charged[reservation.record] = (reservation.request_id, _sum(before, due))
        if len(tenant.charged) > _MAX_RECORDS:
            tenant.charged.popitem(last=False)
        return due

    def forget(self, tenant_id: str, record: str) -> None:
        """Drop the charges of a deleted idempotency record."""
        self._tenant(tenant_id).charged.pop(record, None)

    async def concurrency(self, tenant_id: str) -> int:
        return self.held(tenant_id)

    def held(self, tenant_id: str) -> int:
        """Return the value of ``concurrency`` without awaiting."""
        now_us = self._now_us()
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else sum(deadline > now_us for deadline in tenant.slots.values())

    async def usage(self, tenant_id: str) -> Usage:
        """Return the usage counted for the tenant so far."""
        tenant = self._tenants.get(tenant_id)
        return Usage(0, 0) if tenant is None else tenant.usage

    def _check(self, tenant: _Tenant, now_us: int, limits: Limits) -> int:
        """Return the bucket's content with this request. Raises when a limit is reached."""
        used, rate = 0, min(limits.requests_per_minute, MAX_REQUESTS_PER_MINUTE)
        if rate > 0:
            used, wait_us = tenant.rate.with_one_more(now_us, rate)
            if wait_us > 0:
                raise rejection(True, wait_us / 1e6, limits)
        if 0 < limits.max_concurrency <= len(tenant.slots):
            raise rejection(False, (next(iter(tenant.slots.values())) - now_us) / 1e6, limits)
        return used

    def _hold(self, tenant: _Tenant, request_id: str, now_us: int) -> None:
        """Add the slot or extend its deadline. Leases are equal, so slots stay in the order of deadlines."""
        tenant.slots.pop(request_id, None)
        tenant.slots[request_id] = now_us + self._lease_us

    def _lapse(self, tenant: _Tenant, now_us: int) -> None:
        slots = tenant.slots
        while slots and slots[request_id := next(iter(slots))] <= now_us:
            del slots[request_id]

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return tenant

    def _now_us(self) -> int:
        return round(self._clock.monotonic_s() * 1e6)


def _correct_tokens(tenant: _Tenant, reservation: Reservation, usage: Usage, now_ms: int) -> None:
    """Replace the reserved tokens of an ended request by those that it used."""
    if (rate := reservation.tokens_per_minute) > 0:
        more = usage.prompt_tokens + usage.output_tokens - reservation.tokens
        used = max(0, tenant.tokens.at(now_ms) + more * TOKEN_UNITS)
        tenant.tokens = _TokenBucket(used, now_ms, rate)


def _sum(left: Usage, right: Usage) -> Usage:
    return Usage(
        left.prompt_tokens + right.prompt_tokens,
        left.output_tokens + right.output_tokens,
        left.cached_tokens + right.cached_tokens,
    )
