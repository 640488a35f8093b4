"""Create, get, list, update and delete of operator-made resources, one implementation for all kinds.

An etag is the store's mod_revision. Every write is conditional on what was read, so that no operator
overwrites another's change unseen. ``runtime/idempotent_writes.py`` documents request ids.

Every read and write passes the scope of its caller: for one that is bound to a tenant, records of others and
of the installation do not exist, and its request ids are its tenant's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from services.controlplane.fleet import readable
from services.controlplane.rollouts.records import Rollout
from services.core.aliases import Alias
from services.core.errors import AlreadyExists, Conflict, EtagMismatch, NotFound
from services.core.paging import page_of
from services.core.records import ApiKey, Budget, Deployment, Objective, Tenant, dump, load
from services.ports.clock import Clock
from services.ports.store import Committed, Delete, Entry, ModRevisionIs, Put, Store
from services.runtime.idempotent_writes import RequestLog, WriteAnswer, WriteRequest, WriteSet, fingerprint_of
from services.runtime.identity import caller_tenant

_TRIES: Final = 5


R = TypeVar("R", Tenant, ApiKey, Deployment, Budget, Objective, Rollout, Alias)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A stored record. ``sealed`` is the part of a secret that a repeated request's answer needs."""

    record: R
    create_revision: int
    mod_revision: int
    replayed: bool = False
    sealed: str = ""

    @property
    def etag(self) -> str:
        return str(self.mod_revision)


_ALONE: Final = WriteSet()


class Resources(Generic[R]):
    """One kind under one prefix."""

    def __init__(self, store: Store, clock: Clock, prefix: str, kind: type[R]) -> None:
        self._store = store
        self._requests = RequestLog(store)
        self._clock = clock
        self._prefix = prefix
        self._kind: type[R] = kind
        self._noun = kind.__name__.lower()  # the kind's name in messages

    def request(self, verb: str, content: object, request_id: str, *, etag: str = "") -> WriteRequest:
        """Return a request of this kind; ``content`` is the caller's input, without generated values."""
        if request_id and (tenant := caller_tenant()):
            request_id = f"{tenant}/{request_id}"
        return WriteRequest(self._noun, request_id, fingerprint_of(verb, dump(content), etag))

    async def replayed(self, request: WriteRequest) -> Stored[R] | None:
        """Return the earlier answer to a create or an update with this request id."""
        found = await self._requests.answered(request)
        if found is None:
            return None
        return Stored(
            load(found.answer.record, self._kind),
            found.answer.create_revision or found.revision,
            found.revision,
            replayed=True,
            sealed=found.answer.sealed,
        )

    async def done(self, request: WriteRequest) -> bool:
        """Whether a request with this id was answered. Raises Conflict when it had other content."""
        return await self._requests.answered(request) is not None

    async def create(
        self, record: R, request: WriteRequest, *, together: WriteSet = _ALONE, sealed: str = ""
    ) -> Stored[R]:
        """Store a new record. Raises AlreadyExists, Conflict for a request id used with other content."""
        name, key = record.meta.name, self.key(record.meta.name)
        if not _in_scope(record):
            raise self.not_found(name)
        if (found := await self.replayed(request)) is not None:
            return found
        now_s = self._clock.unix_s()
        record = replace(record, meta=replace(record.meta, create_unix_s=now_s, update_unix_s=now_s))
        data = dump(record)
        write = WriteSet(
            [ModRevisionIs(key, 0), *together.conditions], [Put(key, data), *together.operations]
        )
        done = await self._requests.commit(write, request, WriteAnswer(data, sealed=sealed))
        if isinstance(done, Committed):
            return Stored(record, done.revision, done.revision)
        if (found := await self.replayed(request)) is not None:
            return found
        if await self._store.get(key) is not None:
            raise AlreadyExists(f"{self._noun} {name} exists", name=name)
        raise Conflict(f"what {self._noun} {name} depends on changed meanwhile; try again", name=name)

    async def get(self, name: str) -> Stored[R]:
        """Return a record. Raises NotFound."""
        entry = await self._store.get(self.key(name))
        found = None if entry is None else self.stored(entry)
        if found is None or not _in_scope(found.record):
            raise self.not_found(name)
        return found

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[R], ...], str]:
        """Return a page sorted by name, and the next page's token."""
        return page_of(await self.all(), lambda found: found.record.meta.name, size=size, token=token)

    async def all(self) -> tuple[Stored[R], ...]:
        """Return every readable record in scope, sorted by name."""
        return self.by_name((await self._store.list(self._prefix)).entries)

    def by_name(self, entries: Iterable[Entry]) -> tuple[Stored[R], ...]:
        """Return the readable entries in scope, sorted by name."""
        found = [
            Stored(record, entry.create_revision, entry.mod_revision)
            for entry in entries
            if (record := readable(entry, self._kind)) is not None and _in_scope(record)
        ]
        return tuple(sorted(found, key=lambda stored: stored.record.meta.name))

    async def update(
        self,
        name: str,
        change: Callable[[R], R],
        request: WriteRequest,
        *,
        etag: str = "",
        together: WriteSet = _ALONE,
        sealed: str = "",
    ) -> Stored[R]:
        """Apply ``change`` to the stored record; ``change`` runs again after a concurrent write.

        Raises NotFound, EtagMismatch when ``etag`` is given and is not the stored one.
        """
        key = self.key(name)
        for _ in range(_TRIES):
            if (found := await self.replayed(request)) is not None:
                return found
            old = await self.get(name)
            self._require_etag(old, etag)
            record = change(old.record)
            created_s, now_s = old.record.meta.create_unix_s, self._clock.unix_s()
            meta = replace(record.meta, name=name, create_unix_s=created_s, update_unix_s=now_s)
            data = dump(record := replace(record, meta=meta))
            write = WriteSet(
                [ModRevisionIs(key, old.mod_revision), *together.conditions],
                [Put(key, data), *together.operations],
            )
            done = await self._requests.commit(write, request, WriteAnswer(data, old.create_revision, sealed))
            if isinstance(done, Committed):
                return Stored(record, old.create_revision, done.revision)
        raise Conflict(f"{self._noun} {name} is being changed by others; try again", name=name)

    async def delete(
        self, name: str, request: WriteRequest, *, etag: str = "", together: WriteSet = _ALONE
    ) -> None:
        """Remove a record. Raises NotFound, EtagMismatch, Conflict after a concurrent write."""
        if await self._requests.answered(request) is not None:
            return
        old = await self.get(name)
        self._require_etag(old, etag)
        conditions = [ModRevisionIs(self.key(name), old.mod_revision), *together.conditions]
        write = WriteSet(conditions, [Delete(self.key(name)), *together.operations])
        done = await self._requests.commit(write, request, WriteAnswer())
        if not isinstance(done, Committed) and await self._requests.answered(request) is None:
            raise Conflict(f"{self._noun} {name} changed meanwhile; try again", name=name)

    def key(self, name: str) -> str:
        return self._prefix + name

    def stored(self, entry: Entry) -> Stored[R]:
        return Stored(entry.load(self._kind), entry.create_revision, entry.mod_revision)

    def not_found(self, name: str) -> NotFound:
        return NotFound(f"there is no {self._noun} {name}", name=name)

    def _require_etag(self, stored: Stored[R], etag: str) -> None:
        require_etag(f"{self._noun} {stored.record.meta.name}", stored.mod_revision, etag)


def _in_scope(record: Tenant | ApiKey | Deployment | Budget | Objective | Rollout | Alias) -> bool:
    """Return whether the record exists for the caller of this task."""
    tenant = caller_tenant()
    if not tenant:
        return True
    match record:
        case Tenant():
            return record.meta.name == tenant
        case ApiKey() | Budget():
            return record.tenant == tenant
        case _:
            return False


def require_etag(what: str, mod_revision: int, etag: str) -> None:
    """Return if no etag is given or it equals the stored one. Raises EtagMismatch."""
    if etag and etag != str(mod_revision):
        raise EtagMismatch(
            f"{what} has etag {mod_revision}, not {etag}; read it again",
            name=what.partition(" ")[2],
            etag=etag,
        )
