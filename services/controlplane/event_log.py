"""Fleet events, stored for about an hour.

Every control plane follows the store revision by revision and writes the events of each revision under a name
made of the revision. The first entry stays; the second writer's commit finds it. So each event is written
once for any number of control planes, and survives its writer. Changes made while no control plane runs are
not recorded. After a compaction during an outage, the missed changes are recorded as one difference.

Bounds: ``MAX_EVENTS`` entries, the oldest are deleted first; a lifetime of ``KEEP_S``, by lease; a token
bucket of writes, and one event that reports how many events were dropped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import structlog

from services.controlplane.policy.events import FleetEvent, Observed, events_between, kind_of
from services.core.errors import FailedPrecondition, IntegrityError, StoreUnavailable
from services.core.paging import page_of
from services.core.records import EVENTS, ROOT, EventKind, EventRecord, dump
from services.core.token_bucket import TokenBucket
from services.ports.clock import Clock
from services.ports.store import (
    Compacted,
    Condition,
    Delete,
    Entry,
    KeyChanged,
    KeyRemoved,
    LeaseLost,
    ModRevisionIs,
    Put,
    Store,
)
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()

_ALONE: Final = WriteSet()
KEEP_S: Final = 3600
MAX_EVENTS: Final = 2000
MAX_PENDING: Final = 2000
WRITES_PER_S: Final = 20.0
BURST: Final = 500
_LEASE_FOR_S: Final = 300.0  # events written within this time share a lease
_PER_COMMIT: Final = 50
_TRIM_EVERY: Final = 100
_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """``name`` sorts by time and is unique."""

    name: str
    record: EventRecord


@dataclass(frozen=True, slots=True)
class Filter:
    """An empty filter matches every event."""

    kinds: frozenset[EventKind] = frozenset()
    resource: str = ""

    def takes(self, event: LoggedEvent) -> bool:
        return (not self.kinds or event.record.kind in self.kinds) and (
            not self.resource or event.record.resource == self.resource
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events of one revision. The first name shows whether the batch is already stored."""

    names: tuple[str, ...]
    records: tuple[EventRecord, ...]


@dataclass(slots=True)
class _Lease:
    lease_id: int = 0
    until_s: float = 0.0


@dataclass(slots=True)
class _State:
    """The store's state as of ``revision``; 0: nothing was read yet."""

    revision: int = 0
    records: dict[str, Observed] = field(default_factory=dict)


class EventRecorder:
    """Follows the store and writes events. ``run`` is the only writer of its state."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._state = _State()
        self._pending: deque[_Batch] = deque()
        self._bucket = TokenBucket(rate_per_s=WRITES_PER_S, burst=BURST)
        self._left_out = 0
        self._lease = _Lease()
        self._since_trim = _TRIM_EVERY  # trims once at the start

    @property
    def revision(self) -> int:
        """The revision up to which the store was followed; 0 before the first read."""
        return self._state.revision

    async def run(self) -> None:
        """Follow the store and write events until cancelled; survives a store outage."""
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                await self._follow()
            except Compacted:
                listed = False
            except (StoreUnavailable, LeaseLost) as error:
                log.info("events.store_lost", error=repr(error))
            await self._clock.sleep(_RETRY_S)

    async def record(self, events: Sequence[FleetEvent], revision: int, *, fence: Condition) -> None:
        """Write a leader's findings as of a revision. Writes nothing unless ``fence`` holds: the term lasts.

        Raises StoreUnavailable. Recovers from LeaseLost.
        """
        for one in events:
            await self.record_with((one,), revision, WriteSet((fence,)))

    async def record_with(self, events: Sequence[FleetEvent], revision: int, together: WriteSet) -> None:
        """Write a few findings as of a revision and ``together`` in one commit, or nothing if a condition
        fails. Raises as ``record`` does."""
        assert len(events) <= _PER_COMMIT
        names = tuple(f"{revision:016x}-p{_mark(one)}" for one in events)
        await self._write(_Batch(names, tuple(map(self._stored_event, events))), together)

    async def latest(self, reasons: Collection[str]) -> dict[str, str]:
        """Return, by resource, the last event among these reasons."""
        listing = await self._store.list(EVENTS)
        found: dict[str, str] = {}
        for event in (event_of(entry) for entry in listing.entries):
            if event is not None and event.record.reason in reasons:
                found[event.record.resource] = event.record.reason
        return found

    async def _list(self) -> None:
        listing = await self._store.list(ROOT)
        fresh = {e.key: record for e in listing.entries if (record := _decoded(e)) is not None}
        old = self._state
        if old.revision:
            changed = {key for key in {*fresh, *old.records} if fresh.get(key) != old.records.get(key)}
            self._note(events_between(old.records, fresh, tuple(changed)), listing.revision)
        self._state = _State(listing.revision, fresh)

    async def _follow(self) -> None:
        await self._write_pending()
        async with aclosing(self._store.watch(ROOT, self._state.revision)) as batches:
            async for batch in batches:
                for revision, events in _by_revision(batch.events):
                    self._apply(revision, events)
                self._state.revision = batch.revision
                await self._write_pending()

    def _apply(self, revision: int, events: Sequence[KeyChanged | KeyRemoved]) -> None:
        records = self._state.records
        before: dict[str, Observed] = {}
        changed: list[str] = []
        for event in events:
            key = event.key
            record = None if isinstance(event, KeyRemoved) else _decoded(event.entry)
            if key in records or record is not None:
                changed.append(key)
        if not changed:
            return
        before = dict(records)
        for event in events:
            if isinstance(event, KeyRemoved):
                records.pop(event.key, None)
            elif (record := _decoded(event.entry)) is not None:
                records[event.entry.key] = record
        self._note(events_between(before, records, tuple(changed)), revision)

    def _note(self, events: Sequence[FleetEvent], revision: int) -> None:
        """Queue events of a revision, as many as the rate allows."""
        if not events:
            return
        taken = self._bucket.take(len(events), self._clock.monotonic_s())
        self._left_out += len(events) - taken
        if len(self._pending) >= MAX_PENDING:
            self._left_out += len(self._pending.popleft().names)
        records = [self._stored_event(one) for one in events[:taken]]
        if self._left_out and taken:
            message = f"{self._left_out} events were left out: more happened than is kept"
            one = FleetEvent(EventKind.LEADER, "events", "EVENTS_LEFT_OUT", message, warning=True)
            records.append(self._stored_event(one))
            self._left_out = 0
        if records:
            names = tuple(f"{revision:016x}-{index:04x}" for index in range(len(records)))
            self._pending.append(_Batch(names, tuple(records)))

    async def _write_pending(self) -> None:
        while self._pending:
            await self._write(self._pending[0])
            self._pending.popleft()

    async def _write(self, batch: _Batch, together: WriteSet = _ALONE) -> None:
        """Write the events unless they are stored. This includes an earlier write whose answer was lost."""
        for start in range(0, len(batch.names), _PER_COMMIT):
            names = batch.names[start : start + _PER_COMMIT]
            records = batch.records[start : start + _PER_COMMIT]
            unwritten = [ModRevisionIs(EVENTS + names[0], 0), *together.conditions]
            try:
                lease_id = await self._lease_id()
                puts = [
                    Put(EVENTS + name, dump(one), lease_id) for name, one in zip(names, records, strict=True)
                ]
                await self._store.commit([*puts, *together.operations], unwritten)
            except LeaseLost:
                self._lease = _Lease()
                raise
            self._since_trim += len(names)
        if self._since_trim >= _TRIM_EVERY:
            self._since_trim = 0
            await self._trim()

    async def _lease_id(self) -> int:
        now_s = self._clock.monotonic_s()
        if not self._lease.lease_id or now_s >= self._lease.until_s:
            lease_id = await self._store.grant_lease(KEEP_S + round(_LEASE_FOR_S))
            self._lease = _Lease(lease_id, now_s + _LEASE_FOR_S)
        return self._lease.lease_id

    async def _trim(self) -> None:
        entries = (await self._store.list(EVENTS)).entries
        surplus = entries[: max(0, len(entries) - MAX_EVENTS)]
        for start in range(0, len(surplus), _PER_COMMIT):
            await self._store.commit([Delete(entry.key) for entry in surplus[start : start + _PER_COMMIT]])

    def _stored_event(self, one: FleetEvent) -> EventRecord:
        now_s = self._clock.unix_s()
        return EventRecord(now_s, one.kind, one.resource, one.reason, one.message, one.warning)


def _mark(event: FleetEvent) -> str:
    return hashlib.sha256(f"{event.kind}\0{event.resource}\0{event.reason}".encode()).hexdigest()[:8]


async def page_of_events(
    store: Store, wanted: Filter, *, size: int, token: str
) -> tuple[tuple[LoggedEvent, ...], str]:
    """Return a page of events, newest first, and the next page's token."""
    listing = await store.list(EVENTS)
    found = [event for entry in listing.entries if (event := event_of(entry)) is not None]
    newest_first = sorted(filter(wanted.takes, found), key=lambda event: event.name, reverse=True)
    return page_of(newest_first, lambda event: event.name, size=size, token=token, descending=True)


async def watch_events(
    store: Store, wanted: Filter, *, newest: int, after_revision: int
) -> AsyncGenerator[tuple[int, tuple[LoggedEvent, ...]], None]:
    """Yield (revision, events): unless resuming, the newest stored events, then every later one.

    An empty tuple is a keepalive. Raises FailedPrecondition when ``after_revision`` is too old.
    """
    if not after_revision:
        listing = await store.list(EVENTS)
        found = [event for entry in listing.entries if (event := event_of(entry)) is not None]
        kept = [event for event in found if wanted.takes(event)]
        yield listing.revision, tuple(kept[len(kept) - newest :] if newest < len(kept) else kept)
        after_revision = listing.revision
    try:
        async with aclosing(store.watch(EVENTS, after_revision)) as batches:
            async for batch in batches:
                new = (event_of(one.entry) for one in batch.events if isinstance(one, KeyChanged))
                matching = tuple(event for event in new if event is not None and wanted.takes(event))
                if matching or not batch.events:
                    yield batch.revision, matching
    except Compacted as exc:
        raise FailedPrecondition(
            f"revision {after_revision} is too old to resume from: watch again from 0",
            revision=after_revision,
        ) from exc


def event_of(entry: Entry) -> LoggedEvent | None:
    """Return the event of an entry, None for an unreadable entry."""
    try:
        return LoggedEvent(entry.key.removeprefix(EVENTS), entry.load(EventRecord))
    except IntegrityError as error:
        log.error("event.skipped", key=entry.key, error=error.message)
        return None


def _decoded(entry: Entry) -> Observed | None:
    kind = kind_of(entry.key)
    if kind is None:
        return None
    try:
        record: Observed = entry.load(kind)
    except IntegrityError as error:
        log.error("event.record_skipped", key=entry.key, error=error.message)
        return None
    return record


def _by_revision(
    events: Sequence[KeyChanged | KeyRemoved],
) -> list[tuple[int, list[KeyChanged | KeyRemoved]]]:
    """Group events by revision; they arrive in the store's order."""
    grouped: list[tuple[int, list[KeyChanged | KeyRemoved]]] = []
    for event in events:
        revision = event.mod_revision if isinstance(event, KeyRemoved) else event.entry.mod_revision
        if not grouped or grouped[-1][0] != revision:
            grouped.append((revision, []))
        grouped[-1][1].append(event)
    return grouped
