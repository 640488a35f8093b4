"""Limits and rejections that all limiters share."""

from __future__ import annotations

from typing import Final

from services.core.errors import ConcurrencyExceeded, RequestRateExceeded, TokenRateExceeded
from services.ports.limiter import Limits, RateState

# What one request and one token weigh in a bucket, which drains by its limit per microsecond or millisecond.
REQUEST_UNITS: Final = 60_000_000
TOKEN_UNITS: Final = 60_000
MAX_REQUESTS_PER_MINUTE: Final = 100_000_000  # a higher limit counts as this: integers up to 2^53 in Lua
MAX_TOKENS_PER_MINUTE: Final = 100_000_000_000  # the same for tokens
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


def token_rate(tokens: int, limits: Limits) -> int:
    """Return the rate that applies, in tokens per minute; 0: none.

    Raises TokenRateExceeded for more tokens than it admits in a minute.
    """
    rate = min(limits.tokens_per_minute, MAX_TOKENS_PER_MINUTE)
    if 0 < rate < tokens:
        raise TokenRateExceeded(
            f"the request needs {tokens} tokens, more than the limit of {rate} per minute; "
            "shorten its prompt",
            limit=rate,
            tokens=tokens,
        )
    return rate


def token_rejection(wait_s: float, tokens: int, limits: Limits) -> TokenRateExceeded:
    """Return the error for a token rate that is reached. The wait is exact if no other request takes them."""
    limit = limits.tokens_per_minute
    return TokenRateExceeded(
        f"the limit of {limit} tokens per minute has no room for {tokens}",
        retry_after_s=wait_s,
        limit=limit,
        tokens=tokens,
    )


def rate_state(limit: int, used: int, unit: int) -> RateState:
    """Return the state of a bucket for ``limit`` per minute with ``used`` units, of which one weighs
    ``unit``."""
    return RateState(limit, max(0, limit - -(-used // unit)), used * 60 / (unit * limit))
