"""In which order a pool's waiting placements are tried, and how far one may overtake another.

Order: a class has a head start of ``class_head_start_s`` over the class below it, then original arrival
counts. So classes are strict among requests that arrived within that time of each other, and a waiting
request ages: nothing that arrives later than its head start allows goes before it, so none starves.

Bypass: a placement that has no room does not hold up smaller ones behind it, but after ``max_bypasses``
of them nothing behind it is tried until it is served. Room is then set free by sequences that end, and
the placement fits an empty pool, so its wait is bounded.

``QueueOrder`` is the seam for another order, such as fairness between tenants: the flow queue asks for
``in_order`` and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.core.records import Priority

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """``lookahead``: how many placements without room a pass looks past; bounds the work of a pass."""

    class_head_start_s: float = 30.0
    max_bypasses: int = 16
    lookahead: int = 64


def order_key(priority: Priority, arrival_unix_us: int, policy: OrderPolicy) -> int:
    """Return the instant, in microseconds, that orders the placement: the smaller goes first."""
    behind = Priority.INTERACTIVE.rank - priority.rank
    return arrival_unix_us + round(behind * policy.class_head_start_s * MICROSECONDS)


class Ordered(Protocol):
    """``key`` and ``number`` never change; ``number`` is unique and grows with submission."""

    @property
    def key(self) -> int: ...

    @property
    def number(self) -> int: ...


Item = TypeVar("Item", bound=Ordered)


class QueueOrder(Protocol[Item]):
    """The waiting placements of one pool."""

    def add(self, item: Item) -> None: ...

    def discard(self, item: Item) -> None: ...

    def in_order(self) -> Iterator[Item]:
        """Yield the next to be served, first to last. The item yielded last may be discarded meanwhile."""

    def __len__(self) -> int: ...


class ArrivalOrder(QueueOrder[Item]):
    """Sorted by ``key``, then submission. Adding and discarding cost a binary search and a memmove."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        insort(self._items, item, key=_sort_key)

    def discard(self, item: Item) -> None:
        """Forget the item; KeyError if it is not there."""
        index = bisect_left(self._items, _sort_key(item), key=_sort_key)
        if index == len(self._items) or self._items[index] is not item:
            raise KeyError(item.number)
        del self._items[index]

    def in_order(self) -> Iterator[Item]:
        index = 0
        while index < len(self._items):
            item = self._items[index]
            yield item
            if index < len(self._items) and self._items[index] is item:
                index += 1


def _sort_key(item: Ordered) -> tuple[int, int]:
    return item.key, item.number
