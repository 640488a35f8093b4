"""Idempotent writes by request id: a repetition within ten minutes gets the answer of the first.

A write with a request id adds a marker under a lease. The marker contains the answer. So a repetition gets
the first answer, whatever happened to the resource since. Marker and write have one revision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import Conflict
from services.core.records import ROOT, dump
from services.ports.store import (
    Committed,
    Condition,
    ConditionFailed,
    ModRevisionIs,
    Operation,
    Put,
    Store,
)

REQUEST_TTL_S: Final = 600
REQUESTS: Final = ROOT + "requests/"


@dataclass(frozen=True, slots=True)
class WriteSet:
    """The conditions and further writes of a change, in the same revision."""

    conditions: Sequence[Condition] = ()
    operations: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """``noun`` separates the ids of kinds. ``fingerprint`` detects a reused id."""

    noun: str
    request_id: str
    fingerprint: str

    @property
    def key(self) -> str:
        # Hashed, so that text from a client never becomes a key.
        return REQUESTS + hashlib.sha256(f"{self.noun}\0{self.request_id}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class WriteAnswer:
    """``record`` is the stored one, empty for a deletion. ``create_revision`` 0 stands for this write's."""

    record: bytes = b""
    create_revision: int = 0
    sealed: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """An earlier answer, at ``revision``."""

    answer: WriteAnswer
    revision: int


@dataclass(frozen=True, slots=True)
class _Marker:
    fingerprint: str
    answer: WriteAnswer


class RequestLog:
    """Stateless: all state is in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def answered(self, request: WriteRequest) -> Answered | None:
        """Return the earlier answer to the request; None for a new request or one without an id.

        Raises Conflict when the id was used for another request.
        """
        if not request.request_id:
            return None
        entry = await self._store.get(request.key)
        if entry is None:
            return None
        marker = entry.load(_Marker)
        if marker.fingerprint != request.fingerprint:
            raise Conflict("this request_id was used for another request", field="request_id")
        return Answered(marker.answer, entry.mod_revision)

    async def commit(
        self, write: WriteSet, request: WriteRequest, answer: WriteAnswer
    ) -> Committed | ConditionFailed:
        """Commit the write, with a marker for the request id if there is one, which must be new."""
        if not request.request_id:
            return await self._store.commit(write.operations, write.conditions)
        lease_id = await self._store.grant_lease(REQUEST_TTL_S)
        done = await self._store.commit(
            [*write.operations, Put(request.key, dump(_Marker(request.fingerprint, answer)), lease_id)],
            [*write.conditions, ModRevisionIs(request.key, 0)],
        )
        if not isinstance(done, Committed):
            await self._store.revoke_lease(lease_id)
        return done


def fingerprint_of(verb: str, content: bytes, etag: str = "") -> str:
    """Return a hash that identifies the content of a request."""
    return hashlib.sha256(b"\0".join([verb.encode(), etag.encode(), content])).hexdigest()
