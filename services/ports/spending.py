"""Port of what was spent under limits: read by the control plane, written by the limiter of the gateways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.limits import Limit
from services.ports.limiter import Spent


class Spending(Protocol):
    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        """Return the state of each limit, in their order, in its present period.

        Raises StoreUnavailable, within a bounded time.
        """
