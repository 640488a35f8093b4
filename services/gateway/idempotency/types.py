"""What the parts of the gateway that serve idempotency keys hand each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.generation import GenerationSpec, Usage
from services.gateway.events import RequestSink
from services.gateway.idempotency.record_codec import Pin
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.policy.degrade import Degradation
from services.gateway.requests.choice import Produced
from services.gateway.requests.request import Request
from services.ports.clock import Clock
from services.ports.idempotency import Hold, IdempotencyStore
from services.ports.limiter import Limiter, Reservation


@dataclass(frozen=True, slots=True)
class KeyedLimits:
    """Bounds of one gateway. Times in seconds; sizes are of what is kept in memory, estimated.

    ``detach_grace_s``: for how long a request runs on without a client; 0: not at all.
    """

    detach_grace_s: float = 30.0
    flush_s: float = 0.1
    renew_s: float = 1.5
    poll_s: float = 0.05
    max_log_bytes: int = 16 * 1024**2
    max_logs_bytes: int = 512 * 1024**2
    max_tenant_followers: int = 1024


@dataclass(frozen=True, slots=True)
class Resume:
    """What an earlier run left: what it was accepted as, and its tokens by choice."""

    pin: Pin
    produced: tuple[Produced, ...]


class Record(Protocol):
    """Writes down what a request is accepted as, and in what that differs from what was asked for."""

    def __call__(self, spec: GenerationSpec, degradations: Sequence[Degradation], /) -> Awaitable[None]: ...


class Launch(Protocol):
    """Starts the request. ``record`` is awaited with what it is accepted as, before anything comes of it."""

    def __call__(
        self,
        sink: RequestSink,
        limiter: Limiter,
        resume: Resume | None,
        record: Record,
    ) -> tuple[Request, asyncio.Task[None]]: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """The last write to a record. ``ended``: it is final; else another run may go on from there."""

    hold: Hold
    chunk: bytes
    reservation: Reservation | None
    usage: Usage
    ended: bool


@dataclass(frozen=True, slots=True)
class KeyedPorts:
    """What requests under keys act through."""

    store: IdempotencyStore
    limiter: Limiter
    clock: Clock
    telemetry: KeyedTelemetry
    new_incident: Callable[[], str]
    owner: str
    window_tokens: int
    limits: KeyedLimits
