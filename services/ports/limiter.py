"""Port of the quota limiter: a reservation before a request is placed, a settlement when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.core.generation import Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """A tenant's limits; 0 means no limit."""

    requests_per_minute: int = 0
    max_concurrency: int = 0
    # Prompt and output together.
    tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class RateState:
    """A rate right after a request was counted against it."""

    # Per minute.
    limit: int
    # How many more it has room for at once.
    remaining: int
    # The time until it has room for a whole minute's again.
    reset_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """An admitted request. It expires at its deadline unless renewed, so that a killed gateway leaks no slot.

    ``local`` marks a reservation made while the shared store was unreachable. ``record`` is set to settle a
    request under an idempotency key separately from its record: the digest of that record, which contains the
    usage charged so far. ``tokens`` are reserved against a rate of ``tokens_per_minute``; 0: none are.
    """

    tenant_id: str
    request_id: str
    local: bool = False
    record: str = ""
    tokens: int = 0
    tokens_per_minute: int = 0
    # None where no rate applies, or where the request had been counted before.
    request_rate: RateState | None = field(default=None, compare=False)
    token_rate: RateState | None = field(default=None, compare=False)


class Limiter(Protocol):
    """Raises StoreUnavailable, within a bounded time, when the shared state cannot be reached."""

    async def admit(self, tenant_id: str, request_id: str, limits: Limits) -> Reservation:
        """Count the request against every limit, or against none if one is exceeded.

        Raises RequestRateExceeded or ConcurrencyExceeded, with ``retry_after_s``. A repeated request id is
        admitted while it holds its slot, and counts once.
        """

    async def reserve_tokens(self, reservation: Reservation, tokens: int, limits: Limits) -> Reservation:
        """Count the tokens that an admitted request is expected to use. ``settle`` replaces them by those
        used.

        Called at most once per request. Raises TokenRateExceeded, with ``retry_after_s`` unless ``tokens``
        exceed a minute's; nothing is counted then, and the slot stays held.
        """

    async def spend(self, tenant_id: str, limits: Limits) -> None:
        """Count work without a slot, such as counting tokens, against a separate rate limit with the same
        number per minute as requests. Raises RequestRateExceeded, with ``retry_after_s``."""

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Extend the deadlines of running requests."""

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        """Release the slot and count the tokens, once for any number of calls.

        After a success the caller repeats it only within a short time, unless ``spooled``: a restarted
        process may read the settlement from its disk again.
        """

    async def concurrency(self, tenant_id: str) -> int:
        """Return how many requests of the tenant hold a slot now."""
