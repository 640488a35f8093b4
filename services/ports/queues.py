"""The queues of whoever leads the scheduling. Implementation: ``adapters/grpc_queues.py``."""

from __future__ import annotations

from typing import Protocol

from services.core.queues import QueuesPage


class QueueSource(Protocol):
    async def page(self, *, size: int, token: str, tenant: str) -> QueuesPage:
        """Return a page of pools with the shares of one tenant, or of all when ``tenant`` is empty.

        Raises NoLeader within a bounded time when no scheduler leads.
        """
