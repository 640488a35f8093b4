"""What the gateway's service acts through and is bounded by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from services.core.errors import FairwayError
from services.core.shares import share_of
from services.gateway.idempotency.types import KeyedLimits
from services.gateway.policy.degrade import DegradeLevels
from services.gateway.policy.retry import RetryBudget
from services.gateway.telemetry import GatewayTelemetry
from services.ports.clock import Clock
from services.ports.idempotency import IdempotencyStore
from services.ports.limiter import Limiter
from services.ports.placement import PlacementClient
from services.ports.worker import WorkerClient
from services.runtime.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of one gateway process. Times in seconds, windows in tokens.

    ``max_tenant_counts``: calls of one tenant that count tokens at once.

    ``placed_prefix_blocks``: leading blocks of a prompt that a placement names; 0 places without regard to
    what is cached.
    """

    max_requests: int = 4096
    max_tenant_counts: int = 16
    queue_ttl_s: float = 30.0
    heartbeat_s: float = 5.0
    window_tokens: int = 256
    max_timeout_s: float = 3600.0
    renew_s: float = 20.0
    renew_batch: int = 512
    placed_prefix_blocks: int = 1024
    keyed: KeyedLimits = field(default_factory=KeyedLimits)
    degrade: DegradeLevels = field(default_factory=DegradeLevels)

    @property
    def max_tenant_requests(self) -> int:
        """Requests of one tenant, and clients of its idempotency keys: half, so that others find room."""
        return share_of(self.max_requests)


@dataclass(frozen=True, slots=True)
class Ports:
    """What the service acts through. Without a store, idempotency keys are refused.

    ``gateway_id`` is this process and no other, also not the one before it at the same address.
    ``pressure`` returns how hard a version is pressed, 0..1, as far as it is known.
    """

    limiter: Limiter
    placement: PlacementClient
    workers: WorkerClient
    clock: Clock
    supervisor: Supervisor
    rng: Random
    sign_ticket: Callable[[str, str, float], bytes]
    new_incident: Callable[[], str]
    error_of: Callable[[str, str], FairwayError]
    telemetry: GatewayTelemetry = field(default_factory=GatewayTelemetry)
    idempotency: IdempotencyStore | None = None
    gateway_id: str = ""
    pressure: Callable[[str], float] = lambda _digest: 0.0
    retries: RetryBudget = field(default_factory=RetryBudget)
