"""Port of the usage ledger's store: named objects that are written once.

A name is taken by one writer: this is what keeps two ledgers from writing the same part of a log. Names are
paths of lower-case letters, digits, ``-`` and ``/``. Implementations: ``adapters/ledger_stores.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

MAX_OBJECT_BYTES: Final = 256 * 1024 * 1024


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
