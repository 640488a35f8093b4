"""Fair order of the waiting placements of one pool, and limits on overtaking.

Between classes, the higher goes first. A class whose oldest placement has waited longer than its head start,
``class_head_start_s`` for each step below the highest waiting class, is entitled to a share,
``aged_share_ratio``, of all later grants, and is served first until it has received it. So no class starves,
whatever the load of higher classes, and a backlog of a lower class takes at most that share from a higher
one.

Within a class, the tenant with the least service (``fairness``) goes first; within a tenant, the earliest
deadline, then the first arrival. A placement without a deadline counts as having one ``NO_DEADLINE_S`` after
its arrival, so that it does not wait forever behind placements with deadlines.

Bypass: a placement without room does not block smaller ones behind it, but after ``max_bypasses`` of them it
gets a worker reserved: nothing behind it starts there until it has started. Sequences that end free the room
of that worker, and the placement fits an empty one, so its wait is bounded; other workers continue. Tenants
may pass a placement without room while they are at most ``bypass_window_tokens`` for each worker of the pool
ahead of its tenant (weighted tokens over weight).

Adding, granting and removing cost a few binary searches, for
any number of waiting tenants. Pure: time is an argument, in Unix microseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from services.core.records import Priority
from services.scheduler.policy.queue.fairness import Account, FairShares

CLASSES = tuple(sorted(Priority, key=lambda priority: -priority.rank))  # the highest first
MICROSECONDS = 1_000_000
NO_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """Settings of the order.

    ``lookahead``: how many placements without room a pass skips, ``tenant_lookahead`` how many of one tenant;
    they bound the work of a pass.
    """

    class_head_start_s: float = 30.0
    aged_share_ratio: float = 0.1
    max_bypasses: int = 16
    lookahead: int = 64
    tenant_lookahead: int = 16
    bypass_window_tokens: float = 32768.0

    def window_tokens(self, workers: int) -> float:
        """Return how far ahead a tenant may be that passes one without room, in a pool of that many
        workers."""
        return self.bypass_window_tokens * max(1, workers)


class FairItem(Protocol):
    """A waiting placement. ``due_us``: its deadline, or the default for it; ``arrival_us``: both Unix
    microseconds.

    It does not change while it waits.
    """

    @property
    def number(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def due_us(self) -> int: ...

    @property
    def arrival_us(self) -> int: ...


Item = TypeVar("Item", bound=FairItem)
Place = tuple[int, int, int]  # due, arrival, number


@dataclass(slots=True, eq=False)
class _Tenant(Generic[Item]):
    """Waiting placements of one tenant in a class, earliest deadline first."""

    account: Account
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Class(Generic[Item]):
    """One class. ``owed_tokens``: tokens to grant to the class before higher classes continue."""

    shares: FairShares
    tenants: dict[str, _Tenant[Item]] = field(default_factory=dict)
    members: dict[int, Item] = field(default_factory=dict)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    owed_tokens: float = 0.0

    def oldest_us(self) -> int:
        """Return the arrival of the oldest item. The class is not empty."""
        while self.arrivals[0][1] not in self.members:
            heapq.heappop(self.arrivals)
        return self.arrivals[0][0]


class FairOrder(Generic[Item]):
    """The waiting placements of one pool. Single writer.

    The counters outlive the queue: ``shares`` are passed in and written here.
    """

    def __init__(self, policy: OrderPolicy, shares: dict[Priority, FairShares]) -> None:
        self._policy = policy
        self._classes: dict[Priority, _Class[Item]] = {
            priority: _Class(shares[priority]) for priority in CLASSES
        }
        self._aged: tuple[Priority, ...] = ()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, priority: Priority) -> int:
        return len(self._classes[priority].members)

    def add(self, item: Item) -> None:
        queue = self._classes[item.priority]
        account = queue.shares.enter(item.tenant, item.weight)
        tenant = queue.tenants.get(item.tenant)
        if tenant is None:
            tenant = queue.tenants[item.tenant] = _Tenant(account)
        insort(tenant.places, (item.due_us, item.arrival_us, item.number))
        queue.members[item.number] = item
        self._count += 1
        heapq.heappush(queue.arrivals, (item.arrival_us, item.number))

    def discard(self, item: Item) -> None:
        """Remove the item; KeyError if it is not present."""
        queue = self._classes[item.priority]
        if queue.members.get(item.number) is not item:
            raise KeyError(item.number)
        del queue.members[item.number]
        self._count -= 1
        tenant = queue.tenants[item.tenant]
        del tenant.places[bisect_left(tenant.places, (item.due_us, item.arrival_us, item.number))]
        if not tenant.places:
            del queue.tenants[item.tenant]
        queue.shares.leave(tenant.account)
        if len(queue.arrivals) > 64 + 2 * len(queue.members):  # most have left
            queue.arrivals = [(found.arrival_us, found.number) for found in queue.members.values()]
            heapq.heapify(queue.arrivals)
        if not queue.members:
            queue.owed_tokens = 0.0

    def granted(self, item: Item, cost_tokens: float) -> None:
        """Charge a grant of the item, which is still queued, at its expected cost.

        Classes past their head start become entitled to a share of it.
        """
        rank = item.priority.rank
        for priority in self._aged:
            queue = self._classes[priority]
            if priority.rank < rank and queue.members:
                queue.owed_tokens += self._policy.aged_share_ratio * cost_tokens
        own = self._classes[item.priority]
        if own.owed_tokens > 0.0:
            own.owed_tokens -= cost_tokens

    def value(self, item: Item) -> float:
        """Return the counter of the item's tenant in its class: weighted tokens over weight.

        The tenant has an item waiting.
        """
        return self._classes[item.priority].tenants[item.tenant].account.value

    def items(self) -> Iterator[Item]:
        """Yield all, in approximate serving order."""
        for queue in self._classes.values():
            for account in queue.shares.in_order():
                for _, _, number in queue.tenants[account.tenant].places:
                    yield queue.members[number]

    def in_order(self, now_us: int = 0) -> Iterator[Item]:
        """Yield by least counter within each class; the class is chosen again for each item.

        May end early to bound the work. The item yielded last may be granted and removed meanwhile.
        """
        self._aged = self._find_aged(now_us)
        passes = {
            priority: self._in_class(queue) for priority, queue in self._classes.items() if queue.members
        }
        while passes:
            turn = next(
                (priority for priority in reversed(passes) if self._is_owed(priority)), next(iter(passes))
            )
            item = next(passes[turn], None)
            if item is None:
                del passes[turn]
            else:
                yield item

    # --- inside -----------------------------------------------------------------------------------

    def _in_class(self, queue: _Class[Item]) -> Iterator[Item]:
        """Yield each item once: an item without room stays without, because room only decreases in a pass."""
        index = 0
        passed: dict[str, int] = {}
        while (account := queue.shares.at(index)) is not None:
            places = queue.tenants[account.tenant].places
            skip = passed.get(account.tenant, 0)
            if skip >= min(len(places), self._policy.tenant_lookahead):
                index += 1
                continue
            item = queue.members[places[skip][2]]
            yield item
            if item.number in queue.members:
                passed[account.tenant] = skip + 1

    def _find_aged(self, now_us: int) -> tuple[Priority, ...]:
        """Return the classes whose oldest item has waited longer than the head start over the highest waiting
        class."""
        waiting = [priority for priority, queue in self._classes.items() if queue.members]
        aged: list[Priority] = []
        for priority in waiting[1:]:
            steps = waiting[0].rank - priority.rank
            head_start_us = round(steps * self._policy.class_head_start_s * MICROSECONDS)
            if self._classes[priority].oldest_us() + head_start_us < now_us:
                aged.append(priority)
        return tuple(aged)

    def _is_owed(self, priority: Priority) -> bool:
        return priority in self._aged and self._classes[priority].owed_tokens > 0.0
