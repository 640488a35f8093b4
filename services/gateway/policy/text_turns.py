"""Which tenant's text is read next, and which tenants' texts are suspended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

FREE_KILLS: Final = 2
FIRST_S: Final = 5.0
MOST_S: Final = 60.0
CALM_S: Final = 120.0  # after this time a count starts again
SUSPENDING_TENANTS: Final = 3
MAX_TENANTS: Final = 256


class TenantRoundRobin(Generic[Item]):
    """Waiting items, by tenant. Each tenant's items are taken in order; a served tenant moves to the end."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, item: Item) -> None:
        self._waiting.setdefault(tenant, OrderedDict())[item] = None

    def add_first(self, tenant: str, item: Item) -> None:
        """Add an item before all others, for a turn that it already had."""
        self.add(tenant, item)
        self._waiting[tenant].move_to_end(item, last=False)
        self._waiting.move_to_end(tenant, last=False)

    def discard(self, tenant: str, item: Item) -> None:
        """Remove an item that may be waiting."""
        items = self._waiting.get(tenant)
        if items is not None:
            items.pop(item, None)
            if not items:
                del self._waiting[tenant]

    def next_tenant(self, busy: Container[str]) -> str | None:
        """Return the next tenant that is not ``busy``."""
        return next((tenant for tenant in self._waiting if tenant not in busy), None)

    def take(self, busy: Container[str]) -> Item | None:
        """Remove and return the next item of a tenant that is not ``busy``."""
        tenant = self.next_tenant(busy)
        if tenant is None:
            return None
        items = self._waiting[tenant]
        item, _ = items.popitem(last=False)
        self._waiting.move_to_end(tenant)
        if not items:
            del self._waiting[tenant]
        return item


@dataclass(slots=True)
class _Count:
    kills: int
    last_s: float
    until_s: float


class Strikes:
    """Ended text processes of one version, by the tenant whose text ended them.

    One tenant's texts never suspend a version for the others; those of several tenants do.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def suspended_s(self, tenant: str, now_s: float) -> float:
        """Return for how long the tenant's texts are rejected; 0 when they are accepted."""
        if not self._counts:
            return 0.0
        left_s = [max(0.0, count.until_s - now_s) for count in self._counts.values()]
        if sum(1 for left in left_s if left) >= SUSPENDING_TENANTS:
            return max(left_s)
        mine = self._counts.get(tenant)
        return 0.0 if mine is None else max(0.0, mine.until_s - now_s)

    def killed(self, tenant: str, now_s: float) -> None:
        """Count a process that a text of the tenant ended."""
        self._counts = {name: count for name, count in self._counts.items() if now_s < count.last_s + CALM_S}
        count = self._counts.get(tenant)
        if count is None:
            if len(self._counts) >= MAX_TENANTS:
                del self._counts[min(self._counts, key=lambda name: self._counts[name].last_s)]
            count = self._counts[tenant] = _Count(0, now_s, 0.0)
        count.kills += 1
        count.last_s = now_s
        if count.kills > FREE_KILLS:
            count.until_s = now_s + min(MOST_S, FIRST_S * 2 ** (count.kills - FREE_KILLS - 1))
