"""Port of the usage outbox: events wait on the local disk until the ledger has stored them."""

from __future__ import annotations

from typing import Protocol

from services.core.usage import UsageEvent


class UsageOutbox(Protocol):
    """Delivers every event to the usage ledger at least once; the ledger counts it once."""

    def add(self, event: UsageEvent) -> None:
        """Queue an event. Returns at once; never raises for a full disk or a ledger that is unavailable."""
