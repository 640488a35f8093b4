"""Indexes of the waiting placements by gateway, version, tenant and deadline, and for the limits.

Written by the queue that owns them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import QueueFull, ShareExceeded
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.policy.overload.rates import MAX_WAIT_S, MIN_WAIT_S, DrainRate
from services.scheduler.policy.queue.order import OrderPolicy
from services.scheduler.queue.pool import Pool, QueueLimits
from services.scheduler.queue.refusals import queue_full, share_full
from services.scheduler.queue.rules import QueueDiscipline
from services.scheduler.queue.service_ledger import ServiceLedger
from services.scheduler.queue.waiting import QueuedPlacement

Key = tuple[int, int]  # gateway session, placement id

_SPARE_ENTRIES: Final = 64


@dataclass(slots=True)
class TenantQueued:
    """Waiting placements of one tenant, over all versions."""

    count: int = 0
    size_bytes: int = 0


_NO_SHARE: Final = TenantQueued()  # never written to


class TenantShares:
    """The shares of the tenants with waiting placements."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantQueued] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def of(self, tenant: str) -> TenantQueued:
        """Return the tenant's share. Read only."""
        return self._shares.get(tenant, _NO_SHARE)

    def add(self, item: QueuedPlacement) -> None:
        share = self._shares.get(item.spec.tenant_id)
        if share is None:
            share = self._shares[item.spec.tenant_id] = TenantQueued()
        share.count += 1
        share.size_bytes += item.size_bytes

    def remove(self, item: QueuedPlacement) -> None:
        share = self._shares[item.spec.tenant_id]
        share.count -= 1
        share.size_bytes -= item.size_bytes
        if not share.count:
            del self._shares[item.spec.tenant_id]

    def check_integrity(self, queued: Sequence[QueuedPlacement]) -> None:
        """Raise AssertionError when the shares are not those of what is queued."""
        for tenant, share in self._shares.items():
            mine = [item for item in queued if item.spec.tenant_id == tenant]
            assert share.count == len(mine) > 0, "a tenant's share is miscounted"
            assert share.size_bytes == sum(item.size_bytes for item in mine)
        assert sum(share.count for share in self._shares.values()) == len(queued)


class Deadlines:
    """Waiting placements by deadline. One that ended otherwise is dropped when its deadline is read, or when
    most entries are of this kind. ``waiting``: the placements that still wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueuedPlacement]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: QueuedPlacement) -> None:
        heapq.heappush(self._heap, (item.deadline_s, item.number, item))

    def pop_due(self, now_s: float, waiting: Mapping[Key, QueuedPlacement]) -> QueuedPlacement | None:
        """Return a waiting placement whose deadline has passed, the earliest first; None without any."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, item = heapq.heappop(self._heap)
            if waiting.get((item.session, item.placement_id)) is item:
                return item
        return None

    def next_s(self, waiting: Mapping[Key, QueuedPlacement]) -> float:
        """Return the first deadline of a waiting placement; infinite without any."""
        while self._heap:
            deadline_s, _, item = self._heap[0]
            if waiting.get((item.session, item.placement_id)) is item:
                return deadline_s
            heapq.heappop(self._heap)
        return math.inf

    def tidy(self, waiting: Mapping[Key, QueuedPlacement]) -> None:
        """Remove ended placements when they are more than about half of the entries."""
        if len(self._heap) > _SPARE_ENTRIES + 2 * len(waiting):
            self._heap = [(found.deadline_s, found.number, found) for found in waiting.values()]
            heapq.heapify(self._heap)


class QueueIndex:
    """All waiting placements of a term, and the limits on them."""

    def __init__(
        self,
        limits: QueueLimits,
        order: OrderPolicy,
        discipline: QueueDiscipline,
        ledger: ServiceLedger,
        predicted_s: Callable[[str, Priority, float], float | None],
    ) -> None:
        """``predicted_s``: ``QueueGate.wait_s``."""
        self._predicted_s = predicted_s
        self._limits = limits
        self._order = order
        self._discipline = discipline
        self._ledger = ledger
        self._pools: dict[str, Pool] = {}
        self._items: dict[Key, QueuedPlacement] = {}
        self._deadlines = Deadlines()
        self._tenants = TenantShares()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def get(self, key: Key) -> QueuedPlacement | None:
        return self._items.get(key)

    def of_session(self, session: int) -> list[QueuedPlacement]:
        """Return the placements of one gateway."""
        return [item for key, item in self._items.items() if key[0] == session]

    def pool(self, digest: str) -> Pool | None:
        """Return the queue of a version, None when nothing waited for it lately."""
        return self._pools.get(digest)

    def by_version(self) -> dict[str, list[QueuedPlacement]]:
        """Return the placements by version, in approximate order of the pass."""
        return {digest: list(pool.order.items()) for digest, pool in self._pools.items()}

    def of_version(self, digest: str) -> Iterator[QueuedPlacement]:
        """Yield the placements of a version. None may enter or leave meanwhile."""
        pool = self._pools.get(digest)
        if pool is not None:
            yield from pool.order.items()

    def add(self, item: QueuedPlacement) -> None:
        self._items[item.session, item.placement_id] = item
        pool = self._pool_for(item.spec.version_digest)
        pool.order.add(item)
        pool.count(item, 1)
        self._tenants.add(item)
        self._deadlines.add(item)

    def remove(self, item: QueuedPlacement) -> None:
        """Remove the placement. Its pool stays until ``drop_empty``."""
        del self._items[item.session, item.placement_id]
        pool = self._pools[item.spec.version_digest]
        pool.order.discard(item)
        pool.count(item, -1)
        pool.earmarks.release(item)
        self._tenants.remove(item)
        self._deadlines.tidy(self._items)

    def drop_empty(self, digest: str) -> None:
        """Remove the pool of the version if nothing waits in it."""
        pool = self._pools.get(digest)
        if pool is not None and not len(pool.order):
            del self._pools[digest]

    def pop_due(self, now_s: float) -> QueuedPlacement | None:
        """Return a placement whose deadline has passed, the earliest first; None without any."""
        return self._deadlines.pop_due(now_s, self._items)

    def next_deadline_s(self) -> float:
        """Return the first deadline; infinite without any."""
        return self._deadlines.next_s(self._items)

    def predicted_wait_s(self, digest: str, priority: Priority, now_s: float) -> float | None:
        """Return the wait behind a class and the higher ones, which refusals and operators' views state.

        Before the tokens per second are known it is that of the whole queue; None without recent grants.
        """
        pool, found_s = self._pools.get(digest), self._predicted_s(digest, priority, now_s)
        if found_s is not None or pool is None:
            return found_s
        return pool.rate.drain_s(len(pool.order), now_s)

    def later_s(self, spec: PlaceSpec, now_s: float) -> float:
        """Return after how long a client should send its request again."""
        found_s = self.predicted_wait_s(spec.version_digest, spec.priority, now_s)
        if found_s is None:
            return MIN_WAIT_S if spec.version_digest not in self._pools else MAX_WAIT_S
        return min(MAX_WAIT_S, max(MIN_WAIT_S, found_s))

    def over_limit(self, spec: PlaceSpec, size_bytes: int, now_s: float) -> QueueFull | ShareExceeded | None:
        """Return the refusal by the first exceeded limit. The tenant's own limits come first."""
        pool = self._pools.get(spec.version_digest)
        share = self._tenants.of(spec.tenant_id)
        queued = 0 if pool is None else len(pool.order)
        limits = self._limits
        if share.count >= limits.max_per_tenant:
            what, most = f"{share.count} placements", limits.max_per_tenant
        elif share.size_bytes + size_bytes > limits.max_bytes_per_tenant:
            what, most = f"{share.size_bytes} bytes of placements", limits.max_bytes_per_tenant
        elif queued >= limits.max_per_pool:
            what, most = f"the queue of {spec.model} is full, with {queued} placements", 0
        elif len(self._items) >= limits.max_total:
            what, most = f"the scheduler's queues are full, with {len(self._items)} placements", 0
        else:
            return None
        later_s = self.later_s(spec, now_s)
        if most:
            return share_full(what, most, model=spec.model, retry_after_s=later_s)
        return queue_full(what, model=spec.model, retry_after_s=later_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry is in one index only or a share is miscounted."""
        queued = [item for pool in self._pools.values() for item in pool.order.items()]
        assert len(queued) == len(self._items) == sum(len(pool.order) for pool in self._pools.values())
        assert all(self._items[item.session, item.placement_id] is item for item in queued)
        assert len(self._items) <= len(self._deadlines), "a placement has no deadline"
        self._tenants.check_integrity(queued)
        assert all(item.bypassed <= self._order.max_bypasses for item in queued), "bypassed too often"
        for pool in self._pools.values():
            pool.check_integrity()

    def _pool_for(self, digest: str) -> Pool:
        pool = self._pools.get(digest)
        if pool is None or not len(pool.order):
            order = self._discipline.order(self._order, self._ledger.shares(digest))
            pool = self._pools[digest] = Pool(order, DrainRate() if pool is None else pool.rate)
        return pool
