"""Quotas in Redis, shared by all gateways: one Lua script per operation, with Redis time.

A tenant's keys share a hash tag, so that one script may use all of them in a cluster. All expire:

    fw:{tenant}:rate     hash   the bucket of requests per minute
    fw:{tenant}:work     hash   the bucket of other work per minute, such as counting tokens
    fw:{tenant}:tokens   hash   the bucket of tokens per minute
    fw:{tenant}:reserved:{request}  marks a request whose tokens are reserved, for seconds
    fw:{tenant}:slots    zset   running requests by the time their slots lapse
    fw:{tenant}:settled  zset   settled requests: for ten minutes, for a week while unconfirmed
    fw:{tenant}:usage    hash   counts per day, for 62 days
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from services.adapters.quotas.quota import (
    SETTLED_KEEP_S,
    limited,
    most,
    rate_state,
    rejection,
    unclaimed,
)
from services.adapters.redis.scripts import RedisScripts
from services.core.errors import RequestRateExceeded
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Price
from services.ports.clock import Clock
from services.ports.limiter import Reservation, Spent

# A Redis that syncs every write answers no call during the sync: a third of a second on a busy disk. A limit
# that fails open during a sync would not be exact.
TIMEOUT_S: Final = 1.0
USAGE_KEEP_DAYS: Final = 62
# Admissions of one tenant that wait at one gateway. More are rejected at once.
MAX_ADMITTING: Final = 256
_UNCONFIRMED_KEEP_S: Final = 7 * 86400
_RENEW_BATCH: Final = 200
_CONFIRM_BATCH: Final = 200
_ADMITTED: Final = 0
_OVER_RATE: Final = 1


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
        password: str | None = None,
        timeout_s: float = TIMEOUT_S,
        lease_s: float = 60.0,
        settled_keep_s: float = SETTLED_KEEP_S,
    ) -> None:
        """``settled_keep_s``: for how long a confirmed settlement is stored.

        A password in the URL takes precedence over ``password``, which keeps it out of the environment.
        """
        self._lease_us = round(lease_s * 1e6)
        self._settled_keep_us = round(settled_keep_s * 1e6)
        self._scripts = RedisScripts(url, clock, timeout_s=timeout_s, password=password, repeatable=True)
        self._admit = self._scripts.script("bucket", "admit")
        self._spend = self._scripts.script("bucket", "spend")
        self._reserve_tokens = self._scripts.script("token_bucket", "reserve_tokens")
        self._renew = self._scripts.script("renew")
        self._settle = self._scripts.script("token_bucket", "usage", "settle")
        self._confirm = self._scripts.script("confirm")
        self._concurrency = self._scripts.script("concurrency")
        self._admitting: Counter[str] = Counter()
        # by tenant; at most the settlements between two renewals
        self._unconfirmed: dict[str, list[str]] = {}

    async def connect(self) -> None:
        """Return once Redis responded and has the scripts. Raises StoreUnavailable."""
        await self._scripts.connect()

    async def admit(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation:
        by_kind = {limit.kind: most(limit) for limit in limits}
        rate, slots = by_kind.get(LimitKind.REQUESTS, 0), by_kind.get(LimitKind.CONCURRENCY, 0)
        if self._admitting[tenant_id] >= MAX_ADMITTING:
            raise RequestRateExceeded(
                f"{MAX_ADMITTING} requests of this tenant wait to be admitted here, the most that may",
                retry_after_s=1.0,
                limit=MAX_ADMITTING,
            )
        self._admitting[tenant_id] += 1
        try:
            outcome, wait_us, used = await self._scripts.run(
                tenant_id,
                self._admit,
                _keys(tenant_id, "rate", "slots", "settled"),
                (request_id, rate, slots, self._lease_us),
            )
        finally:
            self._admitting[tenant_id] -= 1
            if not self._admitting[tenant_id]:
                del self._admitting[tenant_id]
        if outcome == _ADMITTED:
            state = rate_state(Limit(LimitKind.REQUESTS, rate), used) if used >= 0 else None
            held = tuple(Claim(limit) for limit in limits if limit.kind is LimitKind.CONCURRENCY and slots)
            return Reservation(tenant_id, request_id, claims=held, request_rate=state)
        kind = LimitKind.REQUESTS if outcome == _OVER_RATE else LimitKind.CONCURRENCY
        raise rejection(Claim(next(limit for limit in limits if limit.kind is kind)), wait_us / 1e6)

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        tenant_id = reservation.tenant_id
        for claim in limited(unclaimed(reservation, claims)):
            keys = _keys(tenant_id, "tokens", f"reserved:{reservation.request_id}")
            rate = most(claim.limit)
            wait_ms, used = await self._scripts.run(
                tenant_id, self._reserve_tokens, keys, (claim.amount, rate)
            )
            if wait_ms:
                raise rejection(claim, wait_ms / 1e3)
            state = rate_state(claim.limit, used)
            reservation = replace(
                reservation, claims=(*reservation.claims, claim), price=price, token_rate=state
            )
        return reservation

    async def spend(self, tenant_id: str, per_minute: int) -> None:
        limit = Limit(LimitKind.REQUESTS, per_minute)
        rate = most(limit)
        if rate <= 0:
            return
        wait_us = await self._scripts.run(tenant_id, self._spend, _keys(tenant_id, "work"), (rate,))
        if wait_us:
            raise rejection(Claim(limit), wait_us / 1e6)

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        raise NotImplementedError

    async def settle_lapsed(self, tenant_id: str) -> int:
        raise NotImplementedError

    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        raise NotImplementedError

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        by_tenant: dict[str, list[str]] = {}
        for reservation, _ in running:
            by_tenant.setdefault(reservation.tenant_id, []).append(reservation.request_id)
        for tenant_id, ids in by_tenant.items():
            for start in range(0, len(ids), _RENEW_BATCH):
                batch = ids[start : start + _RENEW_BATCH]
                keys = _keys(tenant_id, "slots", "settled")
                await self._scripts.run(tenant_id, self._renew, keys, (self._lease_us, *batch))
        for tenant_id in list(self._unconfirmed):
            while ids := self._take_unconfirmed(tenant_id):
                keys = _keys(tenant_id, "settled")
                await self._scripts.run(tenant_id, self._confirm, keys, (self._settled_keep_us, *ids))

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        tenant_id = reservation.tenant_id
        names = ["slots", "settled", "usage", "tokens"]
        tokens = next((claim for claim in reservation.claims if claim.limit.kind in TOKEN_RATES), None)
        await self._scripts.run(
            tenant_id,
            self._settle,
            _keys(tenant_id, *names),
            (
                reservation.request_id,
                _UNCONFIRMED_KEEP_S * 1_000_000,
                self._settled_keep_us,
                USAGE_KEEP_DAYS,
                usage.prompt_tokens,
                usage.output_tokens,
                usage.cached_tokens,
                tokens.amount if tokens is not None else 0,
                most(tokens.limit) if tokens is not None else 0,
                *self._take_unconfirmed(tenant_id),
            ),
        )
        if not spooled:
            self._unconfirmed.setdefault(tenant_id, []).append(reservation.request_id)

    def _take_unconfirmed(self, tenant_id: str) -> list[str]:
        """Return settlements to confirm. If the call fails, they stay stored for the longer time."""
        ids = self._unconfirmed.pop(tenant_id, [])
        if len(ids) > _CONFIRM_BATCH:
            self._unconfirmed[tenant_id] = ids[_CONFIRM_BATCH:]
        return ids[:_CONFIRM_BATCH]

    async def concurrency(self, tenant_id: str) -> int:
        return int(await self._scripts.run(tenant_id, self._concurrency, _keys(tenant_id, "slots"), ()))

    async def usage(self, tenant_id: str) -> Usage:
        """Return the tenant's usage over the stored days."""
        (key,) = _keys(tenant_id, "usage")
        counts = await self._scripts.hash(tenant_id, key)
        totals = {"prompt_tokens": 0, "output_tokens": 0, "cached_tokens": 0, "requests": 0}
        for name, count in counts.items():
            totals[name.decode().partition(":")[2]] += int(count)
        return Usage(totals["prompt_tokens"], totals["output_tokens"], totals["cached_tokens"])

    @property
    def breaker_open(self) -> bool:
        """Redis counts as unavailable: one call per second is tried."""
        return self._scripts.breaker_open

    async def close(self) -> None:
        await self._scripts.close()


def _keys(tenant_id: str, *names: str) -> list[str]:
    return [f"fw:{{{tenant_id}}}:{name}" for name in names]
