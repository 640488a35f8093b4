"""Turns between tenants: one of each, in the order in which they came."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items that wait, by tenant. Each tenant's are taken in order; a tenant that had a turn comes last."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, item: Item) -> None:
        self._waiting.setdefault(tenant, OrderedDict())[item] = None

    def add_first(self, tenant: str, item: Item) -> None:
        """Add an item that had its turn already, before all others."""
        self.add(tenant, item)
        self._waiting[tenant].move_to_end(item, last=False)
        self._waiting.move_to_end(tenant, last=False)

    def discard(self, tenant: str, item: Item) -> None:
        """Remove an item that may wait."""
        items = self._waiting.get(tenant)
        if items is not None:
            items.pop(item, None)
            if not items:
                del self._waiting[tenant]

    def next_tenant(self, busy: Container[str]) -> str | None:
        """Return whose turn it is among those that are not ``busy``."""
        return next((tenant for tenant in self._waiting if tenant not in busy), None)

    def take(self, busy: Container[str]) -> Item | None:
        """Remove and return the item whose turn it is."""
        tenant = self.next_tenant(busy)
        if tenant is None:
            return None
        items = self._waiting[tenant]
        item, _ = items.popitem(last=False)
        self._waiting.move_to_end(tenant)
        if not items:
            del self._waiting[tenant]
        return item
