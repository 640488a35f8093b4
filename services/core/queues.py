"""Waiting and running placements in the leading scheduler: values between the roles."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.fleet import TenantCounter
from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class QueueShare:
    """Waiting placements of one tenant in one class of a pool. ``oldest_wait_s`` counts from the arrival at
    its gateway."""

    tenant: str
    priority: Priority
    queued: int
    queued_prompt_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class ClassWait:
    """The wait of a new placement of a class behind all that waits, as refusals state it; None: unknown."""

    priority: Priority
    predicted_wait_s: float | None


@dataclass(frozen=True, slots=True)
class PoolQueue:
    """The queue and the workers of one model version."""

    version_digest: str
    queued: int = 0
    queued_prompt_tokens: int = 0
    oldest_wait_s: float = 0.0
    # Time until the present queue has drained; None while there is no rate to predict it from.
    predicted_wait_s: float | None = None
    granted: int = 0  # granted and not yet in a worker's report
    running: int = 0
    waiting: int = 0  # sequences at a worker without a place in its batch
    workers: int = 0
    serving_workers: int = 0
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0
    shares: tuple[QueueShare, ...] = ()  # the largest ones
    shares_left_off: int = 0  # how many did not fit into ``shares``
    pressure_ratio: float = 0.0
    counters: tuple[TenantCounter, ...] = ()  # service of tenants, the largest first
    waits: tuple[ClassWait, ...] = ()  # waits of the classes with waiting placements, the highest class first
