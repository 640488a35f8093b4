"""Rows of one fixed-cost version that wait at a gateway for a slot. Pure, bounded by its owner.

Within a tenant the higher class goes first, then the earlier deadline, then arrival. Leases belong to a
tenant, so its order among others is the scheduler's; without a leader tenants take turns here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.turns import TenantTurns
from services.gateway.policy.queue_wait import EndRate, RowsAhead

MOST_LOOKED_AT: Final = 256  # rows ahead of one that arrives
Order = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class QueuedRow:
    """One row of a request, until it has ended. Its owner says where it is."""

    request: RowsRequest
    row: int
    number: int  # in the order of arrival at this gateway
    queued_s: float
    until_s: float  # it waits no longer: its deadline, or the longest wait
    lost_on: str = ""  # the worker on which it was lost, and when
    lost_s: float = 0.0
    excluded: tuple[str, ...] = ()  # that worker, for a while
    over: bool = False

    @property
    def order(self) -> Order:
        return order_of(self.request, self.number)


def order_of(request: RowsRequest, number: int) -> Order:
    return -request.priority.rank, request.deadline_s, number


@dataclass(slots=True)
class _Tenant:
    entries: list[tuple[Order, QueuedRow]] = field(default_factory=list)  # sorted
    rate: EndRate = field(default_factory=EndRate)  # rate at which its rows end, since some wait


class RowQueue:
    """The waiting rows of a version by tenant. A row that is over is skipped and dropped."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self.turns = TenantTurns()  # turns of rows that start while no leader answers

    @property
    def tenants(self) -> Sequence[str]:
        """The tenants that may have waiting rows."""
        return tuple(self._tenants)

    def push(self, row: QueuedRow) -> None:
        tenant = self._tenants.get(row.request.tenant_id)
        if tenant is None:
            tenant = self._tenants[row.request.tenant_id] = _Tenant()
        insort(tenant.entries, (row.order, row))

    def first(self, tenant: str) -> QueuedRow | None:
        """Return the tenant's next row, which stays; None when it has none."""
        found = self._tenants.get(tenant)
        while found is not None and found.entries:
            if not found.entries[0][1].over:
                return found.entries[0][1]
            del found.entries[0]
        self._tenants.pop(tenant, None)
        return None

    def pop(self, tenant: str) -> None:
        """Remove the row that ``first`` returned."""
        del self._tenants[tenant].entries[0]

    def rate(self, tenant: str) -> EndRate | None:
        """Return how fast the tenant's rows end since some of them wait; None while none waits."""
        found = self._tenants.get(tenant)
        return None if found is None else found.rate

    def ahead(self, tenant: str, order: Order, now_s: float) -> RowsAhead:
        """Return the tenant's rows that go before this place in the order."""
        found = self._tenants.get(tenant)
        entries = [] if found is None else found.entries
        count = bisect_left(entries, (order,))
        step = 1 + count // MOST_LOOKED_AT
        left_s = [row.until_s - now_s for _, row in entries[:count:step] if not row.over]
        return RowsAhead(count, left_s, step)

    def by_turn(self) -> list[str]:
        """Return the tenants in the order of their turns without a leader."""
        return sorted(self._tenants, key=lambda name: (self.turns.begin_s(name), name))

    def rows(self) -> list[QueuedRow]:
        """Return the rows that wait."""
        return [row for tenant in self._tenants.values() for _, row in tenant.entries if not row.over]
