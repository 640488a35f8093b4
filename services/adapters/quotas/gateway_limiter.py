"""A gateway's limiter: the shared store, slices for hot tenants, and a share while the store is away."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

import structlog
from msgspec.structs import replace

from services.adapters.quotas.hot_tenants import HotTenants, SliceSettings
from services.adapters.quotas.local_shares import LocalShares
from services.adapters.quotas.settlement_spool import SettlementSpool
from services.core.errors import (
    ConcurrencyExceeded,
    FailedPrecondition,
    StoreUnavailable,
    Unavailable,
)
from services.core.generation import Usage
from services.core.limits import BUDGETS, Claim, Limit, LimitKind, Price
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, AtOnce, Later, Limiter, Reservation
from services.runtime.telemetry.metrics import SHORT_S, Metrics


class LimiterTelemetry:
    """A rejection is a successful call; only an unavailable store is a failure."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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

    def export(
        self, *, breaker_open: Callable[[], bool], unsettled: Callable[[], int], spool: SettlementSpool
    ) -> None:
        """Export the state of the store and of the settlements that wait for it."""
        metrics = self._metrics
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
            lambda: float(spool.size_bytes),
        )
        metrics.counted(
            "fairway_limiter_spool_lost_total",
            "Damaged lines of spooled usage, which the quota store never receives",
            lambda: [((), float(spool.lost))],
        )

    def decided_without_store(self, kind: LimitKind, *, admitted: bool) -> None:
        self._outages.add(kind.value, "open" if admitted else "closed")

    def failed(self, operation: str) -> None:
        self._failures.add(operation)

    def answered(self, operation: str, seconds: float) -> None:
        self._seconds.observe(seconds, operation)


log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")
_MAX_UNSETTLED: Final = 100_000
_SETTLE_BATCH: Final = 256
_LOG_EVERY_S: Final = 10.0
_FULL_RETRY_S: Final = 5.0
_SETTLE_RETRY_S: Final = 1.0
_CLOSED_RETRY_S: Final = 1.0


class GatewayLimiter:
    """The ``Limiter`` of a gateway: the shared store, and what spares or replaces it.

    Rates of hot tenants are decided on slices, at once where these have room; without hot tenants every call
    goes to the store. While the store is unavailable:

    - requests and tokens per minute: open to this gateway's share of the limit, from an empty bucket.
    - slots: open to this gateway's share; those held in the shared store are not counted.
    - kinds of limits in ``closed``, and budgets always: requests that they apply to get Unavailable.
    - settlements wait in memory and in the spool, and count when the store is available again. When the room
      for them is full, no request is admitted.

    The share is the limit divided by the number of gateways, and at least 1. A slot is released where it was
    granted, which ``Reservation.local`` names. Tokens always count in the shared store.
    """

    def __init__(
        self,
        store: Limiter,
        clock: Clock,
        *,
        gateways: Callable[[], int] = lambda: 1,
        spool: SettlementSpool | None = None,
        closed: Collection[LimitKind] = (),
        slices: SliceSettings | None = None,
        telemetry: LimiterTelemetry | None = None,
    ) -> None:
        """``gateways`` returns the last observed number of gateways. Without ``spool``, settlements that wait
        end with the process."""
        self._store = store
        self._local = LocalShares(clock)
        self._clock = clock
        self._gateways = gateways
        self._spool = spool
        self._closed = frozenset((*closed, *BUDGETS))
        self._telemetry = telemetry or LimiterTelemetry(Metrics())
        self._hot = HotTenants(self._take, clock, gateways=gateways, settings=slices or SliceSettings())
        self._unsettled: OrderedDict[Reservation, Usage] = OrderedDict()
        self._settling = asyncio.Lock()
        self._waiting = asyncio.Event()  # set while a settlement waits
        self._log_next_s = 0.0

    async def recover(self) -> None:
        """Load the settlements that an earlier process left. Raises FailedPrecondition."""
        if self._spool is None:
            return
        try:
            self._unsettled.update(await self._spool.load())
        except BlockingIOError as error:
            raise FailedPrecondition(
                "another gateway keeps its settlements in this FAIRWAY_STATE_DIR: give each gateway its own"
            ) from error
        except OSError as error:
            raise FailedPrecondition(
                f"the settlements of an earlier process cannot be read ({error.strerror}): mend the disk of "
                "FAIRWAY_STATE_DIR, or move the file away and lose them"
            ) from error
        if self._unsettled:
            self._waiting.set()

    def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Awaitable[Reservation]:
        # While settlements wait, their room is checked first.
        held = None if self._unsettled else self._hot.admit_held(tenant_id, request_id, limits)
        if held is not None:
            return AtOnce(held)
        return Later(self._admit, tenant_id, request_id, limits, claims, price)

    def reserve(
        self, reservation: Reservation, claims: Sequence[Claim], price: Price
    ) -> Awaitable[Reservation]:
        if self._hot.reserve_held(reservation, claims):
            return AtOnce(reservation)
        return Later(self._reserve, reservation, claims, price)

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        try:
            await self._take(tenant_id, claims)
        except StoreUnavailable:
            self._local.take(tenant_id, self._shares_of(claims))

    async def _admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim],
        price: Price,
    ) -> Reservation:
        self._require_room(tenant_id)
        try:
            return await self._admit_shared(tenant_id, request_id, limits, claims, price)
        except StoreUnavailable:
            shares = self._without_store(limits)
            return self._local.admit(tenant_id, request_id, shares)

    async def _reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        try:
            if not reservation.local:
                if await self._hot.reserve(reservation, claims):
                    return reservation
                return await self._call("reserve", self._store.reserve, reservation, claims, price)
        except StoreUnavailable:
            pass
        # Not corrected at the end: a local bucket lives as long as an outage.
        self._local.take(reservation.tenant_id, self._shares_of(claims))
        return reservation

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        self._hot.drop_idle()
        for reservation, _ in running:
            if reservation.local:
                self._local.renew(reservation)
        shared = [each for each in running if not each[0].local and each[0].request_id not in self._hot]
        with suppress(StoreUnavailable):
            await self._call("renew", self._store.renew, shared)
            async with self._settling:
                await self._settle_kept()

    def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> Awaitable[None]:
        if reservation.local:
            self._local.release(reservation)
        if self._hot.settle(reservation, usage):
            return AtOnce(None)
        return Later(self._settle, reservation, usage, spooled=spooled)

    async def _settle(self, reservation: Reservation, usage: Usage, *, spooled: bool) -> None:
        try:
            await self._call("settle", self._store.settle, reservation, usage, spooled=spooled)
        except StoreUnavailable:
            self._keep(reservation, usage)
        except asyncio.CancelledError:
            self._keep(reservation, usage)
            raise

    async def settle_forever(self) -> None:
        """Settle what waits within seconds after the store is available again, where it holds slots."""
        while True:
            await self._waiting.wait()
            await self._clock.sleep(_SETTLE_RETRY_S)
            async with self._settling:
                await self._settle_kept()

    @property
    def unsettled(self) -> int:
        """Number of settlements that wait for the store; ``renew`` and ``settle_forever`` retry them."""
        return len(self._unsettled)

    @property
    def leased(self) -> int:
        """Number of requests on slices that are not settled here."""
        return len(self._hot)

    def problem(self) -> str:
        """Return why no request is admitted: there is no room for its settlement. Empty while there is."""
        problem = self._spool.problem if self._spool is not None and self._unsettled else ""
        if not problem and len(self._unsettled) >= _MAX_UNSETTLED:
            problem = "as many settlements wait as may"
        return problem

    async def _admit_shared(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim],
        price: Price,
    ) -> Reservation:
        """Admit on slices or in the store. If that rejects, release slots of ended requests and try again."""
        if (held := await self._hot.admit(tenant_id, request_id, limits)) is not None:
            return held
        try:
            return await self._call("admit", self._store.admit, tenant_id, request_id, limits, claims, price)
        except ConcurrencyExceeded:
            if not self._unsettled:
                raise
        async with self._settling:
            await self._settle_kept()
        return await self._call("admit", self._store.admit, tenant_id, request_id, limits, claims, price)

    async def _settle_kept(self) -> None:
        """Try every waiting settlement once. A failed one moves behind the rest, so that it blocks none.

        When a whole batch fails, the store counts as unavailable and the rest is not tried.
        """
        settled = 0
        waiting = list(self._unsettled.items())
        try:
            for start in range(0, len(waiting), _SETTLE_BATCH):
                batch = waiting[start : start + _SETTLE_BATCH]
                tries = [self._call("settle", self._store.settle, *kept, spooled=True) for kept in batch]
                outcomes = await asyncio.gather(*tries, return_exceptions=True)
                failed = 0
                for (reservation, _), outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, StoreUnavailable):
                        self._unsettled.move_to_end(reservation)
                        failed += 1
                    elif outcome is None:
                        del self._unsettled[reservation]
                        settled += 1
                for outcome in outcomes:
                    if outcome is not None and not isinstance(outcome, StoreUnavailable):
                        raise outcome
                if failed == len(batch):
                    return
        finally:
            if not self._unsettled:
                self._waiting.clear()
            if self._spool is not None and (settled or self._spool.stale):
                self._spool.rewrite(self._unsettled.items())

    def _keep(self, reservation: Reservation, usage: Usage) -> None:
        self._unsettled[reservation] = usage
        self._waiting.set()
        if self._spool is not None:
            self._spool.add(reservation, usage)

    def _require_room(self, tenant_id: str) -> None:
        """Raises Unavailable when there is no room for the settlement of one more request."""
        problem = self.problem()
        if (
            not problem
            and self._unsettled
            and self._spool is not None
            and self._spool.is_share_full(tenant_id)
        ):
            problem = (
                "this tenant's settlements are half of what may wait; send it later, or to another gateway"
            )
        if problem:
            raise Unavailable(
                f"usage cannot be recorded while the quota store is away: {problem}",
                retry_after_s=_FULL_RETRY_S,
            )

    def _without_store(self, limits: Sequence[Limit]) -> list[Limit]:
        """Return this gateway's share of each limit. Raises Unavailable for a limit that fails closed."""
        applied = [limit.kind for limit in limits if limit.limit > 0]
        closed = next((kind for kind in applied if kind in self._closed), None)
        for kind in applied if closed is None else [closed]:
            self._telemetry.decided_without_store(kind, admitted=closed is None)
        if closed is not None:
            what = "budget" if closed in BUDGETS else f"limit of {closed.value.replace('_', ' ')}"
            raise Unavailable(
                f"the {what} cannot be checked while the quota store is away",
                retry_after_s=_CLOSED_RETRY_S,
                kind=closed.value,
            )
        gateways = max(1, self._gateways())
        return [
            replace(limit, limit=max(1, limit.limit // gateways)) if limit.limit > 0 else limit
            for limit in limits
        ]

    def _shares_of(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims on this gateway's share of each limit, none above it."""
        shares = self._without_store([claim.limit for claim in claims])
        return [
            Claim(share, min(claim.amount, share.limit)) for claim, share in zip(claims, shares, strict=True)
        ]

    async def _take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        await self._call("take", self._store.take, tenant_id, claims)

    async def _call(
        self, operation: str, method: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs
    ) -> T:
        """Return the store's answer: the one place that calls it. Raises StoreUnavailable.

        That is logged at most once in ten seconds: an outage is one event, not one per request.
        """
        began_s = self._clock.monotonic_s()
        try:
            return await method(*args, **named)
        except StoreUnavailable as error:
            self._telemetry.failed(operation)
            now_s = self._clock.monotonic_s()
            if now_s >= self._log_next_s:
                self._log_next_s = now_s + _LOG_EVERY_S
                log.warning("limiter.store_lost", operation=operation, error=error.message)
            raise
        finally:
            self._telemetry.answered(operation, self._clock.monotonic_s() - began_s)
