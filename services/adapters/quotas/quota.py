"""Limits and rejections that all limiters share."""

from __future__ import annotations

from typing import Final

from services.core.errors import ConcurrencyExceeded, RequestRateExceeded
from services.ports.limiter import Limits

MAX_REQUESTS_PER_MINUTE: Final = 100_000_000  # a higher limit counts as this: integers up to 2^53 in Lua
SETTLED_KEEP_S: Final = 600  # for how long a second settlement of a request is detected
_CONCURRENCY_RETRY_S: Final = 1.0


def rejection(over_rate: bool, wait_s: float, limits: Limits) -> RequestRateExceeded | ConcurrencyExceeded:
    """Return the error for a limit that is reached.

    The wait for a rate is exact. The end of a running request is unknown, so the wait for a slot is a second,
    or less when a slot lapses earlier.
    """
    if over_rate:
        limit = limits.requests_per_minute
        return RequestRateExceeded(
            f"the limit of {limit} requests per minute is reached", retry_after_s=wait_s, limit=limit
        )
    limit = limits.max_concurrency
    return ConcurrencyExceeded(
        f"the limit of {limit} requests at once is reached",
        retry_after_s=min(max(wait_s, 0.0), _CONCURRENCY_RETRY_S),
        limit=limit,
    )
