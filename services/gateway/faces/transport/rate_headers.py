"""The state of a caller's rates, in the headers that OpenAI's clients read."""

from __future__ import annotations

import math

from services.core.errors import OverQuota
from services.core.limits import RateState
from services.gateway.events import Accepted
from services.gateway.faces.openai.errors import Header
from services.gateway.rows.work import RowsAnswer


def rate_headers(outcome: Accepted | OverQuota | RowsAnswer) -> list[Header]:
    """Return limit, remaining and reset of each rate that was checked for the request."""
    return [*_headers(b"requests", outcome.request_rate), *_headers(b"tokens", outcome.token_rate)]


def _headers(what: bytes, rate: RateState | None) -> list[Header]:
    if rate is None:
        return []
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % rate.limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % rate.remaining),
        (b"x-ratelimit-reset-" + what, duration(rate.reset_s).encode()),
    ]


def duration(seconds: float) -> str:
    """Return a time rounded up to milliseconds, in OpenAI's notation: ``120ms``, ``7.66s``, ``1m0s``."""
    total_ms = math.ceil(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    rest = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest
