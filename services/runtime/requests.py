"""What a request id promises: the same request again, within ten minutes, has the first one's answer.

A write that carries a request id leaves a marker under a lease, in the same revision. The marker holds the
answer, so a repetition is answered as the first was, whatever happened to the resource since; the revision
of the marker is that of the write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import Conflict
from services.core.records import ROOT, dump, load
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
class Together:
    """What must hold, and what is written, in the same revision as a change."""

    conditions: Sequence[Condition] = ()
    operations: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """``noun`` separates the ids of kinds; ``fingerprint`` tells what was asked, so that it may differ."""

    noun: str
    request_id: str
    fingerprint: str

    @property
    def key(self) -> str:
        # Hashed: what a client sends never becomes a key as it is.
        return REQUESTS + hashlib.sha256(f"{self.noun}\0{self.request_id}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """``record``: what was stored, as it was; empty for a deletion. ``create_revision`` 0: of this write."""

    record: bytes = b""
    create_revision: int = 0
    sealed: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that was given, at ``revision``."""

    answer: Answer
    revision: int


@dataclass(frozen=True, slots=True)
class _Marker:
    fingerprint: str
    answer: Answer


class RequestLog:
    """Stateless: all of it is in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def answered(self, request: Request) -> Answered | None:
        """Return the answer that the request had, None for a new one or one without an id.

        Raises Conflict when the id was used for something else.
        """
        if not request.request_id:
            return None
        entry = await self._store.get(request.key)
        if entry is None:
            return None
        marker = load(entry.value, _Marker)
        if marker.fingerprint != request.fingerprint:
            raise Conflict("this request_id was used for another request", field="request_id")
        return Answered(marker.answer, entry.mod_revision)

    async def commit(self, write: Together, request: Request, answer: Answer) -> Committed | ConditionFailed:
        """Write, together with the marker of the request id if there is one, which must be new."""
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
    """Return what tells one request from another."""
    return hashlib.sha256(b"\0".join([verb.encode(), etag.encode(), content])).hexdigest()
