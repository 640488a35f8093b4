"""A usage outbox for a worker without a ledger."""

from __future__ import annotations

from services.core.usage import UsageEvent


class NoUsageOutbox:
    """Implements ``ports.usage.UsageOutbox``: every event is dropped."""

    def add(self, event: UsageEvent) -> None:
        """See ``UsageOutbox``."""
