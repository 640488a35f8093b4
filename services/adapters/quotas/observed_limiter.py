"""A limiter with metrics of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.core.errors import StoreUnavailable
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Limiter, Reservation, Spent
from services.runtime.telemetry.metrics import SHORT_S, Metrics

T = TypeVar("T")


class ObservedLimiter:
    """A ``Limiter`` decorator. A rejection is a successful call; only an unavailable store is a failure."""

    def __init__(
        self,
        inner: Limiter,
        metrics: Metrics,
        clock: Clock,
        *,
        breaker_open: Callable[[], bool],
        unsettled: Callable[[], int],
        spool_bytes: Callable[[], int],
        spool_lost: Callable[[], int],
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._seconds = metrics.histogram(
            "fairway_limiter_call_seconds",
            "From a call of the quota store until its answer or failure",
            ("operation",),
            bounds=SHORT_S,
        )
        self._failures = metrics.counter(
            "fairway_limiter_failures_total",
            "Failed calls of the quota store; the gateway then applies its own share of the limits",
            ("operation",),
        )
        self._outages = metrics.counter(
            "fairway_limiter_outage_decisions_total",
            "Limits decided without the quota store: open to the gateway's own share, or closed",
            ("kind", "policy"),
        )
        metrics.level(
            "fairway_limiter_breaker_open",
            "1 while the quota store counts as unavailable, else 0",
            lambda: float(breaker_open()),
        )
        metrics.level(
            "fairway_limiter_unsettled",
            "Ended requests whose usage is not yet in the quota store",
            lambda: float(unsettled()),
        )
        metrics.level(
            "fairway_limiter_spool_bytes",
            "Bytes of usage spooled for the quota store",
            lambda: float(spool_bytes()),
        )
        metrics.counted(
            "fairway_limiter_spool_lost_total",
            "Damaged lines of spooled usage, which the quota store never receives",
            lambda: [((), float(spool_lost()))],
        )

    def decided_without_store(self, kind: LimitKind, admitted: bool) -> None:
        self._outages.add(kind.value, "open" if admitted else "closed")

    async def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Reservation:
        return await self._timed("admit", self._inner.admit(tenant_id, request_id, limits, claims, price))

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        return await self._timed("reserve", self._inner.reserve(reservation, claims, price))

    async def spend(self, tenant_id: str, per_minute: int) -> None:
        await self._timed("spend", self._inner.spend(tenant_id, per_minute))

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        await self._timed("take", self._inner.take(tenant_id, claims))

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        await self._timed("renew", self._inner.renew(running))

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        await self._timed("settle", self._inner.settle(reservation, usage, spooled=spooled))

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        await self._timed("checkpoint", self._inner.checkpoint(tenant_id, request_id, usage))

    async def settle_lapsed(self, tenant_id: str) -> int:
        return await self._timed("settle_lapsed", self._inner.settle_lapsed(tenant_id))

    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        return await self._timed("spent", self._inner.spent(tenant_id, limits))

    async def concurrency(self, tenant_id: str) -> int:
        return await self._timed("concurrency", self._inner.concurrency(tenant_id))

    async def _timed(self, operation: str, call: Awaitable[T]) -> T:
        began_s = self._clock.monotonic_s()
        try:
            return await call
        except StoreUnavailable:
            self._failures.add(operation)
            raise
        finally:
            self._seconds.observe(self._clock.monotonic_s() - began_s, operation)
