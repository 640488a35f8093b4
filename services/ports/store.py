"""The strongly consistent store of fleet state: revisions, leases, conditions, watches.

A revision counts the writes of the whole store. Every method raises StoreUnavailable after a bounded
time when the store does not answer.
Implementations: ``adapters/etcd/store.py``, ``adapters/memory/store.py``, and
``runtime/fleet_state/guarded_store.py`` around one of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Compacted(Exception):
    """The history after the asked revision is gone: list again, then watch from there."""


class LeaseLost(Exception):
    """The lease expired or was revoked; what was written under it is deleted."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


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
    """Holds when the key was last written at this revision; 0 when it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreateRevisionIs:
    """Holds while the key is the one created at this revision: the fence of a leader's writes."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds while the key exists and has this value."""

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
class Changed:
    """A key was written."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Removed:
    """A key was deleted or its lease ended."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """All events of the revisions up to ``revision`` since the batch before; empty is a bookmark."""

    revision: int
    events: tuple[Changed | Removed, ...]


class Store(Protocol):
    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        """Apply all operations in one revision if all conditions hold, else none.

        Raises LeaseLost when an operation names a lease that is gone.
        """

    async def grant_lease(self, ttl_s: int) -> int:
        """Return the id of a new lease of at least one second."""

    async def keep_alive(self, lease_id: int) -> None:
        """Extend a lease by its full time to live. Raises LeaseLost when it is gone."""

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. A lease that is gone is no error."""

    def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield every change after a revision, in order, none lost or doubled, until closed.

        Raises Compacted when that history is gone, StoreUnavailable when the connection broke:
        the caller resumes from the last revision that it saw.
        """
