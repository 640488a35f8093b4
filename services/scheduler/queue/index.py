"""Indexes of the waiting placements over all versions: by tenant, for the limits, and by deadline.

Written by the queue that owns them. ``waiting`` is the queue's own index by (session, placement id): it
contains the placements that still wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.scheduler.queue.waiting import QueuedPlacement

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
    most entries are of this kind."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueuedPlacement]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: QueuedPlacement) -> None:
        heapq.heappush(self._heap, (item.deadline_s, item.number, item))

    def pop_due(
        self, now_s: float, waiting: Mapping[tuple[int, int], QueuedPlacement]
    ) -> QueuedPlacement | None:
        """Return a waiting placement whose deadline has passed, the earliest first; None without any."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, item = heapq.heappop(self._heap)
            if waiting.get((item.session, item.placement_id)) is item:
                return item
        return None

    def next_s(self, waiting: Mapping[tuple[int, int], QueuedPlacement]) -> float:
        """Return the first deadline of a waiting placement; infinite without any."""
        while self._heap:
            deadline_s, _, item = self._heap[0]
            if waiting.get((item.session, item.placement_id)) is item:
                return deadline_s
            heapq.heappop(self._heap)
        return math.inf

    def tidy(self, waiting: Mapping[tuple[int, int], QueuedPlacement]) -> None:
        """Remove ended placements when they are more than about half of the entries."""
        if len(self._heap) > _SPARE_ENTRIES + 2 * len(waiting):
            self._heap = [(found.deadline_s, found.number, found) for found in waiting.values()]
            heapq.heapify(self._heap)
