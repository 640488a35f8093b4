"""One walk over a pool's queue: the skipped placements, and the workers closed to those behind them.

Two rules, both for workers that the placement in front may use:
- A worker that is earmarked for a placement takes nothing that is behind it in order.
- A tenant takes nothing while it is ahead of a tenant whose placement waits for room by more than the window:
  the service of two tenants stays within the bound of ``fairness``, however the sizes of their requests
  differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from services.core.records import Priority
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, may_use
from services.scheduler.policy.placement.choose import NoWorker
from services.scheduler.policy.queue.order import OrderPolicy
from services.scheduler.queue.waiting import Earmarks, QueuedPlacement


class QueueWalk:
    """State of one pass. ``candidates`` is the live mapping of the pool."""

    def __init__(self, earmarks: Earmarks, candidates: Mapping[str, Candidate], policy: OrderPolicy) -> None:
        self._earmarks = earmarks
        self._candidates = candidates
        self._policy = policy
        self._window = policy.window_tokens(len(candidates))
        self._passed: list[QueuedPlacement] = []
        self._closed: dict[str, None] = {}
        self._held: dict[Priority, tuple[float, QueuedPlacement]] = {}
        self._usable: dict[Priority, tuple[str, ...]] = {}
        self.skipped = 0

    def query(self, item: QueuedPlacement, value: float) -> PlaceQuery:
        """Return the query with the workers open to the placement; its own query when nothing restricts
        it."""
        shut = list(self._closed)
        held = self._held.get(item.priority)
        if held is not None and value > held[0] + self._window:
            shut += self._usable_by(held[1])
        if not shut:
            return item.query
        return replace(item.query, excluded_workers=(*item.query.excluded_workers, *dict.fromkeys(shut)))

    def pass_by(self, item: QueuedPlacement, found: NoWorker, value: float, *, restricted: bool) -> None:
        """Skip a placement: it stays in the queue, and those behind it are tried."""
        self.skipped += 1
        if not found.waits_for_room and not restricted:
            return  # it waits for no room, so others cannot take its room
        self._passed.append(item)
        if item.priority not in self._held and self._policy.kind == "fair":
            self._held[item.priority] = value, item
        if item.bypassed >= self._policy.max_bypasses:
            self._protect(item)

    def granted(self, worker_id: str) -> None:
        """Count a grant on this worker for the skipped placements that may use it."""
        if not self._passed:
            return  # the usual case: the changed candidate need not be built again
        candidate = self._candidates[worker_id]
        for item in self._passed:
            if item.earmark is None and may_use(item.query, candidate):
                item.bypassed = min(item.bypassed + 1, self._policy.max_bypasses)
                if item.bypassed >= self._policy.max_bypasses:
                    self._protect(item)

    def _usable_by(self, item: QueuedPlacement) -> tuple[str, ...]:
        """Return the workers that the first of its class without room may use."""
        found = self._usable.get(item.priority)
        if found is None:
            found = self._usable[item.priority] = tuple(
                worker_id
                for worker_id, candidate in self._candidates.items()
                if may_use(item.query, candidate)
            )
        return found

    def _protect(self, item: QueuedPlacement) -> None:
        self._earmarks.give(item, self._candidates)
        if item.earmark is not None:
            self._closed[item.earmark] = None
