"""Create, get, list, update and delete of one kind of operator-made resource, once for all kinds.

An etag is the store's mod_revision. Every write is conditional on what was read, so that two operators
cannot overwrite each other unseen. A write that carries a request id leaves a marker under a lease: within
ten minutes the same id with the same content finds what the first one made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

from services.core.errors import AlreadyExists, Conflict, EtagMismatch, NotFound
from services.core.paging import page_of
from services.core.records import ROOT, Meta, dump, load
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Condition,
    ConditionFailed,
    Delete,
    Entry,
    ModRevisionIs,
    Operation,
    Put,
    Store,
)

REQUEST_TTL_S: Final = 600
_TRIES: Final = 5
_REQUESTS: Final = ROOT + "requests/"


class Resource(Protocol):
    @property
    def meta(self) -> Meta: ...


R = TypeVar("R", bound=Resource)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record as it is stored. ``replayed`` marks the answer to a repeated request id."""

    record: R
    create_revision: int
    mod_revision: int
    replayed: bool = False

    @property
    def etag(self) -> str:
        return str(self.mod_revision)


@dataclass(frozen=True, slots=True)
class Together:
    """What must hold, and what is written, in the same revision as a change."""

    conditions: Sequence[Condition] = ()
    operations: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class _Marker:
    name: str
    fingerprint: str


_ALONE: Final = Together()


class Resources(Generic[R]):
    """One kind under one prefix. ``noun`` stands in messages. ``with_meta`` puts a Meta into a record."""

    def __init__(
        self, store: Store, clock: Clock, prefix: str, kind: type[R], *, with_meta: Callable[[R, Meta], R]
    ) -> None:
        self._store = store
        self._clock = clock
        self._prefix = prefix
        self._kind = kind
        self._noun = kind.__name__.lower()
        self._with_meta = with_meta

    async def create(
        self, record: R, *, request_id: str = "", fingerprint: str = "", together: Together = _ALONE
    ) -> Stored[R]:
        """Store a new record. Raises AlreadyExists, Conflict for a request id used with other content.

        ``fingerprint`` stands for the content where the record has a random part; else it is the record's.
        """
        name, key = record.meta.name, self._key(record.meta.name)
        fingerprint = fingerprint or fingerprint_of(dump(record))
        if request_id and (found := await self._replay(request_id, fingerprint)) is not None:
            return found
        now_s = self._clock.unix_s()
        record = self._with_meta(record, replace(record.meta, create_unix_s=now_s, update_unix_s=now_s))
        write = Together(
            [ModRevisionIs(key, 0), *together.conditions], [Put(key, dump(record)), *together.operations]
        )
        done = await self._commit(write, name, request_id, fingerprint)
        if isinstance(done, Committed):
            return Stored(record, done.revision, done.revision)
        if request_id and (found := await self._replay(request_id, fingerprint)) is not None:
            return found
        if await self._store.get(key) is not None:
            raise AlreadyExists(f"{self._noun} {name} exists", name=name)
        raise Conflict(f"what {self._noun} {name} depends on changed meanwhile; try again", name=name)

    async def get(self, name: str) -> Stored[R]:
        """Return a record. Raises NotFound."""
        entry = await self._store.get(self._key(name))
        if entry is None:
            raise NotFound(f"there is no {self._noun} {name}", name=name)
        return self._stored(entry)

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[R], ...], str]:
        """Return a page sorted by name, and the next page's token."""
        return page_of(await self.all(), lambda found: found.record.meta.name, size=size, token=token)

    async def all(self) -> tuple[Stored[R], ...]:
        """Return every record, sorted by name."""
        listing = await self._store.list(self._prefix)
        return tuple(
            sorted((self._stored(entry) for entry in listing.entries), key=lambda s: s.record.meta.name)
        )

    async def update(
        self,
        name: str,
        change: Callable[[R], R],
        *,
        etag: str = "",
        request_id: str = "",
        fingerprint: str = "",
    ) -> Stored[R]:
        """Apply ``change`` to what is stored; it may run again when another write comes between.

        Raises NotFound, EtagMismatch when ``etag`` is given and is not the stored one. ``fingerprint``
        stands for the change, where a request id is given.
        """
        key = self._key(name)
        for _ in range(_TRIES):
            if request_id and (found := await self._replay(request_id, fingerprint)) is not None:
                return found
            old = await self.get(name)
            self._require_etag(old, etag)
            record = change(old.record)
            created_s, now_s = old.record.meta.create_unix_s, self._clock.unix_s()
            meta = replace(record.meta, name=name, create_unix_s=created_s, update_unix_s=now_s)
            record = self._with_meta(record, meta)
            write = Together([ModRevisionIs(key, old.mod_revision)], [Put(key, dump(record))])
            done = await self._commit(write, name, request_id, fingerprint)
            if isinstance(done, Committed):
                return Stored(record, old.create_revision, done.revision)
        raise Conflict(f"{self._noun} {name} is being changed by others; try again", name=name)

    async def delete(self, name: str, *, etag: str = "", together: Together = _ALONE) -> None:
        """Remove a record. Raises NotFound, EtagMismatch, Conflict when another write came between."""
        old = await self.get(name)
        self._require_etag(old, etag)
        conditions = [ModRevisionIs(self._key(name), old.mod_revision), *together.conditions]
        done = await self._store.commit([Delete(self._key(name)), *together.operations], conditions)
        if not isinstance(done, Committed):
            raise Conflict(f"{self._noun} {name} changed meanwhile; try again", name=name)

    async def _commit(
        self, write: Together, name: str, request_id: str, fingerprint: str
    ) -> Committed | ConditionFailed:
        """Write, together with the marker of the request id if there is one, which must be new."""
        if not request_id:
            return await self._store.commit(write.operations, write.conditions)
        marker = self._marker_key(request_id)
        lease_id = await self._store.grant_lease(REQUEST_TTL_S)
        done = await self._store.commit(
            [*write.operations, Put(marker, dump(_Marker(name, fingerprint)), lease_id)],
            [*write.conditions, ModRevisionIs(marker, 0)],
        )
        if not isinstance(done, Committed):
            await self._store.revoke_lease(lease_id)
        return done

    async def _replay(self, request_id: str, fingerprint: str) -> Stored[R] | None:
        entry = await self._store.get(self._marker_key(request_id))
        if entry is None:
            return None
        marker = load(entry.value, _Marker)
        if marker.fingerprint != fingerprint:
            raise Conflict("this request_id was used for another request", field="request_id")
        return replace(await self.get(marker.name), replayed=True)

    def _require_etag(self, stored: Stored[R], etag: str) -> None:
        if etag and etag != stored.etag:
            name = stored.record.meta.name
            raise EtagMismatch(
                f"{self._noun} {name} has etag {stored.etag}, not {etag}", name=name, etag=etag
            )

    def _marker_key(self, request_id: str) -> str:
        # Hashed: what a client sends never becomes a key as it is.
        return _REQUESTS + hashlib.sha256(f"{self._noun}\0{request_id}".encode()).hexdigest()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _stored(self, entry: Entry) -> Stored[R]:
        return Stored(load(entry.value, self._kind), entry.create_revision, entry.mod_revision)


def fingerprint_of(content: bytes) -> str:
    """Return what tells one content from another."""
    return hashlib.sha256(content).hexdigest()
