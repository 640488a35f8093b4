"""A view of all records under a prefix of the store, kept current by one task.

It lists, then watches from that revision. After a broken connection it resumes from the last revision seen;
when that history is compacted it lists again. The view moves between whole revisions and never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

import structlog

from services.core.backoff import Backoff
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import Compacted, Entry, KeyRemoved, Store, WatchBatch

log = structlog.get_logger()
Record = TypeVar("Record")
_FIRST_BACKOFF_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Versioned(Generic[Record]):
    record: Record
    create_revision: int
    mod_revision: int


class RecordView(Protocol[Record]):
    """The readers' interface of an ``Informer``; tests use a dictionary."""

    @property
    def view(self) -> Mapping[str, Versioned[Record]]:
        """The records by full store key. Immutable: a later change makes a new mapping."""


class Informer(Generic[Record]):
    """Owner of one view. ``run`` is its only writer. Readers use ``view`` and never wait for the store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[Entry], Record],
        clock: Clock,
        *,
        on_change: Callable[[str, Versioned[Record] | None], None] | None = None,
        max_backoff_s: float = 2.0,
        rng: random.Random | None = None,
    ) -> None:
        """``on_change(key, record or None)`` is called in the event loop for each change, in the store's
        order, once the view contains it; after a re-list, for each difference. It must not block or raise."""
        self._store = store
        self._prefix = prefix
        self._decode = decode
        self._clock = clock
        self._on_change = on_change
        self._backoff = Backoff(_FIRST_BACKOFF_S, max_backoff_s)
        self._rng = rng if rng is not None else random.Random()
        self._view: Mapping[str, Versioned[Record]] = MappingProxyType({})
        self._revision = 0
        self._changed_revision = 0
        self._confirmed_s: float | None = None
        self._advanced = asyncio.Event()
        self.lists = 0
        self.unreadable: set[str] = set()  # keys whose stored record could not be decoded

    @property
    def prefix(self) -> str:
        return self._prefix

    @property
    def view(self) -> Mapping[str, Versioned[Record]]:
        """The records by full store key, as of ``revision``. Immutable: a change makes a new mapping."""
        return self._view

    @property
    def revision(self) -> int:
        """The store revision of the view; 0 before the first list."""
        return self._revision

    @property
    def synced(self) -> bool:
        return self._confirmed_s is not None

    def age_s(self) -> float:
        """Return seconds since the store last confirmed the view; infinite before the first list."""
        if self._confirmed_s is None:
            return float("inf")
        return self._clock.monotonic_s() - self._confirmed_s

    async def wait_synced(self, timeout_s: float) -> None:
        """Return once the first list is done. Raises StoreUnavailable after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.synced:
                    await self._advanced.wait()
        if not self.synced:
            raise StoreUnavailable(f"{self._prefix} could not be read within {timeout_s:g} s")

    async def wait_changed(self, after_revision: int, timeout_s: float) -> bool:
        """Return True once the view changed after a revision, False after ``timeout_s``.

        A caller reads ``revision`` and ``view`` together, without an await between, and passes that revision.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._changed_revision <= after_revision:
                    await self._advanced.wait()
        return self._changed_revision > after_revision

    async def run(self) -> None:
        """Keep the view current until cancelled. Unavailable stores and invalid records do not end it."""
        failures = 0
        listed = False
        while True:
            seen_s = self._confirmed_s
            try:
                if not listed:
                    await self._list()
                    listed = True
                await self._watch()
            except Compacted:
                log.info("informer.relist_started", prefix=self._prefix, revision=self._revision)
                listed = False
            except StoreUnavailable as error:
                log.warning("informer.store_lost", prefix=self._prefix, error=str(error))
            failures = 0 if self._confirmed_s != seen_s else failures + 1
            await self._clock.sleep(self._backoff.wait_s(failures, self._rng))

    async def _list(self) -> None:
        listing = await self._store.list(self._prefix)
        self.lists += 1
        if listing.revision < self._revision:
            log.error("informer.store_went_back", prefix=self._prefix, revision=self._revision)
            raise StoreUnavailable(f"the store is at revision {listing.revision}, behind what was seen")
        self.unreadable.clear()
        fresh = {entry.key: self._versioned(entry) for entry in listing.entries}
        view = {key: record for key, record in fresh.items() if record is not None}
        old = self._view
        changes = [(key, None) for key in old if key not in view]
        self._advance(
            listing.revision,
            view,
            [*changes, *sorted(((k, r) for k, r in view.items() if old.get(k) != r), key=_mod_revision)],
        )

    async def _watch(self) -> None:
        async with aclosing(self._store.watch(self._prefix, self._revision)) as batches:
            async for batch in batches:
                self._apply(batch)

    def _apply(self, batch: WatchBatch) -> None:
        view: dict[str, Versioned[Record]] = dict(self._view) if batch.events else {}
        changes: list[tuple[str, Versioned[Record] | None]] = []
        for event in batch.events:
            if isinstance(event, KeyRemoved):
                self.unreadable.discard(event.key)
                if view.pop(event.key, None) is not None:
                    changes.append((event.key, None))
            elif (record := self._versioned(event.entry)) is not None:
                view[event.entry.key] = record
                changes.append((event.entry.key, record))
        self._advance(batch.revision, view if batch.events else self._view, changes)

    def _advance(
        self,
        revision: int,
        view: Mapping[str, Versioned[Record]],
        changes: list[tuple[str, Versioned[Record] | None]],
    ) -> None:
        """Move the view to a revision, then wake the waiters and call ``on_change``."""
        assert revision >= self._revision, "the view went back"
        first = not self.synced
        self._revision = revision
        self._confirmed_s = self._clock.monotonic_s()
        if changes or first:
            self._view = MappingProxyType(view)
            self._changed_revision = revision
            advanced, self._advanced = self._advanced, asyncio.Event()
            advanced.set()
        if self._on_change is not None:
            for key, record in changes:
                self._on_change(key, record)

    def _versioned(self, entry: Entry) -> Versioned[Record] | None:
        """Return the decoded entry; if that fails, the view's current record of that key, if any."""
        try:
            record = self._decode(entry)
        except Exception as error:  # an invalid record must not stop the readers
            log.error("informer.record_skipped", key=entry.key, error=repr(error))
            self.unreadable.add(entry.key)
            held = self._view.get(entry.key)
            return held if held is not None and held.create_revision == entry.create_revision else None
        self.unreadable.discard(entry.key)
        return Versioned(record, entry.create_revision, entry.mod_revision)


def _mod_revision(change: tuple[str, Versioned[Record] | None]) -> int:
    return change[1].mod_revision if change[1] is not None else 0
