"""Port of the strongly consistent store of fleet state: revisions, leases, conditions, watches.

A revision counts the writes of the whole store. Every method raises StoreUnavailable after a bounded time
when the store does not respond. Implementations: ``adapters/etcd/store.py``, ``adapters/memory/store.py``,
and ``runtime/fleet_state/guarded_store.py``, which wraps one of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.records import Record, load


class Compacted(Exception):
    """The history after the requested revision was compacted: list again, then watch from the listed
    revision."""


class LeaseLost(Exception):
    """The lease expired or was revoked; the keys written under it are deleted."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0

    def load(self, kind: type[Record]) -> Record:
        """Return the record. Raises IntegrityError, which names the key."""
        return load(self.value, kind, self.key)


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything under a prefix, sorted by key, as of ``revision``."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class ModRevisionIs:
    """True when the key was last written at this revision; 0: the key does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreateRevisionIs:
    """True while the key is the one created at this revision. This fences the writes of a leader."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """True while the key exists and has this value."""

    key: str
    value: bytes


Condition = ModRevisionIs | CreateRevisionIs | ValueIs


@dataclass(frozen=True, slots=True)
class Committed:
    revision: int


@dataclass(frozen=True, slots=True)
class ConditionFailed:
    revision: int


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """A key was written."""

    entry: Entry

    @property
    def key(self) -> str:
        return self.entry.key


@dataclass(frozen=True, slots=True)
class KeyRemoved:
    """A key was deleted or its lease ended."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """All events of the revisions after the previous batch, up to ``revision``; empty for a bookmark."""

    revision: int
    events: tuple[KeyChanged | KeyRemoved, ...]


class Store(Protocol):
    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        """Apply all operations in one revision if all conditions hold, else none.

        Raises LeaseLost when an operation names a lease that has ended.
        """

    async def grant_lease(self, ttl_s: int) -> int:
        """Return the id of a new lease of at least one second."""

    async def keep_alive(self, lease_id: int) -> None:
        """Extend a lease by its full time to live. Raises LeaseLost when it has ended."""

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. A lease that has ended already is no error."""

    def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield every change after a revision, in order, without loss or repetition, until closed.

        Raises Compacted when that history is compacted, StoreUnavailable when the connection breaks: the
        caller resumes from the last revision that it received.
        """
