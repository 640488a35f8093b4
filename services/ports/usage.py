"""Ports of usage: the outbox of events, the ledger's store, and what was spent under limits.

In the ledger's store a name is taken by one writer: this keeps two ledgers from writing the same part of a
log. Names are paths of lower-case letters, digits, ``-`` and ``/``; a part may end in ``.p``. The audit log
has a store of the same kind. Implementations: ``adapters/ledger_stores.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.limits import Limit
from services.core.usage import UsageEvent
from services.ports.limiter import Spent


class UsageOutbox(Protocol):
    """Delivers every event to the usage ledger at least once; the ledger counts it once."""

    def add(self, event: UsageEvent) -> None:
        """Queue an event. Returns at once; never raises for a full disk or a ledger that is unavailable."""


class Spending(Protocol):
    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        """Return the state of each limit, in their order, in its present period.

        Raises StoreUnavailable, within a bounded time.
        """


class LedgerStore(Protocol):
    """Every method raises StoreUnavailable, within a bounded time, when the store is unreachable or full."""

    async def create(self, name: str, data: bytes) -> bool:
        """Store an object completely and durably, or not at all. Returns False, and changes nothing, when the
        name is taken.

        After StoreUnavailable the object may be stored.
        """

    async def names(self, prefix: str, after: str = "") -> tuple[str, ...]:
        """Return the names that begin with ``prefix`` and are above ``after``, sorted. An object that was
        created before the call is included."""

    async def read(self, name: str) -> bytes:
        """Return the object. Raises NotFound."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; names that do not exist are ignored. They are free again."""


class TileStore(LedgerStore, Protocol):
    """The store of the audit log: its tiles are created once, its checkpoint is replaced."""

    async def replace(self, name: str, data: bytes) -> None:
        """Store an object completely and durably in the place of the one of this name, if there is one."""
