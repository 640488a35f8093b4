"""Which tenant's item is next: one of each tenant in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TenantRoundRobin(Generic[Item]):
    """Waiting items, by tenant. Each tenant's items are taken in order; a served tenant moves to the end."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, item: Item) -> None:
        items = self._waiting.get(tenant)
        if items is None:
            items = self._waiting[tenant] = OrderedDict()
        items[item] = None

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
        for tenant in self._waiting:
            if tenant not in busy:
                return tenant
        return None

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
