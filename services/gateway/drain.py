"""The gateway's shutdown."""

from __future__ import annotations

from services.core.errors import Draining
from services.gateway.service_interface import GatewayInterface
from services.ports.clock import Clock


async def drain(service: GatewayInterface, clock: Clock, timeout_s: float) -> int:
    """Reject new requests, wait for the running ones, cancel the rest. Returns how many were cut."""
    service.reject_new()
    deadline_s = clock.monotonic_s() + timeout_s
    while service.busy and clock.monotonic_s() < deadline_s:
        await clock.sleep(0.05)
    cut = service.cancel_all(Draining("this gateway is shutting down; send it again", retry_after_s=1.0))
    while service.busy and clock.monotonic_s() < deadline_s + 5.0:
        await clock.sleep(0.01)
    await service.flush()
    return cut
