"""Rows of one fixed-cost version that wait at a gateway for a slot. Pure, bounded by its owner.

Within a tenant the higher class goes first, then the earlier deadline, then arrival. Leases belong to a
tenant, so its order among others is the scheduler's; without a leader it is that of service here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.core.fixed_cost.rows import RowsRequest


@dataclass(slots=True, eq=False)
class QueuedRow:
    """One row of a request, until it has ended. Its owner says where it is."""

    request: RowsRequest
    row: int
    number: int  # in the order of arrival at this gateway
    queued_s: float
    lost_on: str = ""  # the worker on which it was lost, and when
    lost_s: float = 0.0
    excluded: tuple[str, ...] = ()  # that worker, for a while
    over: bool = False

    @property
    def order(self) -> tuple[int, float, int]:
        return -self.request.priority.rank, self.request.deadline_s, self.number


@dataclass(slots=True)
class _Tenant:
    heap: list[tuple[tuple[int, float, int], QueuedRow]] = field(default_factory=list)
    served: float = 0.0  # rows over weight, that were started while no leader answered


class RowQueue:
    """The waiting rows of a version by tenant. A row that is over is skipped and dropped."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    @property
    def tenants(self) -> Sequence[str]:
        """The tenants that may have waiting rows."""
        return tuple(self._tenants)

    def push(self, row: QueuedRow) -> None:
        tenant = self._tenants.get(row.request.tenant_id)
        if tenant is None:
            floor = min((found.served for found in self._tenants.values()), default=0.0)
            tenant = self._tenants[row.request.tenant_id] = _Tenant(served=floor)
        heapq.heappush(tenant.heap, (row.order, row))

    def first(self, tenant: str) -> QueuedRow | None:
        """Return the tenant's next row, which stays; None when it has none."""
        found = self._tenants.get(tenant)
        while found is not None and found.heap:
            if not found.heap[0][1].over:
                return found.heap[0][1]
            heapq.heappop(found.heap)
        self._tenants.pop(tenant, None)
        return None

    def pop(self, tenant: str) -> None:
        """Remove the row that ``first`` returned."""
        heapq.heappop(self._tenants[tenant].heap)

    def by_service(self) -> list[str]:
        """Return the tenants, the one with the least service without a leader first."""
        return sorted(self._tenants, key=lambda name: (self._tenants[name].served, name))

    def charge(self, tenant: str, rows: float) -> None:
        """Count rows, over the tenant's weight, that were started without a leader."""
        if (found := self._tenants.get(tenant)) is not None:
            found.served += rows

    def rows(self) -> list[QueuedRow]:
        """Return the rows that wait."""
        return [row for tenant in self._tenants.values() for _, row in tenant.heap if not row.over]
