"""Rows of one fixed-cost version that wait at a gateway for a slot. Pure, bounded by its owner.

Within a tenant the higher class goes first, then the earlier deadline, then arrival. Leases belong to a
tenant, so its order among others is the scheduler's; without a leader tenants take turns here.

Would a row wait beyond its deadline? Only rows of its tenant and version are ahead of it, and they start as
fast as such rows end. While rows wait, that rate is what the slots allow, not what clients send. A row ahead
leaves the queue when it starts or when its own time is over: the first ``i`` have left it after ``T_i =
max(T_(i-1), min(T_(i-1) + 1 / rate, time left of row i))``. Nothing is predicted without observations, and a
request is refused only if it would be late at ``MARGIN_RATIO`` times the observed rate too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.turns import TenantTurns
from services.core.records import Priority

MEMORY_S: Final = 3.0  # time constant of the rate; after as long without an end it is unknown
LEAST_S: Final = 1.0  # time of observation before anything is predicted
MARGIN_RATIO: Final = 1.5  # factor by which the prediction exceeds the wait at the observed rate
_STAY_GAIN: Final = 0.05  # weight of a row in the mean


@dataclass(slots=True)
class EndRate:
    """How fast rows of a tenant and version end while others of them wait; exponentially weighted.

    One writer. It begins with the first end: before, a worker may load the version.
    """

    rows: float = 0.0  # rows that ended, weighted
    seconds: float = 0.0  # seconds in which they ended, weighted
    last_s: float = -math.inf  # time of the last end
    stays_s: dict[Priority, float] = field(default_factory=dict)  # means, from the slot to the end

    def ended(self, priority: Priority, stay_s: float, now_s: float) -> None:
        """Count a row that was ``stay_s`` seconds in its slot."""
        gap_s, self.last_s = now_s - self.last_s, now_s
        mean_s = self.stays_s.get(priority, stay_s)
        self.stays_s[priority] = mean_s + _STAY_GAIN * (stay_s - mean_s)
        if gap_s > MEMORY_S:
            self.rows = self.seconds = 0.0
            return
        keep = math.exp(-gap_s / MEMORY_S)
        self.rows = self.rows * keep + 1.0
        self.seconds = self.seconds * keep + gap_s

    def per_s(self, now_s: float) -> float:
        """Return the rows per second; 0 while too little was observed."""
        if self.seconds < LEAST_S or now_s - self.last_s > MEMORY_S:
            return 0.0
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of a request that arrives."""

    rows: int
    priority: Priority
    left_s: float  # time left to the deadline


@dataclass(frozen=True, slots=True)
class RowsAhead:
    """The rows that go before those of a request, in their order."""

    rows: int  # upper bound of their number, since some may have left
    left_s: Sequence[float]  # seconds until every ``step``-th row that is still here leaves
    step: int = 1


def late_answer_s(new: NewRows, ahead: RowsAhead, rate: EndRate, now_s: float) -> float | None:
    """Return the seconds to the answer of rows that cannot meet their deadline, None for others."""
    per_s = rate.per_s(now_s)
    if not per_s:
        return None
    best_per_s, stay_s = MARGIN_RATIO * per_s, rate.stays_s.get(new.priority, 0.0)
    answer_s = (ahead.rows + new.rows - 1) / per_s + stay_s
    own_s = (new.rows - 1) / best_per_s
    if own_s > new.left_s:
        return answer_s
    # The rows ahead have to leave within these seconds.
    most_s = new.left_s - own_s - stay_s / MARGIN_RATIO
    if ahead.rows / best_per_s <= most_s:
        return None
    start_s = 0.0
    for left_s in ahead.left_s:
        start_s = max(start_s, min(start_s + ahead.step / best_per_s, left_s))
    return answer_s if ahead.left_s and start_s > most_s else None


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
    lacks_node: bool = False  # the leader reported that no node of its tenant's group serves its version
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
