"""What requests with idempotency keys act through, and their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.core.usage import RequestUsage
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.ports.clock import Clock
from services.ports.idempotency import IdempotencyStore
from services.ports.limiter import Limiter


@dataclass(frozen=True, slots=True)
class KeyedLimits:
    """Bounds of one gateway. Times in seconds; sizes are estimates of memory in use."""

    # How long a request runs on without a client; 0: it ends at once.
    detach_grace_s: float = 30.0
    # The interval between writes behind the runs.
    flush_s: float = 0.1
    # The interval between lease renewals.
    renew_s: float = 1.5
    # The interval between reads of a followed record.
    poll_s: float = 0.05
    # The output of one request that is retained whole.
    max_log_bytes: int = 16 * 1024**2
    # The retained output of all requests together.
    max_logs_bytes: int = 512 * 1024**2
    # The clients of one tenant that follow requests with keys.
    max_tenant_followers: int = 1024


@dataclass(frozen=True, slots=True)
class KeyedPorts:
    """What requests with keys use outside this package."""

    store: IdempotencyStore
    limiter: Limiter
    clock: Clock
    telemetry: KeyedTelemetry
    new_incident: Callable[[], str]
    # Keys the names and fingerprints of records; the same on every gateway.
    names_secret: bytes
    # This gateway's id in the records.
    owner: str
    # Tokens that may be under way to a client and untaken.
    window_tokens: int
    limits: KeyedLimits
    # Receives each request's usage once it is settled.
    report_usage: Callable[[RequestUsage], None] = lambda _event: None
