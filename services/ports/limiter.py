"""Quotas: reserved before a request is placed, settled when it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.generation import Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """A tenant's limits; 0 is none."""

    requests_per_minute: int = 0
    max_concurrency: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request that was let in. It lapses at its deadline unless renewed, so a killed gateway leaks nothing.

    ``local`` marks one given while the shared store was unreachable. ``record`` is set to settle a request
    under an idempotency key apart from its record: the digest of that, which holds what was charged already.
    """

    tenant_id: str
    request_id: str
    local: bool = False
    record: str = ""


class Limiter(Protocol):
    """Raises StoreUnavailable, within a bounded time, when the shared state cannot be reached."""

    async def admit(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        """Count the request against every limit at once, or against none.

        Raises RequestRateExceeded or ConcurrencyExceeded, with ``retry_after_s``. The same request id
        again, while it is held, is admitted and counts once.
        """

    async def spend(self, tenant_id: str, limits: Limits) -> None:
        """Count work that holds no slot, such as counting tokens, against a rate of its own: as many a minute
        as requests. Raises RequestRateExceeded, with ``retry_after_s``.
        """

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Push the deadlines of running requests out."""

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        """Give the slot back and count the tokens, once, however often it is called.

        After an answer it is not called again for long, unless ``spooled``: a process that starts anew may
        read the settlement from its disk again.
        """

    async def concurrency(self, tenant_id: str) -> int:
        """Return how many requests of the tenant hold a slot now."""
