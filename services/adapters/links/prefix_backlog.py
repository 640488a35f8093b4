"""Prefix blocks that a worker's caches added or evicted and that the stream has not reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from services.core.fleet import PoolSnapshot

MAX_POOL_CHANGES: Final = 65536  # most changes of one kind and pool in one report
MAX_REPORT_CHANGES: Final = 131_072  # most changes of a whole report: 1 MiB on the wire
MAX_KEPT: Final = 1_048_576


class PrefixBacklog:
    """Changes by pool. A later change of a block replaces an earlier one.

    Bounded: beyond ``max_kept`` changes all are dropped, and ``overflowed`` holds until ``clear``. From then
    on only a full set describes the cache.
    """

    def __init__(
        self,
        *,
        max_pool_changes: int = MAX_POOL_CHANGES,
        max_report_changes: int = MAX_REPORT_CHANGES,
        max_kept: int = MAX_KEPT,
    ) -> None:
        self._max_pool_changes = max_pool_changes
        self._max_report_changes = max_report_changes
        self._max_kept = max_kept
        self._pools: dict[str, dict[int, bool]] = {}  # True: added; False: evicted
        self.overflowed = False

    def __len__(self) -> int:
        return sum(len(changes) for changes in self._pools.values())

    def clear(self) -> None:
        """Drop all changes. Called when a stream begins, whose first snapshot carries the full set."""
        self._pools.clear()
        self.overflowed = False

    def next_pools(self, pools: Iterable[PoolSnapshot]) -> tuple[PoolSnapshot, ...]:
        """Return the pools with the changes for this report: first those left over from earlier reports, then
        the pool's own, as far as they fit. The changes of a removed pool are dropped."""
        room = self._max_report_changes
        found: list[PoolSnapshot] = []
        kept: dict[str, dict[int, bool]] = {}
        for pool in pools:
            changes = self._pools.pop(pool.digest, None)
            if changes is None and len(pool.prefix_added) + len(pool.prefix_removed) <= min(
                room, self._max_pool_changes
            ):
                room -= len(pool.prefix_added) + len(pool.prefix_removed)
                found.append(pool)
                continue
            changes = _merged(changes if changes is not None else {}, pool)
            added, removed = self._take(changes, room)
            room -= len(added) + len(removed)
            found.append(replace(pool, prefix_added=added, prefix_removed=removed))
            if changes:
                kept[pool.digest] = changes
        self._pools = kept
        if len(self) > self._max_kept:
            self._pools.clear()
            self.overflowed = True
        return tuple(found)

    def _take(self, changes: dict[int, bool], room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Remove and return the oldest changes of a pool that fit."""
        names = tuple(islice(changes, min(room, self._max_pool_changes)))
        added = tuple(name for name in names if changes[name])
        removed = tuple(name for name in names if not changes[name])
        for name in names:
            del changes[name]
        return added, removed


def _merged(changes: dict[int, bool], pool: PoolSnapshot) -> dict[int, bool]:
    """Return the changes with the pool's newer ones at the end. A block in both lists was evicted, then
    added."""
    for came, names in ((False, pool.prefix_removed), (True, pool.prefix_added)):
        for name in names:
            changes.pop(name, None)
            changes[name] = came
    return changes
