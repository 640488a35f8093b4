"""What waits and runs, as the leading scheduler knows it: values between the roles."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.fleet import TenantCounter
from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class QueueShare:
    """What one tenant has waiting in one class of a pool. ``oldest_wait_s``: since it reached its gateway."""

    tenant: str
    priority: Priority
    queued: int
    queued_prompt_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class PoolQueue:
    """The queue and the workers of one model version.

    ``predicted_wait_s``: until what is queued now has left, None while no grants tell how fast that goes.
    ``granted``: given and reported by no worker yet; ``waiting``: at a worker, without a place in its batch.
    ``shares`` are the largest; ``shares_left_off`` did not fit in. ``counters``: what tenants
    were served, the most first.
    """

    version_digest: str
    queued: int = 0
    queued_prompt_tokens: int = 0
    oldest_wait_s: float = 0.0
    predicted_wait_s: float | None = None
    granted: int = 0
    running: int = 0
    waiting: int = 0
    workers: int = 0
    serving_workers: int = 0
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0
    shares: tuple[QueueShare, ...] = ()
    shares_left_off: int = 0
    pressure_ratio: float = 0.0
    counters: tuple[TenantCounter, ...] = ()
