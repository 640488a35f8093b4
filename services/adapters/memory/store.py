"""The fleet state in this process, for tests and the simulator: etcd's semantics without a server."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from services.adapters.commit_bounds import check_commit
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    Delete,
    Entry,
    KeyChanged,
    KeyRemoved,
    LeaseLost,
    Listing,
    ModRevisionIs,
    Operation,
    Put,
    ValueIs,
    WatchBatch,
)

_SMALLEST_LEASE_S: Final = 1


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    deadline_s: float
    keys: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Commit:
    revision: int
    events: tuple[KeyChanged | KeyRemoved, ...]


class MemoryStore:
    """``Store`` in one event loop; no threads, no tasks, nothing to close.

    Leases end by ``clock``: at the next call, or when a watch wakes for it. A watch waits on the event loop's
    time, so a test that advances its clock by hand has to make a call afterwards.
    """

    def __init__(self, clock: Clock, *, history: int = 10_000, bookmark_s: float = 2.0) -> None:
        """``history``: the number of past commits that watches can resume from. Older ones are compacted."""
        self._clock = clock
        self._history = history
        self._bookmark_s = bookmark_s
        self._revision = 1
        self._compacted = 0
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_end_s = math.inf  # no lease ends before; after a keep-alive it may be too early
        self._next_lease_id = 1
        self._log: deque[_Commit] = deque()
        self._changed = asyncio.Event()

    async def get(self, key: str) -> Entry | None:
        self._end_leases()
        return self._entries.get(key)

    async def list(self, prefix: str) -> Listing:
        self._end_leases()
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return Listing(self._revision, tuple(self._entries[key] for key in keys))

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        self._end_leases()
        check_commit(operations)
        if not all(self._holds(condition) for condition in conditions):
            return ConditionFailed(self._revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id and operation.lease_id not in self._leases:
                raise LeaseLost(f"lease {operation.lease_id:x} has ended")
        self._apply(operations)
        return Committed(self._revision)

    async def grant_lease(self, ttl_s: int) -> int:
        self._end_leases()
        lease_id, self._next_lease_id = self._next_lease_id, self._next_lease_id + 1
        ttl_s = max(ttl_s, _SMALLEST_LEASE_S)
        self._leases[lease_id] = lease = _Lease(ttl_s, self._clock.monotonic_s() + ttl_s)
        self._lease_end_s = min(self._lease_end_s, lease.deadline_s)
        self._wake()
        return lease_id

    async def keep_alive(self, lease_id: int) -> None:
        self._end_leases()
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseLost(f"lease {lease_id:x} has ended")
        lease.deadline_s = self._clock.monotonic_s() + lease.ttl_s

    async def revoke_lease(self, lease_id: int) -> None:
        self._end_leases()
        self._end_lease(lease_id)

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        seen = after_revision
        bookmark_due_s = self._clock.monotonic_s() + self._bookmark_s
        while True:
            self._end_leases()
            if seen < self._compacted:
                raise Compacted(f"the history before revision {self._compacted} is deleted")
            now_s = self._clock.monotonic_s()
            events = self._events(prefix, seen)
            due = now_s >= bookmark_due_s
            if events or due:
                bookmark_due_s = now_s + self._bookmark_s
            if self._revision >= seen:  # otherwise the reader has a revision that this store never had
                seen = self._revision
                if events or due:
                    yield WatchBatch(seen, events)
                    continue
            await self._wait_changed(bookmark_due_s - now_s)

    @property
    def compacted_revision(self) -> int:
        """Watches that resume from an earlier revision raise Compacted."""
        return self._compacted

    def compact(self, revision: int) -> None:
        """Drop the history up to a revision: watches that resume from before it raise Compacted."""
        self._compacted = max(self._compacted, min(revision, self._revision))
        while self._log and self._log[0].revision <= self._compacted:
            self._log.popleft()

    def check_integrity(self) -> None:
        for lease_id, lease in self._leases.items():
            for key in lease.keys:
                assert self._entries[key].lease_id == lease_id, "a lease names a key that is not under it"
        for entry in self._entries.values():
            assert entry.create_revision <= entry.mod_revision <= self._revision
            assert not entry.lease_id or entry.key in self._leases[entry.lease_id].keys
        assert all(self._lease_end_s <= lease.deadline_s for lease in self._leases.values())
        assert len(self._log) <= self._history, "the history is over its bound"

    def _holds(self, condition: Condition) -> bool:
        entry = self._entries.get(condition.key)
        if isinstance(condition, ValueIs):
            return entry is not None and entry.value == condition.value
        if entry is None:
            return condition.revision == 0
        found = entry.mod_revision if isinstance(condition, ModRevisionIs) else entry.create_revision
        return found == condition.revision

    def _apply(self, operations: Sequence[Operation]) -> None:
        """Apply all operations as one revision; no new revision when nothing changes, as in etcd."""
        revision = self._revision + 1
        events: list[KeyChanged | KeyRemoved] = []
        for operation in operations:
            old = self._entries.get(operation.key)
            if old is not None and old.lease_id in self._leases:
                self._leases[old.lease_id].keys.discard(old.key)
            if isinstance(operation, Put):
                created = old.create_revision if old is not None else revision
                entry = Entry(operation.key, operation.value, created, revision, operation.lease_id)
                self._entries[entry.key] = entry
                if entry.lease_id:
                    self._leases[entry.lease_id].keys.add(entry.key)
                events.append(KeyChanged(entry))
            elif old is not None:
                del self._entries[operation.key]
                events.append(KeyRemoved(operation.key, revision))
        if not events:
            return
        self._revision = revision
        self._log.append(_Commit(revision, tuple(events)))
        if len(self._log) > self._history:
            self._compacted = self._log.popleft().revision
        self._wake()

    def _end_leases(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._lease_end_s:
            return
        ended = [lease_id for lease_id, lease in self._leases.items() if lease.deadline_s <= now_s]
        for lease_id in sorted(ended, key=lambda i: (self._leases[i].deadline_s, i)):
            self._end_lease(lease_id)
        self._lease_end_s = min((lease.deadline_s for lease in self._leases.values()), default=math.inf)

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.keys:
            self._apply([Delete(key) for key in sorted(lease.keys)])

    def _events(self, prefix: str, after_revision: int) -> tuple[KeyChanged | KeyRemoved, ...]:
        newer = list(takewhile(lambda commit: commit.revision > after_revision, reversed(self._log)))
        return tuple(
            event for commit in reversed(newer) for event in commit.events if event.key.startswith(prefix)
        )

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_changed(self, at_most_s: float) -> None:
        """Wait for a commit, a new lease or the end of the next lease, at most ``at_most_s``."""
        now_s = self._clock.monotonic_s()
        lease_s = self._lease_end_s - now_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(at_most_s, lease_s))):
                await self._changed.wait()
