"""How much of Redis's memory the records of tenants may take.

Redis evicts nothing here: at ``maxmemory`` it refuses every write, the limits' own included. So a tenant with
much in a Redis that is half full gets a share of it, and what is left at the reserve is for counters,
reservations and requests that run: new keys are refused, and old answers make room for new ones.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from services.adapters.redis.cluster import open_scripts
from services.adapters.redis.topologies import NO_ACCESS, RedisAccess
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.idempotency import RecordLimits
from services.runtime.reserve import MEASURED_S, RESERVE_RATIO, Reserve

log = structlog.get_logger()

_MEASURE_S: Final = 1.0
_SHARES: Final = 8  # the divisor for a tenant's share once half of the memory is used
_LEAST_SHARES: Final = 64  # the same at the reserve
KEY_BYTES: Final = 2048  # a record without its log: head, entries of the index and the charges of its request


class RedisMemory:
    """The memory of one Redis, or of the fullest node of a cluster. The caller runs and closes it."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        reserve: Reserve,
        *,
        access: RedisAccess = NO_ACCESS,
        timeout_s: float = 1.0,
    ) -> None:
        self.reserve = reserve
        self._clock = clock
        self._scripts = open_scripts(url, clock, timeout_s=timeout_s, access=access, repeatable=True)
        self._max_bytes = 0
        self._measured_bytes = 0  # free at the last measurement
        self._measured_s = clock.monotonic_s()
        self._measuring = asyncio.Lock()

    async def run(self) -> None:
        """Measure once a second, until cancelled."""
        while True:
            try:
                await self.measure()
            except StoreUnavailable as error:
                log.debug("redis.not_measured", error=error.message)
            await self._clock.sleep(_MEASURE_S)

    async def measure(self) -> None:
        """Raises StoreUnavailable."""
        self._measured_s = self._clock.monotonic_s()
        used_bytes, self._max_bytes = await self._scripts.memory()
        self._measured_bytes = self._max_bytes - used_bytes
        free_bytes = self._measured_bytes if self._max_bytes else math.inf
        self.reserve.measured(free_bytes, int(self._max_bytes * RESERVE_RATIO))

    async def bounds(self, limits: RecordLimits) -> RecordLimits:
        """Return the limits of a tenant's records at the present fill.

        What was written may have replaced older records, so nothing is refused without a new measurement.
        """
        if self.reserve.reached:
            async with self._measuring:
                wrote = self.reserve.free_bytes < self._measured_bytes
                if wrote or self._clock.monotonic_s() - self._measured_s > MEASURED_S:
                    with suppress(StoreUnavailable):
                        await self.measure()
        if not self._max_bytes or self.reserve.free_bytes > self._max_bytes / 2:
            return limits
        share = self._max_bytes // (_LEAST_SHARES if self.reserve.reached else _SHARES)
        keys = 0 if self.reserve.reached else share // KEY_BYTES
        return replace(
            limits,
            max_tenant_bytes=min(limits.max_tenant_bytes, share),
            max_tenant_keys=min(limits.max_tenant_keys, keys),
        )

    async def close(self) -> None:
        await self._scripts.close()
