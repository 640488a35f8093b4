"""Placements that wait, run or were decided in the leading scheduler: values between the roles."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.estimates.pool_load import PoolLoad
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
    load: PoolLoad | None = None  # the demand on it; None: not read


QUEUED = "QUEUED"
RUNNING_BEFORE = "RUNNING_BEFORE"
PLACED_ALONE = "PLACED_ALONE"


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """A worker that passed every filter, with its score."""

    worker_id: str
    score: float
    in_draw: bool  # whether it was in the set that the chosen worker was drawn from
    cached_tokens: int
    predicted_ttft_s: float  # predicted time from the grant to the first token
    kv_tokens_room: int
    parts: tuple[tuple[str, float], ...] = ()  # the score of each scorer; empty when not in the draw


@dataclass(frozen=True, slots=True)
class FilterRejections:
    """How many workers one filter rejected, and the names of some."""

    filter: str
    workers: int
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """One placement of one choice. See PlacementDecision in scheduler.proto."""

    choice: int
    tenant: str
    model: str
    version_digest: str
    priority: Priority
    epoch: int
    queued_unix_s: float
    wait_s: float  # time in the queue
    outcome: str  # QUEUED, GRANTED, the reason of an error, ...
    attempt: int = 0
    worker_id: str = ""
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    excluded_workers: tuple[str, ...] = ()
    looks: int = 0  # attempts to place it
    looks_without_room: int = 0  # attempts in which no worker had room
    looks_giving_way: int = 0  # attempts in which the tenant held more than its share
    looks_over_budget: int = 0  # attempts in which the tenant had no KV budget left on some worker
    bypassed: int = 0  # placements behind it that were granted first
    counter_tokens: float = 0.0  # counter of its tenant at the last attempt
    ranked: tuple[RankedWorker, ...] = ()
    rejections: tuple[FilterRejections, ...] = ()
    size_reason: str = ""  # the one of ``PlaceSpec``
    safety: str = ""  # the one of ``PlaceSpec``


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """One pool of one worker. See ReporterPool in scheduler.proto."""

    version_digest: str
    kv_tokens_total: int
    kv_tokens_room: int
    slots: int
    running: int
    waiting: int
    granted: int
    queued_prefill_tokens: int
    ready: bool
    measured_step_s: float | None
    predicted_step_s: float
    slowness_ratio: float
    health: str = ""  # state of a ``WorkerStanding``
    health_reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker in the leader's view."""

    worker_id: str
    address: str
    incarnation: int
    zone: str
    device_type: str
    cost_per_hour: float
    state: str
    silent_s: float  # time since its last report
    prefix_blocks: int
    pools: tuple[WorkerPool, ...]
    node_group: str = ""
