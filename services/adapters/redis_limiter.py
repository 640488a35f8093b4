"""Quotas in Redis, shared by all gateways: one Lua script per operation, time by Redis.

Keys of a tenant share a hash tag, so that one script may touch them in a cluster, and all expire:

    fw:{tenant}:rate     hash   the bucket of requests per minute
    fw:{tenant}:slots    zset   running requests and when their slots lapse
    fw:{tenant}:settled  zset   requests that were counted, for ten minutes
    fw:{tenant}:usage    hash   counts per day, for 62 days
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.adapters.quota import MAX_REQUESTS_PER_MINUTE, SETTLED_KEEP_S, rejection
from services.adapters.redis_scripts import RedisScripts
from services.core.generation import Usage
from services.ports.clock import Clock
from services.ports.limiter import Limits, Reservation

USAGE_KEEP_DAYS: Final = 62
_RENEW_BATCH: Final = 200
_ADMITTED: Final = 0
_OVER_RATE: Final = 1


class RedisLimiter:
    """``Limiter`` on Redis 6.2 or later. The caller closes it.

    A slot lapses ``lease_s`` after it was given or last renewed. An outage costs the first few calls
    ``timeout_s`` each; then calls fail at once, and one a second tries again.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        password: str | None = None,
        timeout_s: float = 0.25,
        lease_s: float = 60.0,
        max_connections: int = 64,
    ) -> None:
        """A password in the URL goes before ``password``, which keeps it out of the environment."""
        self._lease_us = round(lease_s * 1e6)
        self._scripts = RedisScripts(
            url, clock, timeout_s=timeout_s, max_connections=max_connections, password=password
        )
        self._admit = self._scripts.script("admit")
        self._renew = self._scripts.script("renew")
        self._settle = self._scripts.script("settle")
        self._concurrency = self._scripts.script("concurrency")

    async def admit(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        rate = min(limits.requests_per_minute, MAX_REQUESTS_PER_MINUTE)
        outcome, wait_us = await self._scripts.run(
            self._admit,
            _keys(tenant_id, "rate", "slots", "settled"),
            (request_id, rate, limits.max_concurrency, self._lease_us),
        )
        if outcome == _ADMITTED:
            return Reservation(tenant_id, request_id)
        raise rejection(outcome == _OVER_RATE, wait_us / 1e6, limits)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        by_tenant: dict[str, list[str]] = {}
        for reservation in reservations:
            by_tenant.setdefault(reservation.tenant_id, []).append(reservation.request_id)
        for tenant_id, ids in by_tenant.items():
            for start in range(0, len(ids), _RENEW_BATCH):
                batch = ids[start : start + _RENEW_BATCH]
                await self._scripts.run(
                    self._renew, _keys(tenant_id, "slots", "settled"), (self._lease_us, *batch)
                )

    async def settle(self, reservation: Reservation, usage: Usage) -> None:
        await self._scripts.run(
            self._settle,
            _keys(reservation.tenant_id, "slots", "settled", "usage"),
            (
                reservation.request_id,
                SETTLED_KEEP_S * 1_000_000,
                USAGE_KEEP_DAYS,
                usage.prompt_tokens,
                usage.output_tokens,
                usage.cached_tokens,
            ),
        )

    async def concurrency(self, tenant_id: str) -> int:
        return int(await self._scripts.run(self._concurrency, _keys(tenant_id, "slots"), ()))

    async def usage(self, tenant_id: str) -> Usage:
        """Return what was counted for the tenant over the days that are kept."""
        (key,) = _keys(tenant_id, "usage")
        counts = await self._scripts.hash(key)
        totals = {"prompt_tokens": 0, "output_tokens": 0, "cached_tokens": 0, "requests": 0}
        for name, count in counts.items():
            totals[name.decode().partition(":")[2]] += int(count)
        return Usage(totals["prompt_tokens"], totals["output_tokens"], totals["cached_tokens"])

    @property
    def breaker_open(self) -> bool:
        """Redis counts as away: it is asked once a second only."""
        return self._scripts.breaker_open

    async def close(self) -> None:
        await self._scripts.close()


def _keys(tenant_id: str, *names: str) -> list[str]:
    return [f"fw:{{{tenant_id}}}:{name}" for name in names]
