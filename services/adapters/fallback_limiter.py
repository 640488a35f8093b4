"""What the limits do while the shared store is away."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import structlog

from services.core.errors import ConcurrencyExceeded, StoreUnavailable
from services.core.generation import Usage
from services.ports.clock import Clock
from services.ports.limiter import Limiter, Limits, Reservation

log = structlog.get_logger()
_MAX_UNSETTLED: Final = 10_000
_SETTLE_BATCH: Final = 200
_LOG_EVERY_S: Final = 10.0


class FallbackLimiter:
    """``Limiter`` that never raises StoreUnavailable. Per limit, while the shared store is away:

    requests per minute: fails open to the full limit per gateway, so N gateways let at most N times through.
    max concurrency: fails open to the full limit per gateway; slots held in the shared store are not counted.
    usage: what cannot be counted is kept, at most 10,000 requests, and counted when the store is back.

    A slot is given back where it was given: ``local`` says where. Tokens always count in the shared store.
    """

    def __init__(self, primary: Limiter, local: Limiter, clock: Clock) -> None:
        """``local`` is always there and marks what it gives, such as ``MemoryLimiter(clock, local=True)``."""
        self._primary = primary
        self._local = local
        self._clock = clock
        self._unsettled: OrderedDict[Reservation, Usage] = OrderedDict()
        self._settling = asyncio.Lock()
        self._log_next_s = 0.0

    async def admit(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        try:
            return await self._admit_shared(tenant_id, request_id, limits)
        except StoreUnavailable as error:
            self._tell("admit", error)
            return await self._local.admit(tenant_id, request_id, limits)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        await self._local.renew([r for r in reservations if r.local])
        try:
            await self._settle_kept()
            await self._primary.renew([r for r in reservations if not r.local])
        except StoreUnavailable as error:
            self._tell("renew", error)

    async def settle(self, reservation: Reservation, usage: Usage) -> None:
        if reservation.local:
            await self._local.settle(reservation, usage)
        try:
            await self._primary.settle(reservation, usage)
        except StoreUnavailable as error:
            self._tell("settle", error)
            self._keep(reservation, usage)

    async def concurrency(self, tenant_id: str) -> int:
        local = await self._local.concurrency(tenant_id)
        try:
            return local + await self._primary.concurrency(tenant_id)
        except StoreUnavailable as error:
            self._tell("concurrency", error)
            return local

    @property
    def unsettled(self) -> int:
        """How many settlements wait for the store; ``renew`` tries them again."""
        return len(self._unsettled)

    async def _admit_shared(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        """Admit in the shared store; first give back what ended requests hold there, should it refuse."""
        try:
            return await self._primary.admit(tenant_id, request_id, limits)
        except ConcurrencyExceeded:
            if not self._unsettled:
                raise
        async with self._settling:
            await self._settle_kept()
        return await self._primary.admit(tenant_id, request_id, limits)

    async def _settle_kept(self) -> None:
        for reservation, usage in list(self._unsettled.items())[:_SETTLE_BATCH]:
            await self._primary.settle(reservation, usage)
            self._unsettled.pop(reservation, None)

    def _keep(self, reservation: Reservation, usage: Usage) -> None:
        self._unsettled[reservation] = usage
        if len(self._unsettled) > _MAX_UNSETTLED:
            lost, _ = self._unsettled.popitem(last=False)
            log.error("limiter.usage_dropped", tenant=lost.tenant_id, request_id=lost.request_id)

    def _tell(self, operation: str, error: StoreUnavailable) -> None:
        """Once in ten seconds: an outage is one event, not one per request."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._log_next_s:
            self._log_next_s = now_s + _LOG_EVERY_S
            log.warning("limiter.store_lost", operation=operation, error=error.message)
