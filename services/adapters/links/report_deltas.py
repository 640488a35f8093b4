"""Deltas of a worker's reports that no leader has confirmed yet. Pure; ``Reporter`` drives it.

A snapshot moves its deltas here. They stay until an answer confirms the report that carried them. When the
stream breaks, the unconfirmed deltas go into the first reports of the next stream. Tokens and final usage
records are sent again as they were: those of one report in one report, under the same number, so that a
leader that already applied them can detect the repeat. All grants seen are sent together. Prefix blocks are
the exception: the first report of a stream carries all cached blocks, so earlier changes are dropped.

A report has bounds. What does not fit goes into the next one. Beyond the bounds here, the oldest entries are
dropped. Dropped usage records are counted in ``usage_dropped``, dropped tokens of tenants in
``tokens_dropped``. Dropped prefix changes end the stream (``overflowed``), so that the next one begins with
the full set. This takes many streams with a leader that answers no report, or tens of thousands of tenants on
one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage, TenantTokens
from services.core.records import Priority

MAX_SEEN: Final = 65536
MAX_TENANTS: Final = 4096
MAX_USAGE: Final = 4096
MAX_USAGE_KEPT: Final = 65536
MAX_TENANTS_KEPT: Final = 65536  # entries: a tenant has one for each version and class

TenantKey = tuple[str, str, Priority]
Counts = tuple[int, int, int, int, int]
_NONE: Final[Counts] = (0, 0, 0, 0, 0)
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


@dataclass(slots=True)
class Deltas:
    """Grants seen of one epoch; counts (prefill, output, cached, rows, device time) by tenant, version and
    class; the final usage record of each sequence by request id and choice, the oldest first. ``number``
    identifies both."""

    epoch: int = 0
    number: int = 0
    seen: dict[int, None] = field(default_factory=dict)
    tokens: dict[TenantKey, Counts] = field(default_factory=dict)
    usage: dict[tuple[str, int], SequenceUsage] = field(default_factory=dict)

    @staticmethod
    def of(snapshot: ReportSnapshot) -> Deltas:
        found = Deltas(snapshot.epoch, seen=dict.fromkeys(snapshot.grants_seen))
        for use in snapshot.tenants:
            counts = use.prefill, use.output, use.cached, use.rows, use.device_us
            found.add_tokens((use.tenant, use.digest, use.priority), counts)
        for word in snapshot.usage:
            found.add_usage(word)
        return found

    def add_tokens(self, key: TenantKey, counts: Counts) -> None:
        had = self.tokens.get(key, _NONE)
        self.tokens[key] = (
            had[0] + counts[0],
            had[1] + counts[1],
            had[2] + counts[2],
            had[3] + counts[3],
            had[4] + counts[4],
        )

    def add_usage(self, word: SequenceUsage) -> None:
        key = word.request_id, word.choice
        self.usage.pop(key, None)
        self.usage[key] = word

    def add(self, other: Deltas) -> None:
        """Add the newer deltas of ``other``. Drops grants of an older epoch, whose leader no longer leads."""
        self.add_seen(other)
        for key, tokens in other.tokens.items():
            self.add_tokens(key, tokens)
        for word in other.usage.values():
            self.add_usage(word)

    def add_seen(self, other: Deltas) -> None:
        if other.epoch > self.epoch:
            self.epoch, self.seen = other.epoch, {}
        if other.epoch == self.epoch:
            self.seen.update(other.seen)

    def split_seen(self, max_seen: int) -> dict[int, None]:
        """Remove and return as many grants as fit into one report."""
        return {number: self.seen.pop(number) for number in tuple(islice(self.seen, max_seen))}

    def split(self, max_tenants: int, max_usage: int) -> Deltas:
        """Remove and return the tokens and usage records that fit into one report."""
        fits = Deltas()
        for key in tuple(islice(self.tokens, max_tenants)):
            fits.tokens[key] = self.tokens.pop(key)
        for name in tuple(islice(self.usage, max_usage)):
            fits.usage[name] = self.usage.pop(name)
        return fits


class DeltaKeeper:
    """Unconfirmed deltas of one worker. Its owner bounds the reports in flight by waiting for answers, which
    also bounds the deltas to send again."""

    def __init__(
        self,
        *,
        max_seen: int = MAX_SEEN,
        max_tenants: int = MAX_TENANTS,
        max_usage: int = MAX_USAGE,
        max_usage_kept: int = MAX_USAGE_KEPT,
        max_tenants_kept: int = MAX_TENANTS_KEPT,
        prefixes: PrefixBacklog | None = None,
    ) -> None:
        self._max_seen = max_seen
        self._max_tenants = max_tenants
        self._max_usage = max_usage
        self._max_usage_kept = max_usage_kept
        self._max_tenants_kept = max_tenants_kept
        self._prefixes = prefixes if prefixes is not None else PrefixBacklog()
        self._unconfirmed: deque[tuple[int, Deltas]] = deque()
        self._again: deque[Deltas] = deque()  # the oldest first; their grants are in ``_carried``
        self._carried = Deltas()
        self._deltas_number = 0
        self._number = 0
        self.usage_dropped = 0
        self.tokens_dropped = 0

    @property
    def unconfirmed(self) -> int:
        """Number of reports of this stream without an answer."""
        return len(self._unconfirmed)

    @property
    def behind(self) -> bool:
        """The next report repeats deltas that an earlier stream left unconfirmed."""
        return bool(self._again)

    @property
    def first(self) -> bool:
        """The next report is the first of its stream, which needs a full snapshot."""
        return self._number == 0

    @property
    def overflowed(self) -> bool:
        """Prefix changes were dropped: this stream can no longer describe the cache to its leader."""
        return self._prefixes.overflowed

    def stream_opened(self) -> None:
        """Start a stream. Deltas that the previous one left unconfirmed go first."""
        seen = Deltas()
        for _, deltas in self._unconfirmed:
            seen.add_seen(deltas)
        seen.add_seen(self._carried)
        self._carried.epoch, self._carried.seen = seen.epoch, seen.seen
        left = (deltas for _, deltas in self._unconfirmed if deltas.tokens or deltas.usage)
        self._again.extendleft(reversed(list(left)))
        self._unconfirmed.clear()
        self._prefixes.clear()
        self._number = 0

    def keep(self, snapshot: ReportSnapshot) -> None:
        """Store the deltas of a snapshot that is not sent. It has to be the first of its stream."""
        assert self.first, "prefix changes of a snapshot that is not sent are lost"
        self._carry(snapshot)

    def next_report(self, snapshot: ReportSnapshot) -> tuple[int, ReportSnapshot]:
        """Return the number of the next report and the snapshot with the deltas for that report."""
        self._number += 1
        self._carry(snapshot)
        if self._again:
            deltas = self._again.popleft()
        else:
            deltas = self._carried.split(self._max_tenants, self._max_usage)
            if deltas.tokens or deltas.usage:
                self._deltas_number += 1
                deltas.number = self._deltas_number
        deltas.epoch, deltas.seen = self._carried.epoch, self._carried.split_seen(self._max_seen)
        self._unconfirmed.append((self._number, deltas))
        return self._number, replace(
            snapshot,
            pools=self._prefixes.next_pools(snapshot.pools),
            grants_seen=tuple(deltas.seen),
            tenants=tuple(_tokens(key, tokens) for key, tokens in deltas.tokens.items()),
            usage=tuple(deltas.usage.values()),
            deltas_number=deltas.number,
        )

    def drop_unconfirmed(self) -> None:
        """Drop and count what earlier streams left unconfirmed: no leader takes it."""
        for deltas in (*self._again, *(deltas for _, deltas in self._unconfirmed)):
            self.usage_dropped += len(deltas.usage)
            self.tokens_dropped += sum(prefill + output for prefill, output, *_ in deltas.tokens.values())
        self._again.clear()
        self._unconfirmed.clear()

    def confirm(self, number: int) -> bool:
        """Drop the deltas of reports up to ``number``; return whether there were any."""
        before = len(self._unconfirmed)
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            self._unconfirmed.popleft()
        return len(self._unconfirmed) < before

    def _carry(self, snapshot: ReportSnapshot) -> None:
        self._carried.add(Deltas.of(snapshot))
        self._bound_carried()

    def _bound_carried(self) -> None:
        usage, tokens = self._carried.usage, self._carried.tokens
        while len(usage) > self._max_usage_kept:
            del usage[next(iter(usage))]
            self.usage_dropped += 1
        while len(tokens) > self._max_tenants_kept:
            prefill, output, *_ = tokens.pop(next(iter(tokens)))
            self.tokens_dropped += prefill + output


def _tokens(key: TenantKey, counts: Counts) -> TenantTokens:
    tenant, digest, priority = key
    prefill, output, cached, rows, device_us = counts
    return TenantTokens(tenant, digest, prefill, output, priority, cached, rows, device_us)
