"""Port of the leader's operator views: queues, decisions, workers. Implementation:
``adapters/grpc/queues.py``."""

from __future__ import annotations

from typing import Protocol

from services.core.decisions import Explanation, WorkersPage
from services.core.queues import QueuesPage


class QueueSource(Protocol):
    """Each method raises NoLeader within a bounded time when no scheduler leads."""

    async def page(self, *, size: int, token: str, tenant: str) -> QueuesPage:
        """Return a page of pools with the shares of one tenant, or of all when ``tenant`` is empty."""

    async def explain(self, request_id: str) -> Explanation:
        """Return the decisions on the placements of a request, as far as the leader has stored them."""

    async def workers(self, *, size: int, token: str) -> WorkersPage:
        """Return a page of the workers that reported to the leader."""
