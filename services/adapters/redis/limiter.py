"""Quotas in Redis, shared by all gateways: one Lua script per operation, with Redis time.

A tenant's keys share a hash tag, so that one script may use all of them in a cluster. All expire. Those of an
API key's limits end in ``:key:ID``, those of an end user's in ``:user:DIGEST``:

    fw:{tenant}:request:ID      hash   one request: what it reserved, its checkpoint and what it was charged
    fw:{tenant}:slots           zset   requests that are not settled, by the time their leases lapse
    fw:{tenant}:requests        hash   the bucket of requests per minute
    fw:{tenant}:tokens          hash   the bucket of tokens per minute; also input_tokens, output_tokens
    fw:{tenant}:month_micros    hash   settled and reserved micro-dollars by month; also day_micros
    fw:{tenant}:work            hash   the bucket of other work per minute, such as counting tokens
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from services.adapters.quotas.quota import (
    LAPSED_AT_ONCE,
    LAPSED_BATCH,
    SETTLED_KEEP_S,
    decode_claims,
    fitting,
    limited,
    most,
    on_limits,
    rate_state,
    rejection,
    tightest,
    unclaimed,
)
from services.adapters.redis.cluster import open_scripts
from services.adapters.redis.reservation_calls import (
    RESERVATION,
    arguments_of,
    keys_of,
    limit_key,
    record_key,
    slots_key,
)
from services.adapters.redis.topologies import NO_ACCESS, RedisAccess
from services.core.errors import OverQuota, RequestRateExceeded, StoreUnavailable
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Price, RateState
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Reservation, Spent

# A Redis that syncs every write answers no call during the sync: a third of a second on a busy disk. A limit
# that fails open during a sync would not be exact.
TIMEOUT_S: Final = 1.0
# Admissions of one tenant, and refills of its slices, that wait at one gateway. More are rejected at once.
MAX_ADMITTING: Final = 256
_UNCONFIRMED_KEEP_MS: Final = 7 * 86_400_000
_RENEW_BATCH: Final = 100
_CONFIRM_BATCH: Final = 200
_ATTEMPTS: Final = 5
_NOTHING: Final = Usage(0, 0)


class RedisLimiter:
    """``Limiter`` on Redis 6.2 or later. The caller closes it.

    A slot lapses ``lease_s`` after its admission or last renewal. In an outage the first few calls take twice
    ``timeout_s``; then calls fail at once, and one per second tries again.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        access: RedisAccess = NO_ACCESS,
        timeout_s: float = TIMEOUT_S,
        lease_s: float = 60.0,
        settled_keep_s: float = SETTLED_KEEP_S,
        grace_s: float | None = None,
    ) -> None:
        """``settled_keep_s``: for how long a confirmed settlement is stored. ``grace_s``: for how long no
        lapsed reservation is settled after Redis was found again, since nobody could renew it meanwhile; by
        default half a lease.
        """
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self._settled_keep_ms = round(settled_keep_s * 1e3)
        self._grace_s = lease_s / 2 if grace_s is None else grace_s
        self._scripts = open_scripts(url, clock, timeout_s=timeout_s, access=access, repeatable=True)
        self._reserve = self._scripts.script(*RESERVATION, "reserve")
        self._renew = self._scripts.script(*RESERVATION, "renew")
        self._settle = self._scripts.script(*RESERVATION, "settle")
        self._take = self._scripts.script("common", "meters", "take")
        self._spent = self._scripts.script("common", "meters", "spent")
        self._lapsed = self._scripts.script("common", "lapsed")
        self._confirm = self._scripts.script("confirm")
        self._concurrency = self._scripts.script("common", "concurrency")
        self._admitting: Counter[str] = Counter()
        # by tenant; at most the settlements between two renewals
        self._unconfirmed: dict[str, list[str]] = {}

    async def connect(self) -> None:
        """Return once Redis responded and has the scripts. Raises StoreUnavailable."""
        await self._scripts.connect()

    async def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Reservation:
        due = limited(Claim(limit) for limit in limits)
        with self._one_more_waits(tenant_id):
            return await self._admit(tenant_id, request_id, due, fitting(claims), price)

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        claims = limited(unclaimed(reservation, claims))
        if not claims:
            return reservation
        held = len(reservation.claims)
        wanted = replace(reservation, claims=reservation.claims + claims, price=price)
        while True:
            answer = await self._call_reserve("reserve", wanted, wanted.claims, held)
            if answer[0] == b"ok":
                break
            # A lapsed reservation must not take the room of a request.
            if not (answer[3] and await self._settle_requests(reservation.tenant_id, answer[3])):
                raise _rejected(wanted.claims, answer[1:])
        rates = _rates(wanted.claims, answer[2])
        return replace(wanted, token_rate=_tightest_of(rates, TOKEN_RATES))

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        claims = on_limits(claims)
        keys = [limit_key(tenant_id, claim.limit) for claim in claims]
        amounts = [part for claim in claims for part in (claim.limit.kind, most(claim.limit), claim.amount)]
        if not claims:
            return
        with self._one_more_waits(tenant_id):
            number, wait_us, units = await self._scripts.run(tenant_id, self._take, keys, amounts)
        if number:
            raise rejection(claims[number - 1], wait_us / 1e6, _rates(claims, units))

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        by_tenant: dict[str, list[tuple[Reservation, Usage]]] = {}
        for held in running:
            by_tenant.setdefault(held[0].tenant_id, []).append(held)
        for tenant_id, of_tenant in by_tenant.items():
            for start in range(0, len(of_tenant), _RENEW_BATCH):
                keys = [slots_key(tenant_id)]
                arguments: list[str | int | bytes] = [self._lease_us, _UNCONFIRMED_KEEP_MS]
                for reservation, usage in of_tenant[start : start + _RENEW_BATCH]:
                    keys += keys_of(reservation, reservation.claims)
                    arguments += arguments_of(reservation, usage, reservation.claims)
                await self._scripts.run(tenant_id, self._renew, keys, arguments)
        for tenant_id in list(self._unconfirmed):
            while keys := self._take_unconfirmed(tenant_id):
                await self._scripts.run(tenant_id, self._confirm, keys, (self._settled_keep_ms,))

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        await self._call_settle("settle", reservation, usage)
        if not spooled:
            ids = self._unconfirmed.setdefault(reservation.tenant_id, [])
            ids.append(record_key(reservation.tenant_id, reservation.request_id))

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        await self._settle_recorded("checkpoint", tenant_id, request_id, usage)

    async def settle_lapsed(self, tenant_id: str) -> int:
        keys = (slots_key(tenant_id),)
        found = await self._scripts.run(tenant_id, self._lapsed, keys, (LAPSED_BATCH,))
        return await self._settle_requests(tenant_id, found)

    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        keys = [limit_key(tenant_id, limit) for limit in limits]
        kinds = [limit.kind.value for limit in limits]
        found = await self._scripts.run(tenant_id, self._spent, keys, kinds)
        return tuple(Spent(limit, *amounts) for limit, amounts in zip(limits, found, strict=True))

    async def concurrency(self, tenant_id: str) -> int:
        return int(await self._scripts.run(tenant_id, self._concurrency, (slots_key(tenant_id),), ()))

    @property
    def problem(self) -> str:
        """Why the limits are this gateway's share only; empty while they are shared."""
        return self._scripts.problem

    @property
    def breaker_open(self) -> bool:
        """Redis counts as unavailable: one call per second is tried."""
        return self._scripts.breaker_open

    async def close(self) -> None:
        await self._scripts.close()

    # --- the scripts -------------------------------------------------------------------------------

    @contextmanager
    def _one_more_waits(self, tenant_id: str) -> Iterator[None]:
        """Count one more call on the way of an admission. Raises RequestRateExceeded above the bound."""
        if self._admitting[tenant_id] >= MAX_ADMITTING:
            raise RequestRateExceeded(
                f"{MAX_ADMITTING} requests of this tenant wait to be admitted here, the most that may",
                retry_after_s=1.0,
                limit=MAX_ADMITTING,
            )
        self._admitting[tenant_id] += 1
        try:
            yield
        finally:
            self._admitting[tenant_id] -= 1
            if not self._admitting[tenant_id]:
                del self._admitting[tenant_id]

    async def _admit(
        self,
        tenant_id: str,
        request_id: str,
        claims: tuple[Claim, ...],
        more: tuple[Claim, ...],
        price: Price,
    ) -> Reservation:
        """``more`` are claims that ``reserve`` decides on, unless all of them fit now."""
        slots = tuple(claim for claim in claims if claim.limit.kind is LimitKind.CONCURRENCY)
        wanted = Reservation(tenant_id, request_id, claims=slots + more, price=price)
        for _ in range(_ATTEMPTS):
            answer = await self._call_reserve("admit", wanted, claims + more, 0)
            match answer[0]:
                case b"held":
                    return decode_claims(replace(wanted, admitted_us=answer[1]), answer[2])
                case b"over" if answer[1] > len(claims):
                    more, wanted = (), Reservation(tenant_id, request_id, claims=slots)
                    continue
                case b"over":
                    raise _rejected(claims + more, answer[1:])
                case b"ok":
                    await self._settle_few(tenant_id, answer[3])
                    rates = _rates(claims + more, answer[2])
                    return replace(
                        wanted,
                        admitted_us=answer[1],
                        request_rate=_tightest_of(rates, (LimitKind.REQUESTS,)),
                        token_rate=_tightest_of(rates, TOKEN_RATES),
                    )
            await self._settle_recorded("lapse", tenant_id, request_id, _NOTHING)
        raise StoreUnavailable("the request's earlier admission changes all the time", retry_after_s=1.0)

    async def _call_reserve(
        self, how: str, reservation: Reservation, claims: Sequence[Claim], held: int
    ) -> list[Any]:
        tenant_id = reservation.tenant_id
        most_lapsed = LAPSED_AT_ONCE if how == "admit" else LAPSED_BATCH
        answer: list[Any] = await self._scripts.run(
            tenant_id,
            self._reserve,
            (slots_key(tenant_id), *keys_of(reservation, claims)),
            (
                how,
                self._lease_us,
                _UNCONFIRMED_KEEP_MS,
                held,
                most_lapsed if self._may_settle_lapsed() else 0,
                *arguments_of(reservation, _NOTHING, claims),
            ),
        )
        return answer

    async def _call_settle(self, how: str, reservation: Reservation, usage: Usage) -> int:
        """Settle the claims of the reservation, or those of its record where they differ."""
        tenant_id = reservation.tenant_id
        confirmed = self._take_unconfirmed(tenant_id) if how == "settle" else []
        for _ in range(_ATTEMPTS):
            answer = await self._scripts.run(
                tenant_id,
                self._settle,
                (slots_key(tenant_id), *keys_of(reservation, reservation.claims), *confirmed),
                (
                    how,
                    _UNCONFIRMED_KEEP_MS,
                    self._settled_keep_ms,
                    *arguments_of(reservation, usage, reservation.claims),
                ),
            )
            if isinstance(answer, int):
                return answer
            reservation = decode_claims(reservation, answer)
        raise StoreUnavailable("the request's claims change all the time", retry_after_s=1.0)

    async def _settle_recorded(self, how: str, tenant_id: str, request_id: str, usage: Usage) -> int:
        """Settle a request of which only its record is at hand."""
        reservation = Reservation(tenant_id, request_id)
        record = await self._scripts.hash(tenant_id, record_key(tenant_id, request_id))
        if b"w" in record:
            reservation = decode_claims(replace(reservation, admitted_us=int(record[b"e"])), record[b"w"])
        return await self._call_settle(how, reservation, usage)

    async def _settle_requests(self, tenant_id: str, found: Sequence[bytes]) -> int:
        """Settle requests that were not renewed in time. Returns how many it did."""
        if not self._may_settle_lapsed():
            return 0
        ids = [request_id.decode() for request_id in found]
        lapses = [self._settle_recorded("lapse", tenant_id, request_id, _NOTHING) for request_id in ids]
        return sum(await asyncio.gather(*lapses))

    async def _settle_few(self, tenant_id: str, found: Sequence[bytes]) -> None:
        """Settle lapsed requests on the way of an admission, which does not depend on it."""
        try:
            await self._settle_requests(tenant_id, found)
        except StoreUnavailable:
            return

    def _may_settle_lapsed(self) -> bool:
        """Return False while running requests may be unrenewed because Redis was away."""
        return self._clock.monotonic_s() - self._scripts.available_since_s >= self._grace_s

    def _take_unconfirmed(self, tenant_id: str) -> list[str]:
        """Return records to confirm. If the call fails, they stay stored for the longer time."""
        keys = self._unconfirmed.pop(tenant_id, [])
        if len(keys) > _CONFIRM_BATCH:
            self._unconfirmed[tenant_id] = keys[_CONFIRM_BATCH:]
        return keys[:_CONFIRM_BATCH]


def _rejected(claims: Sequence[Claim], answer: Sequence[Any]) -> OverQuota:
    """Return the error for an answer ``over`` of the script: number of the claim, wait, lapsed, units."""
    number, wait_us, _, units = answer
    return rejection(claims[number - 1], wait_us / 1e6, _rates(claims, units))


def _rates(claims: Sequence[Claim], units: Sequence[int]) -> list[tuple[Limit, RateState]]:
    """Return the rates among the claims; ``units`` are -1 for others."""
    return [
        (claim.limit, rate_state(claim.limit, used))
        for claim, used in zip(claims, units, strict=True)
        if used >= 0
    ]


def _tightest_of(rates: Sequence[tuple[Limit, RateState]], kinds: Collection[LimitKind]) -> RateState | None:
    return tightest(state for limit, state in rates if limit.kind in kinds)
