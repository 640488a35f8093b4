"""Stored responses for faces under test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from services.gateway.faces.responses.background import ResponseParts
from services.gateway.responses.store import ResponseStore
from services.ports.clock import Clock
from services.ports.idempotency import RecordLimits
from services.runtime.supervisor import Supervisor
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter


@asynccontextmanager
async def memory_responses(clock: Clock, limits: RecordLimits | None = None) -> AsyncIterator[ResponseParts]:
    """Yield a store in this process; its tasks end with the block."""
    supervisor = Supervisor(clock)
    limits = replace(limits or RecordLimits(), open_s=86_400.0)
    store = ResponseStore(MemoryIdempotency(clock, MemoryLimiter(clock), limits), b"n" * 32, "g", clock)
    try:
        yield ResponseParts(store, supervisor, lambda: "inc_1", remembered_s=86_400.0)
    finally:
        await supervisor.close()
